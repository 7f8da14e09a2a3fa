"""The exercises "mend the bird", `docs/data/exercises.toml`: stages with a historical defect put back.

    [[exercise]]
    id = "second-request"           # by what is seen, not by what is wrong
    mutant = "parents_…"            # tests/mutants/NAME.patch: stage, patch, the test that fails
    title = "…"
    symptom = "…"                   # what a user of such an engine would report
    hints = ["…", "…", "…"]         # the reader's next question, each nearer than the one before
    mended = "…"                    # what was wrong, told afterwards
    also = ["tests/…"]              # what must hold besides the mutant's own test: files or tests, a minute
                                    # and a half at most; else whoever fits that one case has mended it
    commit = "…"                    # where the mutant names none: the upstream commit that is the lesson
    wrong = { file = "…", given = "…", yours = "…" }    # a mend that must not pass: text put for other text

A scratch copy is a whole stage. In its folder `.exercise` stand the stage as it was given, and what the
reader has tried.
"""

from __future__ import annotations

import difflib
import json
import os
import shlex
import shutil
import tempfile
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..bench.stages_door import BadInput
from ..models.cache import write_json
from ..provenance import REPO
from ..sentences import did_you_mean
from ..stages.mutants import Mutant, read_mutant
from ..stages.story import ORDER, read_files

EXERCISES = REPO / "docs" / "data" / "exercises.toml"
COPIES = REPO / "exercises"
HINTS = 3
OWN = ".exercise"  # inside a scratch copy


@dataclass(frozen=True)
class WrongMend:
    """An edit that a reader might take for a mend: in `file` of a copy, `yours` for `given`."""

    file: str
    given: str
    yours: str

    def put_in(self, stage: Path) -> None:
        """Edit a copy. Raises BadInput where `given` does not stand there exactly once."""
        path = stage / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.given) != 1:
            raise BadInput(f"{self.file} has {text.count(self.given)} times what its wrong mend edits.")
        path.write_text(text.replace(self.given, self.yours), encoding="utf-8")


@dataclass(frozen=True)
class Exercise:
    """One exercise; the fields are those of exercises.toml, with mutant and wrong mend read."""

    id: str
    mutant: Mutant
    title: str
    symptom: str
    hints: tuple[str, ...]
    mended: str
    commit: str
    also: tuple[str, ...]
    wrong: WrongMend | None = None

    @property
    def stage(self) -> str:
        return self.mutant.stage


def read_exercises(repo: Path = REPO) -> list[Exercise]:
    """Every exercise, in the order of the stages. Raises BadInput, naming it, for one that is malformed."""
    found = [_exercise(repo, entry) for entry in _table(repo).get("exercise", [])]
    ids = [exercise.id for exercise in found]
    if twice := {name for name in ids if ids.count(name) > 1}:
        raise BadInput(f"exercises.toml: the id {min(twice)!r} is used twice.")
    return sorted(found, key=lambda exercise: ORDER.index(exercise.stage))


def find_exercise(exercises: list[Exercise], name: str) -> Exercise:
    """The exercise with that id. Raises BadInput, with the ids there are, for another name."""
    for exercise in exercises:
        if exercise.id == name:
            return exercise
    ids = [exercise.id for exercise in exercises]
    raise BadInput(f"There is no exercise {name!r}; there are {', '.join(ids)}.{did_you_mean(name, ids)}")


def default_folder(exercise: Exercise) -> Path:
    """Where a copy goes by itself: exercises/NAME of this repository, as seen from here."""
    return Path(os.path.relpath(COPIES / exercise.id))


def command(verb: str, exercise: Exercise, folder: Path) -> str:
    """`fledge exercise VERB` for the copy in `folder`, to be pasted."""
    place = "" if folder == default_folder(exercise) else f" --dir {shlex.quote(str(folder))}"
    return f"fledge exercise {verb} {exercise.id}{place}"


def _table(repo: Path) -> dict[str, Any]:
    path = repo / EXERCISES.relative_to(REPO)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{path} cannot be used ({type(error).__name__}: {error}).") from None


def _exercise(repo: Path, entry: dict[str, Any]) -> Exercise:
    where = f"exercises.toml, exercise {entry.get('id', '?')!r}"
    path = repo / "tests" / "mutants" / f"{entry.get('mutant')}.patch"
    if not path.is_file():
        raise BadInput(f"{where}: there is no mutant {entry.get('mutant')!r} in tests/mutants.")
    mutant = read_mutant(path)
    try:
        lists = {name: tuple(entry[name]) for name in ("hints", "also")}
        wrong = {"wrong": WrongMend(**entry["wrong"])} if "wrong" in entry else {}
        found = Exercise(**{"commit": mutant.commit, **entry, **lists, **wrong, "mutant": mutant})
    except (TypeError, KeyError) as error:
        raise BadInput(f"{where}: {error}") from None
    if len(found.hints) != HINTS or not found.commit or not found.also or mutant.stage not in ORDER:
        raise BadInput(f"{where}: it needs {HINTS} hints, a commit, tests, and a stage of the story.")
    return found


