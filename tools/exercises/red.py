"""Whether a scratch copy is mended: tests run on a copy of the repository with the scratch copy in the place
of its stage. First those of the mutant, then those that hold the same behaviour elsewhere."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from ..bench.stages_door import BadInput
from ..stages.mutants import Hung, copy_repo, run_pytest
from .mend import OWN, Exercise

LIMIT = 600  # [s] for one run: many times what it takes


@dataclass(frozen=True)
class Red:
    """One failing test: what it holds, what it expected and got, and in which lines, the test's own first."""

    test: str
    holds: str = ""
    expected: str = ""
    got: str = ""
    first: str = ""  # the first difference of two lists
    line: str = ""  # the statement of the test that failed
    where: list[str] = field(default_factory=list)


def run_tests(
    repo: Path, exercise: Exercise, stage: Path, tests: tuple[str, ...], at_most: int = 0
) -> list[Red]:
    """The tests that fail on the stage in `stage`; with `at_most`, so many of them and no more.

    Raises BadInput where pytest could not run them at all.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_repo(repo, Path(folder) / "repo")
        shutil.rmtree(copy / "stages" / exercise.stage)
        left = shutil.ignore_patterns("__pycache__", OWN)
        shutil.copytree(stage, copy / "stages" / exercise.stage, ignore=left)
        told = Path(folder) / "red.jsonl"
        report = ["-p", "tools.exercises.pytest_report", f"--red={told}"]
        words = ["-q", "--tb=no", f"--maxfail={at_most}", *report, *tests]
        try:
            code, output = run_pytest(copy, words, exercise.stage, LIMIT)
        except Hung:
            return [Red(tests[0], got=f"it had not ended after {LIMIT} s", expected="an end")]
        lines = told.read_text(encoding="utf-8").splitlines() if told.is_file() else []
    red = [Red(**json.loads(line)) for line in lines]
    if code == 0 and not red:
        return []
    if not red:
        raise BadInput(f"pytest could not run {' '.join(tests)}:\n{output}")
    return red
