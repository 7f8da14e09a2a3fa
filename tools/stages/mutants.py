"""`make mutants`: small wrong versions of a stage, each of which a named test must fail on.

A mutant is one file, tests/mutants/NAME.patch: a header in TOML and below it a diff with paths inside the
stage (`git diff --relative=stages/STAGE`). The header says

    stage = "part4_worker"
    breaks = "one sentence: what goes wrong"
    killed_by = ["tests/contract/test_x.py::test_y"]    # pytest ids; a part in brackets picks a case
    commit = "…"    # only of a historical defect: the upstream commit that mended it
    hangs = true    # only where waiting for ever is what goes wrong, and no quicker test can tell

Each mutant is put into a copy of the repository and its tests run there, for so long and no longer. The same
tests run once on a copy as it is, where they must pass: a test that fails anyway kills nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..bench.stages_door import BadInput
from . import story

AT_A_TIME = 2
LIMIT = 180  # [s] for the tests of one mutant: many times what they take
COPIED = ("stages", "tools", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """One patch. `commit` is None where upstream never had the defect; `hangs` if it shows by hanging."""

    path: Path
    stage: str
    breaks: str
    killed_by: tuple[str, ...]
    commit: str | None = None
    hangs: bool = False

    @property
    def name(self) -> str:
        return self.path.stem

    def apply(self, repo: Path, only_check: bool = False) -> str | None:
        """Patch the stage in `repo`, or see whether that would work; git's words where it does not."""
        how = ["--check"] if only_check else []
        done = story.git(
            "apply", *how, f"--directory=stages/{self.stage}", self.path.resolve(), cwd=repo, check=False
        )
        return done.stderr.decode(errors="replace").strip().splitlines()[0] if done.returncode else None


def read_mutant(path: Path) -> Mutant:
    """Raises BadInput, without the path, for a header that does not say what it must."""
    header = re.split(
        r"^(?:diff --git |--- )", path.read_text(encoding="utf-8"), maxsplit=1, flags=re.MULTILINE
    )
    try:
        mutant = Mutant(path, **tomllib.loads(header[0]))
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise BadInput(
            f"needs a header with stage, breaks, killed_by and perhaps commit, hangs ({error})"
        ) from None
    if len(header) == 1 or not mutant.killed_by or not mutant.breaks.strip():
        raise BadInput("needs a diff, a sentence `breaks` and at least one test in `killed_by`")
    return mutant


class Hung(Exception):
    """Tests that had not ended when their time was over."""


def failing(repo: Path, tests: list[str], stage: str, limit: float | None = None) -> set[str]:
    """Those of `tests` that fail in `repo`; of several cases one is enough. The contract is for `stage`.

    Raises BadInput where pytest could not run them, and Hung after `limit` seconds, when all is ended.
    """
    code, output = run_pytest(repo, ["-q", "-rfE", "--tb=no", *tests], stage, limit)
    if code not in (0, 1):
        raise BadInput(f"pytest could not run {' '.join(tests)}:\n{output}")
    lines = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, flags=re.MULTILINE)
    return {test for test in tests if any(re.match(rf"{re.escape(test)}($|\[)", line) for line in lines)}


def run_pytest(repo: Path, words: list[str], stage: str, limit: float | None = None) -> tuple[int, str]:
    """Exit status and output of pytest in a copy of the repository; the contract is run for `stage`.

    Raises Hung after `limit` seconds, when all is ended.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    if any(word.startswith("tests/contract/") for word in words):
        command += [f"--stage={stage}"]
    environment = {**os.environ, "PYTHONPATH": str(repo), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "1000"}
    # In a session of its own, so that what the tests have started ends with them.
    process = subprocess.Popen(
        command, cwd=repo, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise Hung from None
        raise
    return process.returncode, output


def copy_repo(repo: Path, to: Path) -> Path:
    """A copy of what tests need, without caches. The work tree is copied, committed or not."""
    for name in COPIED:
        if (repo / name).is_dir():
            shutil.copytree(repo / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(repo / name, to / name)
    return to


def verdicts_on(repo: Path, mutant: Mutant) -> dict[str, str]:
    """What came of each test of `killed_by`. Raises BadInput where the mutant does not apply."""
    tests = mutant.killed_by
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_repo(repo, Path(folder))
        if error := mutant.apply(copy):
            raise BadInput(f"{mutant.path.name} does not apply: {error}")
        try:
            dead = failing(copy, list(tests), mutant.stage, LIMIT)
        except Hung:
            return dict.fromkeys(tests, "killed by hanging in" if mutant.hangs else "HANGS in")
    return {test: "killed by" if test in dead else "SURVIVES" for test in tests}


@story.verb
def mutants(
    names: Annotated[list[str] | None, typer.Argument(help="Some of tests/mutants, without .patch.")] = None,
) -> None:
    """Show for each mutant that the tests it names fail on it, and pass without it."""
    repo, began = story.REPO, time.monotonic()
    folder = repo / "tests" / "mutants"
    paths = [folder / f"{name}.patch" for name in names] if names else sorted(folder.glob("*.patch"))
    if absent := [path.stem for path in paths if not path.is_file()]:
        raise BadInput(f"There is no mutant {absent[0]!r} in tests/mutants.")
    chosen = [read_mutant(path) for path in paths]
    console, alive = Console(highlight=False, soft_wrap=True), 0
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(AT_A_TIME) as pool:
        copy = copy_repo(repo, Path(scratch))
        tests = {
            stage: sorted({test for mutant in chosen if mutant.stage == stage for test in mutant.killed_by})
            for stage in sorted({mutant.stage for mutant in chosen})
        }
        unmutated = {stage: pool.submit(failing, copy, tests[stage], stage) for stage in tests}
        found = pool.map(lambda mutant: verdicts_on(repo, mutant), chosen)
        for mutant, verdicts in zip(chosen, found, strict=True):
            in_vain = unmutated[mutant.stage].result() & verdicts.keys()
            verdicts |= {test: "fails without it too:" for test in in_vain}
            alive += not all(verdict.startswith("killed") for verdict in verdicts.values())
            console.print(f"[bold]{mutant.name}[/bold] {escape(mutant.breaks)}")
            for test, verdict in verdicts.items():
                console.print(f"    {verdict} {escape(test)}")
    console.print(f"{len(chosen) - alive} of {len(chosen)} killed, in {time.monotonic() - began:.0f} s.")
    if alive:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(mutants)