# The scratch copy


class Spoilt(BadInput):
    """What is remembered of a copy cannot be read; the copy itself may be whole."""


@dataclass
class Tried:
    """What a reader has done with a copy."""

    exercise: str
    hints: int = 0
    checks: int = 0  # of an edited copy
    green: bool = False


@dataclass
class Scratch:
    """A copy of a stage that the reader edits."""

    folder: Path
    tried: Tried = field(default_factory=lambda: Tried(""))

    @classmethod
    def make(cls, repo: Path, exercise: Exercise, folder: Path) -> Scratch:
        """A new copy with the defect in it; all of it or nothing.

        Raises BadInput where something stands at `folder`, or the patch does not fit the stage.
        """
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadInput(
                f"{folder} is there and is not empty. To start over and keep your work: "
                f"{command('reset', exercise, folder)} (--dir puts the copy elsewhere)."
            )
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            # Patched elsewhere: inside a repository git would take the patch's paths for the repository's.
            with (
                tempfile.TemporaryDirectory() as outside,
                tempfile.TemporaryDirectory(dir=folder.parent, prefix=".start-") as work,
            ):
                given, whole = put_in(repo, exercise, Path(outside)), Path(work) / "whole"
                shutil.copytree(given, whole)
                shutil.copytree(given, whole / OWN / "given")
                write_json(whole / OWN / "tried.json", asdict(Tried(exercise.id)))
                if folder.exists():
                    folder.rmdir()
                os.replace(whole, folder)
        except OSError as error:
            raise BadInput(
                f"{folder} cannot be written ({error.strerror}): --dir puts it elsewhere."
            ) from None
        return cls.open(folder, exercise)

    @classmethod
    def open(cls, folder: Path, exercise: Exercise) -> Scratch:
        """The copy in `folder`.

        Raises BadInput where there is none, or it is another exercise's, and Spoilt where one cannot tell.
        """
        try:
            tried = Tried(**json.loads((folder / OWN / "tried.json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise BadInput(
                f"There is no copy of {exercise.id} in {folder}. Make one: "
                f"{command('start', exercise, folder)} (or say with --dir where it is)."
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise Spoilt(
                f"{folder / OWN / 'tried.json'} cannot be read ({error}). To start over: "
                f"{command('reset', exercise, folder)}"
            ) from None
        if tried.exercise != exercise.id:
            raise BadInput(f"{folder} is a copy of {tried.exercise!r}, not of {exercise.id!r}.")
        return cls(folder, tried)

    def save(self) -> None:
        write_json(self.folder / OWN / "tried.json", asdict(self.tried))

    def edits(self) -> str:
        """What the reader has changed, as a unified diff; "" for nothing."""
        return _diff(read_files(self.folder / OWN / "given"), read_files(self.folder), "yours")

    def set_aside(self) -> Path | None:
        """Give the copy a name of its own, if the reader has changed something, else remove it.

        Returns where it is kept.
        """
        if not self.edits():
            shutil.rmtree(self.folder)
            return None
        return keep(self.folder)


def keep(folder: Path) -> Path:
    """Rename a folder to the first free NAME.backup-N beside it."""
    number = 1
    while (kept := folder.with_name(f"{folder.name}.backup-{number}")).exists():
        number += 1
    folder.rename(kept)
    return kept


def put_in(repo: Path, exercise: Exercise, work: Path) -> Path:
    """The stage with the defect in it, in a new folder below `work`. Raises BadInput where it does not fit.

    `work` lies in no repository of git.
    """
    stage = work / "stages" / exercise.stage
    source = repo / "stages" / exercise.stage
    shutil.copytree(source, stage, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    if error := exercise.mutant.apply(work):
        raise BadInput(f"{exercise.mutant.path.name} does not fit stages/{exercise.stage}: {error}")
    return stage


def solution(repo: Path, exercise: Exercise) -> str:
    """The patch that mends, as a unified diff."""
    with tempfile.TemporaryDirectory() as work:
        broken = put_in(repo, exercise, Path(work))
        return _diff(read_files(broken), read_files(repo / "stages" / exercise.stage), "mended")


def _diff(given: dict[str, bytes], other: dict[str, bytes], label: str) -> str:
    """A unified diff of two folders' files; a last line without its end gets one."""
    parts: list[str] = []
    for name in sorted(given.keys() | other.keys()):
        old, new = (files.get(name, b"").decode(errors="replace") for files in (given, other))
        lines = (text.splitlines(keepends=True) for text in (old, new))
        parts += difflib.unified_diff(*lines, f"given/{name}", f"{label}/{name}")
    return "".join(line if line.endswith("\n") else line + "\n" for line in parts)
