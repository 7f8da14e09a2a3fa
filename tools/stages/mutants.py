"""`make mutants`: small wrong versions of a stage, each of which a named test must fail on.

A mutant is one file, tests/mutants/NAME.patch: a header in TOML and below it a diff with paths inside the
stage (`git diff --relative=stages/STAGE`). The header says

    stage = "part4_worker"
    breaks = "one sentence: what goes wrong"
    killed_by = ["tests/contract/test_x.py::test_y"]    # pytest ids; a part in brackets picks a case
    commit = "…"    # only of a historical defect: the upstream commit that mended it

Each mutant is put into a copy of the repository and its tests run there. The same tests run once on a copy as
it is, where they must pass: a test that fails anyway kills nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
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
COPIED = ("stages", "tools", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """One patch. `commit` is None where upstream never had the defect."""

    path: Path
    stage: str
    breaks: str
    killed_by: tuple[str, ...]
    commit: str | None = None

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
        raise BadInput(f"needs a header with stage, breaks, killed_by and perhaps commit ({error})") from None
    if len(header) == 1 or not mutant.killed_by or not mutant.breaks.strip():
        raise BadInput("needs a diff, a sentence `breaks` and at least one test in `killed_by`")
    return mutant


def failing(repo: Path, tests: list[str], stages: set[str]) -> set[str]:
    """Those of `tests` that fail in `repo`; of several cases one is enough. The contract is for `stages`.

    Raises BadInput where pytest could not run them.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    if any(test.startswith("tests/contract/") for test in tests):
        command += [f"--stage={stage}" for stage in sorted(stages)]
    environment = {**os.environ, "PYTHONPATH": str(repo), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "1000"}
    done = subprocess.run(
        [*command, *tests], cwd=repo, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1):
        raise BadInput(f"pytest could not run {' '.join(tests)}:\n{done.stdout}{done.stderr}")
    lines = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    return {test for test in tests if any(re.match(rf"{re.escape(test)}($|\[)", line) for line in lines)}


def copy_repo(repo: Path, to: Path) -> Path:
    """A copy of what tests need, without caches. The work tree is copied, committed or not."""
    for name in COPIED:
        if (repo / name).is_dir():
            shutil.copytree(repo / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(repo / name, to / name)
    return to


def survivors_of(repo: Path, mutant: Mutant) -> list[str]:
    """The tests of `killed_by` that pass on the mutant. Raises BadInput where it does not apply."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_repo(repo, Path(folder))
        if error := mutant.apply(copy):
            raise BadInput(f"{mutant.path.name} does not apply: {error}")
        dead = failing(copy, list(mutant.killed_by), {mutant.stage})
    return [test for test in mutant.killed_by if test not in dead]


@story.verb
def mutants(
    names: Annotated[list[str] | None, typer.Argument(help="Some of tests/mutants, without .patch.")] = None,
) -> None:
    """Show for each mutant that the tests it names fail on it, and pass without it."""
    repo = story.REPO
    folder = repo / "tests" / "mutants"
    paths = [folder / f"{name}.patch" for name in names] if names else sorted(folder.glob("*.patch"))
    if absent := [path.stem for path in paths if not path.is_file()]:
        raise BadInput(f"There is no mutant {absent[0]!r} in tests/mutants.")
    chosen = [read_mutant(path) for path in paths]
    console, alive = Console(highlight=False, soft_wrap=True), 0
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(AT_A_TIME) as pool:
        tests = sorted({test for mutant in chosen for test in mutant.killed_by})
        copy, stages = copy_repo(repo, Path(scratch)), {mutant.stage for mutant in chosen}
        unmutated = pool.submit(failing, copy, tests, stages)
        found = pool.map(lambda mutant: survivors_of(repo, mutant), chosen)
        for mutant, passing in zip(chosen, found, strict=True):
            verdicts = {test: "killed by" for test in mutant.killed_by}
            verdicts |= {test: "SURVIVES" for test in passing}
            verdicts |= {test: "fails without it too:" for test in unmutated.result() & verdicts.keys()}
            alive += set(verdicts.values()) != {"killed by"}
            console.print(f"[bold]{mutant.name}[/bold] {escape(mutant.breaks)}")
            for test, verdict in verdicts.items():
                console.print(f"    {verdict} {escape(test)}")
    console.print(f"{len(chosen) - alive} of {len(chosen)} killed.")
    if alive:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(mutants)
