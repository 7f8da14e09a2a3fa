"""`fledge stages diff`: units of a file, folds, moves, counts, and both ways to show them."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from textwrap import dedent

import pytest

from tests.tools.stage_helpers import NAMES, MadeUp
from tools.stages.fold import FileDiff, Part, Totals, fold
from tools.stages.units import split

BEFORE = dedent('''\
    """A module."""

    import os

    LIMIT = 3


    # About f.
    @decorated
    def f(x):
        return x


    class C:
        """A class."""

        size = 1

        def first(self):
            return 1

        @property
        def both(self):
            return 1

        @both.setter
        def both(self, value):
            pass


    if LIMIT:
        y = 1
''')


def body(name: str, lines: int = 12, indent: str = "") -> str:
    """A function of so many lines that is like no other."""
    rows = [f"    {name}_{number} = {number}" for number in range(lines - 1)]
    return "\n".join(indent + row for row in [f"def {name}():", *rows]) + "\n"


def folded(tmp_path: Path, before: dict[str, str], after: dict[str, str]) -> dict[str, FileDiff]:
    for side, files in (("a", before), ("b", after)):
        (tmp_path / side).mkdir()
        for path, text in files.items():
            (tmp_path / side / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / side / path).write_text(text)
    return {diff.path: diff for diff in fold(tmp_path / "a", tmp_path / "b")}


def headlines(diff: FileDiff) -> list[str]:
    return [part.headline() for part in diff.parts]


# units


def test_every_line_is_in_one_unit() -> None:
    units = {unit.name: unit for unit in split(BEFORE, is_python=True)}
    assert list(units) == ["", "f", "C", "C.first", "C.both"]
    assert [unit.title for unit in units.values()][:3] == ["module level", "def f", "class C"]
    assert units["f"].lines[0] == "# About f." and units["f"].line == 8
    assert units["C"].lines == ("class C:", '    """A class."""', "", "    size = 1")
    assert units["C.first"].lines == ("def first(self):", "    return 1")  # without the class's indentation
    assert units["C.both"].lines.count("def both(self):") == 1  # getter and setter are one unit
    assert units[""].lines[-1] == "    y = 1"
    kept = sum(1 for unit in units.values() for line in unit.lines if line.strip())
    assert kept == sum(1 for line in BEFORE.splitlines() if line.strip())


@pytest.mark.parametrize(("text", "is_python"), [("def broken(:\n", True), ("[changed]\n", False)])
def test_what_is_not_python_is_one_unit(text: str, is_python: bool) -> None:
    [unit] = split(text, is_python)
    assert (unit.title, unit.lines) == ("the file", (text.strip(),))
    assert split("", is_python=True) == []


# folds


def test_only_what_changed_is_unfolded(tmp_path: Path) -> None:
    files = {"a.py": BEFORE, "same.py": "x = 1\n"}
    after = BEFORE.replace("    return 1\n\n    @property", "    return 2\n\n    @property")
    diffs = folded(tmp_path, files, files | {"a.py": after})
    assert diffs["same.py"] == FileDiff("same.py", "identical", 1)
    diff = diffs["a.py"]
    assert headlines(diff) == [
        "module level … unchanged, 9 lines",
        "def f … unchanged, 4 lines",
        "class C … unchanged, 4 lines",
        "def C.first … changed, +1 −1",
        "def C.both … unchanged, 7 lines",
    ]
    assert diff.parts[3].lines == [(" ", "def first(self):"), ("-", "    return 1"), ("+", "    return 2")]
    assert (diff.kind, diff.added, diff.removed) == ("changed", 1, 1)
    assert diff.folded == 5 + 3


def test_a_class_without_a_change_is_one_line(tmp_path: Path) -> None:
    diff = folded(tmp_path, {"a.py": BEFORE}, {"a.py": BEFORE.replace("LIMIT = 3", "LIMIT = 4")})["a.py"]
    assert headlines(diff)[1:] == ["def f … unchanged, 4 lines", "class C … unchanged, 13 lines"]


def test_lines_far_from_a_change_are_left_out(tmp_path: Path) -> None:
    before = body("f", 40)
    after = before.replace("f_10 = 10", "f_10 = 0").replace("f_30 = 30", "f_30 = 0")
    [part] = folded(tmp_path, {"a.py": before}, {"a.py": after})["a.py"].parts
    marks = "".join(mark for mark, _ in part.lines)
    assert marks == "…   -+   …   -+   …"


def test_new_and_gone(tmp_path: Path) -> None:
    diffs = folded(
        tmp_path,
        {"a.py": body("keep") + "\n\n" + body("old"), "gone.py": "x = 1\n"},
        {"a.py": body("young", 3) + "\n\n" + body("keep"), "new.py": "one = 1\ntwo = 2\n"},
    )
    assert headlines(diffs["a.py"]) == [
        "def young … new, +3 −0",
        "def keep … unchanged, 12 lines",
        "def old … gone, +0 −12",
    ]
    assert [(diff.kind, diff.added, diff.removed) for diff in diffs.values()] == [
        ("changed", 3, 12),
        ("gone", 0, 1),
        ("new", 2, 0),
    ]
    totals = Totals.of(list(diffs.values()))
    assert str(totals) == "1 changed, 1 new, 1 gone, 0 identical; +5 −13 lines, 23 to read folded"


def test_moves_within_a_file_count_nothing(tmp_path: Path) -> None:
    one, two, three = (body(name) for name in ("one", "two", "three"))
    diff = folded(tmp_path, {"a.py": one + two + three}, {"a.py": three + one + two})["a.py"]
    assert headlines(diff) == [
        "def three … moved within the file, 12 lines",
        "def one … unchanged, 12 lines",
        "def two … unchanged, 12 lines",
    ]
    assert (diff.added, diff.removed, diff.folded) == (0, 0, 3)


def test_a_function_moves_to_another_file_and_into_a_class(tmp_path: Path) -> None:
    method = "class C:\n    x = 1\n\n" + body("f", indent="    ")
    before = {"a.py": body("stays") + "\n\n" + body("f") + "\n\n" + body("g"), "b.py": "x = 1\n"}
    changed = body("g").replace("g_5 = 5", "g_5 = 0")
    diffs = folded(tmp_path, before, {"a.py": body("stays"), "b.py": "x = 1\n\n\n" + changed, "c.py": method})
    assert headlines(diffs["a.py"])[1:] == ["def f … moved to c.py:C.f", "def g … moved to b.py"]
    assert headlines(diffs["b.py"])[1:] == ["def g … moved from a.py, +1 −1"]
    assert headlines(diffs["c.py"]) == ["class C … new, +2 −0", "def C.f … moved from a.py:f, 12 lines"]
    assert diffs["a.py"].removed == 0


def test_a_renamed_function_and_a_class_moved_whole_are_moves(tmp_path: Path) -> None:
    whole = "class C:\n    x = 1\n\n" + body("f", indent="    ")
    renamed = body("old").replace("def old", "def young")
    diffs = folded(
        tmp_path,
        {"a.py": body("old") + whole, "b.py": "x = 1\n"},
        {"a.py": renamed, "b.py": "x = 1\n" + whole},
    )
    assert headlines(diffs["a.py"]) == ["class C … moved to b.py", "def young … moved from old, +1 −1"]
    assert headlines(diffs["b.py"])[1:] == ["class C … moved from a.py, 14 lines"]


def test_a_likeness_too_small_is_no_move(tmp_path: Path) -> None:
    other = body("f").splitlines()[:7] + body("other").splitlines()[7:]
    diffs = folded(tmp_path, {"a.py": body("f")}, {"b.py": "\n".join(other) + "\n"})
    assert headlines(diffs["a.py"]) == ["def f … gone, +0 −12"]
    assert headlines(diffs["b.py"]) == ["def f … new, +12 −0"]


# the command


@pytest.fixture
def two_stages(made_up: MadeUp) -> MadeUp:
    made_up.write(NAMES[0], "a.py", BEFORE)
    made_up.write(NAMES[1], "a.py", BEFORE.replace("    return x", "    return x < LIMIT"))
    made_up.write(NAMES[1], "new.py", "y = '<b>[red]'\n")
    made_up.toml(NAMES[1], '[changed]\n"a.py" = "It counts."\n"new.py" = "It is <new>."\n')
    return made_up


def words(made_up: MadeUp) -> list[str]:
    return ["stages", "diff", *(str(made_up.path(name, "")) for name in NAMES[:2])]


def test_the_text_has_a_summary_and_every_difference(two_stages: MadeUp, fledge: Callable) -> None:
    output = fledge(*words(two_stages)).output
    assert f"{NAMES[0]} → {NAMES[1]}" in output
    assert "1 changed, 1 new, 0 gone, 1 identical; +2 −1 lines" in output
    assert "  -     return x\n  +     return x < LIMIT\n" in output
    assert "It counts." in output and "class C … unchanged, 13 lines" in output
    assert "  + y = '<b>[red]'\n" in output  # no markup of ours, whatever the code says
    assert "stage.toml" not in output and "README.md" not in output


def test_one_file_alone(two_stages: MadeUp, fledge: Callable) -> None:
    output = fledge(*words(two_stages), "--file", "new.py").output
    assert "0 changed, 1 new, 0 gone, 0 identical" in output and "a.py" not in output
    done = fledge(*words(two_stages), "--file", "absent.py")
    assert done.exit_code == 2 and "Neither stage has a file 'absent.py'" in done.output
    done = fledge("stages", "diff", "no_stage", "part4_worker")
    assert done.exit_code == 2 and "There is no stage 'no_stage'" in done.output
    assert "Did you mean part4_worker?" in fledge("stages", "diff", "part4", "part4_worker").output
    done = fledge("stages", "diff", "part4_worker", "stages/part4_worker")
    assert done.exit_code == 2 and "the same stage: nothing to compare" in done.output


class Page(HTMLParser):
    """Tags that are open, text by tag, and what a page asks of others."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.asked: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.asked += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_and_asks_for_nothing(two_stages: MadeUp, fledge: Callable) -> None:
    done = fledge(*words(two_stages), "--html")
    assert done.exit_code == 0 and done.output.startswith("<!doctype html>")
    page = Page()
    page.feed(done.output)
    assert page.open == [] and page.asked == [] and "url(" not in done.output
    text = "".join(page.text)
    assert "+ y = '<b>[red]'" in text and "It is <new>." in text
    assert "prefers-color-scheme: dark" in done.output
    # Unchanged code is folded away and there all the same.
    assert re.search(r'<details class="part same"><summary>class C … unchanged, 13 lines', done.output)
    assert "size = 1" in text


def test_a_part_that_only_moved_is_folded() -> None:
    assert Part("moved", "def f", 1, [(" ", "x")], "from a.py").is_folded
    assert not Part("moved", "def f", 1, [("+", "x")], "from a.py").is_folded
