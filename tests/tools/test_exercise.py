"""`fledge exercise …` on a made-up exercise: a copy, its red and its green, hints; nothing is lost."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tests.tools.stage_helpers import NAMES, MadeUp
from tools.bench.stages_door import BadInput
from tools.exercises import mend, verbs
from tools.exercises.course import wrong_mends_that_pass
from tools.exercises.mend import Scratch, read_exercises
from tools.exercises.pytest_report import _asserted
from tools.provenance import REPO

pytestmark = pytest.mark.slow

STAGE = NAMES[3]
COMMIT = "a47bf39123c4f5bffcf96a80640f234e3f637c4c"
TESTS = f"""\
from stages.{STAGE} import values

def test_same():
    \"\"\"Both are one.\"\"\"
    assert values.both() == [values.y, 1]
"""
OTHERS = f"""\
import pytest
from stages.{STAGE} import values

@pytest.mark.parametrize("times", [1, 2])
def test_alone(times):
    assert values.x * times == times
"""
VALUES = "x = 1\ny = 1\n\n\ndef both():\n    return [x, y]\n"
PATCH = f"""\
stage = "{STAGE}"
breaks = "x is two"
killed_by = ["tests/test_values.py::test_same"]
commit = "{COMMIT}"

diff --git a/values.py b/values.py
--- a/values.py
+++ b/values.py
@@ -1,2 +1,2 @@
-x = 1
+x = 2
 y = 1
"""
EXERCISES = """\
[[exercise]]
id = "two"
mutant = "x_is_two"
title = "Two come"
symptom = "One was expected."
hints = ["What is x?", "What was x?", "What should x be?"]
mended = "x is one."
also = ["tests/test_others.py"]
wrong = { file = "values.py", given = "[x, y]", yours = "[1, y]" }
"""


@pytest.fixture
def repo(made_up: MadeUp, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one exercise, and a folder inside it to work in, so that git finds one around it."""
    folder = made_up.folder
    made_up.write(STAGE, "values.py", VALUES)
    (folder / "tests" / "mutants").mkdir(parents=True)
    (folder / "tests" / "mutants" / "x_is_two.patch").write_text(PATCH)
    (folder / "tests" / "test_values.py").write_text(TESTS)
    (folder / "tests" / "test_others.py").write_text(OTHERS)
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (folder / "docs" / "data").mkdir(parents=True)
    (folder / "docs" / "data" / "exercises.toml").write_text(EXERCISES)
    (folder / "tools" / "exercises").mkdir(parents=True)
    for path in ("__init__.py", "exercises/__init__.py", "exercises/pytest_report.py"):
        shutil.copy(REPO / "tools" / path, folder / "tools" / path)
    made_up.commit()
    monkeypatch.setattr(verbs, "REPO", folder)
    monkeypatch.setattr(read_exercises, "__defaults__", (folder,))
    monkeypatch.setattr(mend, "COPIES", folder / "desk" / "exercises")
    monkeypatch.setenv("FLEDGE_CACHE", str(folder / "cache"))
    (folder / "desk").mkdir()
    monkeypatch.chdir(folder / "desk")
    return folder


@pytest.fixture
def exercise(fledge: Callable[..., Result]) -> Callable[..., Result]:
    return lambda *words: fledge("exercise", *words)


@pytest.fixture
def copy(repo: Path, exercise: Callable[..., Result]) -> Path:
    assert exercise("start", "two").exit_code == 0
    return Path("exercises/two")


def mend_it(copy: Path) -> None:
    (copy / "values.py").write_text(VALUES)


def test_the_copy_has_the_defect_and_the_stage_has_not(copy: Path, repo: Path) -> None:
    assert (copy / "values.py").read_text() == VALUES.replace("x = 1", "x = 2")
    assert (repo / "stages" / STAGE / "values.py").read_text() == VALUES
    names = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    whole = {path.name for path in (repo / "stages" / STAGE).iterdir()}
    assert whole <= names and {name for name in names if "/" not in name} == whole


def test_red_then_green(copy: Path, exercise: Callable[..., Result]) -> None:
    red = exercise("check", "two")
    assert red.exit_code == 1
    lines = [" ".join(line.split()) for line in red.stdout.splitlines()]
    assert lines == [
        "red tests/test_values.py::test_same",
        "holds Both are one.",
        "expected [1, 1]",
        "got [2, 1]",
        "first [0]: got 2, expected 1",
        "in assert values.both() == [values.y, 1]",
        "where tests/test_values.py:5, in test_same",
    ]
    mend_it(copy)
    green = exercise("check", "two")
    assert green.exit_code == 0 and green.stdout.startswith("green  x is one.")
    assert "a47bf39123" in green.stdout and "#2730" in green.stdout and "eagle_utils.py" in green.stdout
    assert "a47bf39123" not in red.output  # the mending commit is shown after green
    (copy / "values.py").write_text(VALUES.replace("x = 1", "x = 3"))  # once mended, it stays so
    assert "exercise diff two" in exercise("check", "two").stderr
    assert "mended" in exercise("list").stdout
    told = exercise("hint", "two").stdout
    assert told.startswith("You have mended it. x is one.") and "a47bf39123" in told and "of 3" not in told


