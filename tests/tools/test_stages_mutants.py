"""`make mutants` on made-up mutants: killed, surviving, hanging, and with a test that fails anyway."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import typer
from typer.testing import CliRunner, Result

from tests.tools.stage_helpers import NAMES, MadeUp
from tools.stages import mutants as module
from tools.stages.mutants import mutants

pytestmark = pytest.mark.slow

STAGE = NAMES[3]
TESTS = f"""\
import pytest
from stages.{STAGE} import values

@pytest.mark.parametrize("other", [1, 2])
def test_x(other): assert values.x in (1, other)
def test_any(): assert values.x
def test_both(): assert values.x == values.y == 1
def test_never(): assert False
def test_ends():
    while values.x == 2: pass
"""
PATCH = """\
stage = "{stage}"
breaks = "x is two"
killed_by = {tests}
{more}
diff --git a/values.py b/values.py
--- a/values.py
+++ b/values.py
@@ -1,2 +1,2 @@
-x = 1
+x = 2
 y = 1
"""


@pytest.fixture
def make(made_up: MadeUp, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`make mutants` for the mutants given as name → tests of tests/test_values.py."""
    made_up.write(STAGE, "values.py", "x = 1\ny = 1\n")
    for folder in ("tools", "tests/mutants"):
        (made_up.folder / folder).mkdir(parents=True)
    (made_up.folder / "tests" / "test_values.py").write_text(TESTS)
    (made_up.folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    app = typer.Typer()
    app.command()(mutants)

    def run(*words: str, more: str = "", **tests: list[str]) -> Result:
        for name, named in tests.items():
            ids = [f"tests/test_values.py::{test}" for test in named]
            text = PATCH.format(stage=STAGE, tests=str(ids).replace("'", '"'), more=more)
            (made_up.folder / "tests" / "mutants" / f"{name}.patch").write_text(text)
        return CliRunner().invoke(app, words, catch_exceptions=False)

    return run


def test_a_killed_mutant_and_the_work_tree_stays_as_it_is(
    make: Callable[..., Result], made_up: MadeUp
) -> None:
    done = make(two=["test_x", "test_both"])
    assert done.exit_code == 0, done.output
    *lines, last = done.output.splitlines()
    assert lines == [
        "two x is two",
        "    killed by tests/test_values.py::test_x",
        "    killed by tests/test_values.py::test_both",
    ]
    assert re.fullmatch(r"1 of 1 killed, in \d+ s\.", last)
    assert made_up.texts("values.py")[3] == "x = 1\ny = 1\n"


def test_a_test_that_passes_and_one_that_always_fails_kill_nothing(make: Callable[..., Result]) -> None:
    done = make(killed=["test_x"], survives=["test_x", "test_any"], vain=["test_never"])
    assert done.exit_code == 1
    assert "    SURVIVES tests/test_values.py::test_any\n" in done.output
    assert "    fails without it too: tests/test_values.py::test_never\n" in done.output
    assert "1 of 3 killed" in done.output


def test_a_mutant_that_hangs_is_ended_and_killed_only_if_it_says_so(
    make: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIMIT", 2)
    done = make(waits=["test_ends"])
    assert done.exit_code == 1
    assert "    HANGS in tests/test_values.py::test_ends\n" in done.output
    done = make("waits", more="hangs = true", waits=["test_ends"])
    assert done.exit_code == 0
    assert "    killed by hanging in tests/test_values.py::test_ends\n" in done.output


def test_one_alone_and_what_cannot_be_run(make: Callable[..., Result]) -> None:
    done = make("absent", killed=["test_x"], absent=["test_absent"])
    assert done.exit_code == 2
    assert "pytest could not run tests/test_values.py::test_absent:" in done.output
    done = make("none")
    assert done.exit_code == 2 and "There is no mutant 'none' in tests/mutants." in done.output