def test_a_mend_of_the_shown_case_alone_is_none(
    copy: Path, exercise: Callable[..., Result], repo: Path
) -> None:
    (copy / "values.py").write_text(VALUES.replace("x = 1", "x = 2").replace("[x, y]", "[1, y]"))
    red = exercise("check", "two")
    assert red.exit_code == 1 and "green" not in red.stdout
    lines = [" ".join(line.split()) for line in red.stdout.splitlines()]
    assert lines[:4] == [
        "The case that was shown passes, 2 others do not. The first of them:",
        "red tests/test_others.py::test_alone[1]",
        "expected 1",
        "got 2",
    ]
    assert lines[-1] == "red tests/test_others.py::test_alone[2]"
    assert "tried" in exercise("list").stdout and "mended" not in exercise("list").stdout


def test_a_wrong_mend_that_passes_is_a_hole(repo: Path) -> None:
    """Where what else must hold is no more than the case that is shown, the gate says so."""
    path = repo / "docs" / "data" / "exercises.toml"
    assert wrong_mends_that_pass(repo, read_exercises(repo)) == []
    path.write_text(EXERCISES.replace("tests/test_others.py", "tests/test_values.py"))
    assert wrong_mends_that_pass(repo, read_exercises(repo)) == ["two is green with a wrong mend."]
    path.write_text(EXERCISES.replace("[x, y]", "[x]"))
    with pytest.raises(BadInput, match="values.py has 0 times what its wrong mend edits"):
        wrong_mends_that_pass(repo, read_exercises(repo))


@pytest.mark.parametrize(
    "text, got, line",
    [
        (VALUES.replace("return [x, y]", "return [x, "), "SyntaxError: ", "exercises/two/values.py:6"),
        (
            VALUES.replace("return [x, y]", "return [x, z]"),
            "NameError: name 'z' is not defined",
            "exercises/two/values.py:6, in both",
        ),
        ("import nothing_like_it\n" + VALUES, "ModuleNotFoundError: ", "exercises/two/values.py:1"),
    ],
)
def test_a_slip_of_the_readers_is_red_with_its_place(
    copy: Path, exercise: Callable[..., Result], text: str, got: str, line: str
) -> None:
    (copy / "values.py").write_text(text)
    red = exercise("check", "two")
    assert red.exit_code == 1, red.output
    assert f"got       {got}" in red.stdout and f"where     {line}" in red.stdout


def test_three_hints_and_no_more(copy: Path, exercise: Callable[..., Result]) -> None:
    said = [exercise("hint", "two") for _ in range(4)]
    assert [done.stdout.strip() for done in said] == [
        "1 of 3: What is x?", "2 of 3: What was x?", "3 of 3: What should x be?", "3 of 3: What should x be?",
    ]  # fmt: skip
    assert "These were all" in said[3].stderr and "These were all" not in said[2].stderr


def test_the_solution_opens_after_a_try(copy: Path, exercise: Callable[..., Result]) -> None:
    closed = exercise("solution", "two")
    assert closed.exit_code == 2 and "Try first" in closed.stderr and closed.stdout == ""
    exercise("check", "two")  # of the copy as it was given: no try
    assert exercise("solution", "two").exit_code == 2
    assert "-x = 2\n+x = 1\n" in exercise("solution", "two", "--give-up").stdout
    assert exercise("solution", "two").exit_code == 2
    (copy / "values.py").write_text(VALUES.replace("x = 1", "x = 3"))
    exercise("check", "two")
    opened = exercise("solution", "two")
    assert opened.exit_code == 0 and "-x = 2\n+x = 1\n" in opened.stdout and "#2730" in opened.stdout
    assert "x = 3" in (copy / "values.py").read_text()


def test_the_diff_is_the_readers_own(copy: Path, exercise: Callable[..., Result]) -> None:
    assert exercise("diff", "two").stdout == ""
    (copy / "values.py").write_text(VALUES.replace("x = 1", "x = 3"))
    (copy / "notes.md").write_text("mine\n")
    shown = exercise("diff", "two").stdout
    assert "-x = 2\n+x = 3\n" in shown and "+mine\n" in shown and "x = 1" not in shown


def test_reset_keeps_what_was_done(copy: Path, exercise: Callable[..., Result]) -> None:
    exercise("hint", "two")
    assert "kept" not in exercise("reset", "two").stdout  # nothing was done
    for text in ("x = 3\n", "x = 4\n"):
        (copy / "values.py").write_text(text)
        assert "Your work is kept in" in exercise("reset", "two").stdout
    assert (copy / "values.py").read_text() == VALUES.replace("x = 1", "x = 2")
    kept = [(copy.parent / f"two.backup-{number}" / "values.py").read_text() for number in (1, 2)]
    assert kept == ["x = 3\n", "x = 4\n"]
    assert exercise("hint", "two").stdout.startswith("1 of 3")


def test_start_writes_over_nothing(copy: Path, exercise: Callable[..., Result], tmp_path: Path) -> None:
    mend_it(copy)
    again = exercise("start", "two")
    assert again.exit_code == 2 and "is not empty" in again.stderr
    assert (copy / "values.py").read_text() == VALUES
    (tmp_path / "file").write_text("mine")
    assert exercise("start", "two", "--dir", tmp_path / "file").exit_code == 2
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert exercise("start", "two", "--dir", tmp_path / "empty").exit_code == 0
    assert exercise("check", "two", "--dir", tmp_path / "empty").exit_code == 1
    assert sorted(path.name for path in Path("exercises").iterdir()) == ["two"]


def test_the_next_commands_work_when_pasted(
    repo: Path, exercise: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder, and for a copy in a place of its own with a space in it."""
    elsewhere = tmp_path / "my own"
    shown = exercise("start", "two", "--dir", elsewhere).stdout.splitlines()[-1]
    words = shlex.split(shown.partition(": fledge exercise ")[2])
    assert words == ["check", "two", "--dir", str(elsewhere)]
    red = exercise(*words)
    assert red.exit_code == 1
    hint = shlex.split(red.stderr.splitlines()[-1].partition(": fledge exercise ")[2])
    assert exercise(*hint).stdout.startswith("1 of 3")
    exercise("start", "two")
    monkeypatch.chdir(tmp_path)
    assert "begun" in exercise("list").stdout
    assert "fledge exercise hint two\n" in exercise("check", "two").stderr


def test_a_patch_that_does_not_fit_leaves_nothing(
    repo: Path, exercise: Callable[..., Result], made_up: MadeUp
) -> None:
    made_up.write(STAGE, "values.py", "z = 1\n")
    done = exercise("start", "two")
    assert done.exit_code == 2 and "does not fit" in done.stderr
    assert not Path("exercises/two").exists() and not list(Path("exercises").iterdir())


@pytest.mark.parametrize("verb", ["hint", "check", "diff", "solution", "reset"])
def test_without_a_copy_every_verb_says_what_to_run(
    repo: Path, exercise: Callable[..., Result], verb: str
) -> None:
    done = exercise(verb, "two")
    assert done.exit_code == 2 and "fledge exercise start two" in done.stderr
    assert "there are two. Did you mean two?" in exercise(verb, "twos").stderr


def test_another_exercises_copy_and_a_spoilt_one(copy: Path, exercise: Callable[..., Result]) -> None:
    state = copy / ".exercise" / "tried.json"
    state.write_text(state.read_text().replace('"two"', '"one"'))
    assert "a copy of 'one'" in exercise("check", "two").stderr
    state.write_text("{")
    assert "cannot be read" in exercise("hint", "two").stderr
    (copy / "values.py").write_text("x = 3\n")
    done = exercise("reset", "two")
    assert done.exit_code == 0 and "Your work is kept in" in done.stdout
    assert (copy.parent / "two.backup-1" / "values.py").read_text() == "x = 3\n"


def test_the_list_says_how_far_one_is(repo: Path, exercise: Callable[..., Result]) -> None:
    listed = exercise("list").stdout.splitlines()
    assert listed[0] == STAGE and listed[1].split() == ["two", "Two", "come"]
    assert len(listed) == 2
    exercise("start", "two")
    assert exercise("list").stdout.splitlines()[1].split()[:2] == ["two", "begun"]


@pytest.mark.parametrize(
    "harm, sentence",
    [
        (("x_is_two", "x_is_three"), "there is no mutant 'x_is_three'"),
        ((', "What was x?"', ""), "3 hints"),
        (('title = "Two come"', ""), "exercise 'two'"),
        (('also = ["tests/test_others.py"]', "also = []"), "tests"),
        (('yours = "[1, y]"', 'mine = ""'), "exercise 'two'"),
        ((EXERCISES, EXERCISES + EXERCISES), "used twice"),
        (("[[exercise]]", "[[exercise]"), "cannot be used"),
    ],
)
def test_a_malformed_exercise_is_named(repo: Path, harm: tuple[str, str], sentence: str) -> None:
    (repo / "docs" / "data" / "exercises.toml").write_text(EXERCISES.replace(*harm))
    with pytest.raises(BadInput, match=sentence):
        read_exercises(repo)


def test_edits_of_a_copy_that_is_whole(copy: Path, repo: Path) -> None:
    scratch = Scratch.open(copy, read_exercises(repo)[0])
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "values.pyc").write_bytes(b"\0")
    assert scratch.edits() == ""
    (copy / "values.py").unlink()
    assert "-y = 1" in scratch.edits()


def test_what_is_asserted_is_said_without_its_message() -> None:
    assert _asserted('assert not lost, f"pages without an owner: {lost}"') == "not lost"
    assert _asserted("_close(k, want)") == "_close(k, want)"
