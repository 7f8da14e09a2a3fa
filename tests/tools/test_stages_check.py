"""`fledge stages check` and `list`: each rule broken once in a made-up repository, and none in this one."""

from collections.abc import Callable

import pytest

from tests.tools.stage_helpers import COMMITS, NAMES, MadeUp
from tools.stages import story
from tools.stages.check import findings

FIRST, SECOND, THIRD, LAST = NAMES


def whats(made_up: MadeUp) -> list[str]:
    return [f"{finding.where} {finding.what}" for finding in findings(made_up.folder)]


def test_this_repository_passes(fledge: Callable) -> None:
    done = fledge("stages", "check")
    assert (done.exit_code, done.output) == (0, "The stages hold together.\n")


def test_made_up_stages_pass_and_a_finding_fails(made_up: MadeUp, fledge: Callable) -> None:
    assert fledge("stages", "check").exit_code == 0
    made_up.write(SECOND, "more.py", "")
    done = fledge("stages", "check")
    assert done.exit_code == 1
    first = done.output.splitlines()[0]
    assert first.startswith(
        f"stages/{SECOND}/more.py is new since {FIRST} and is not listed: spread the change"
    )
    assert f"under [changed] in stages/{SECOND}/stage.toml" in first
    assert done.output.endswith("\n2 to mend.\n")  # and it is gone in the stage after


def test_every_difference_is_listed_by_the_later_stage(made_up: MadeUp) -> None:
    for name, text in zip(NAMES, ("a = 1\n", "a = 2\n", "a = 2\n"), strict=False):
        made_up.write(name, "file.py", text)
    assert whats(made_up) == [
        f"stages/{SECOND}/file.py differs since {FIRST} and is not listed",
        f"stages/{LAST}/file.py is gone since {THIRD} and is not listed",
    ]
    for name in (SECOND, LAST):
        made_up.toml(name, '[changed]\n"file.py" = "The step needs it."\n')
    assert whats(made_up) == []


def test_a_listed_file_differs_and_has_a_reason(made_up: MadeUp) -> None:
    made_up.toml(SECOND, '[changed]\n"__init__.py" = "It was to change."\n')
    made_up.write(THIRD, "new.py", "")
    made_up.write(LAST, "new.py", "")
    made_up.toml(THIRD, '[changed]\n"new.py" = " "\n')
    assert whats(made_up) == [
        f"stages/{SECOND}/stage.toml lists __init__.py, which is as it was in {FIRST}",
        f"stages/{THIRD}/stage.toml gives no reason for new.py",
    ]


def test_a_missing_stage_is_passed_over(made_up: MadeUp) -> None:
    for path in made_up.path(SECOND, "").iterdir():
        path.unlink()
    made_up.write(FIRST, "a.py", "")
    assert whats(made_up) == [f"stages/{THIRD}/a.py is gone since {FIRST} and is not listed"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("import tools.bench", "imports tools.bench"),
        ("from stages.other import Engine", "imports stages.other"),
        ("def f():\n    from tests import x", "imports tests"),
        ("from ... import other", "imports from outside the stage"),
        ("from ...other.engine import Engine", "imports from outside the stage"),
        ("from ..absent import x", "imports absent.py, which this stage does not have"),
        ("from .absent.more import x", "imports package/absent/more.py, which this stage does not have"),
        (
            "from . import module\nfrom .. import package\nfrom .module import x\nfrom ..package import y",
            None,
        ),
        ("import toolsmith, testsuite\nfrom os.path import join", None),
    ],
)
def test_imports_stay_in_the_stage(made_up: MadeUp, line: str, what: str | None) -> None:
    made_up.write_all("package/__init__.py", "")
    made_up.write_all("package/module.py", "x = 1\n")
    assert whats(made_up) == []
    made_up.write_all("package/asks.py", line + "\n")
    number = line.count("\n") + 1
    expected = [f"stages/{name}/package/asks.py:{number} {what}" for name in NAMES]
    assert whats(made_up) == (expected if what else [])


@pytest.mark.parametrize(
    ("symbol", "exists"),
    [
        ("module.py:function", True),
        ("module.py:Class.method", True),
        ("module.py:Class", True),
        ("module.py:method", False),
        ("module.py:Class.other", False),
        ("absent.py:function", False),
    ],
)
def test_symbols_of_the_map_exist(made_up: MadeUp, symbol: str, exists: bool) -> None:
    source = "class Class:\n    async def method(self): ...\n\n\ndef function(): ...\n"
    made_up.write_all("module.py", source)
    made_up.toml(LAST, f'[[symbols]]\nhere = "{symbol}"\n')
    what = f"stages/{LAST}/stage.toml names the symbol {symbol}, which does not exist"
    assert whats(made_up) == ([] if exists else [what])


@pytest.mark.parametrize(
    ("lines", "reason", "what"),
    [
        (400, None, None),
        (401, None, "long.py has 401 lines, over 400"),
        (401, "It is a table.", None),
        (401, "", "long.py has 401 lines, over 400"),
        (601, "It is a table.", "long.py has 601 lines, over 600"),
        (400, "It was a table.", "stage.toml excuses long.py, which is not over 400 lines"),
    ],
)
def test_long_files_have_a_reason(made_up: MadeUp, lines: int, reason: str | None, what: str | None) -> None:
    made_up.write_all("long.py", "x = 1\n" * lines)
    for name in NAMES:
        made_up.toml(name, "" if reason is None else f'[long_files]\n"long.py" = "{reason}"\n')
    assert whats(made_up) == ([f"stages/{name}/{what}" for name in NAMES] if what else [])


@pytest.mark.parametrize(
    ("comment", "named"),
    [
        ("as of part3_scheduler", "part3_scheduler"),
        ("Part 4 brings trees", "Part 4"),
        ("spec_v2's way", "spec_v2"),
        (f"see {COMMITS[1][:10]}", COMMITS[1][:10]),
        ("a part of 4, the counterpart4, spec_info, cafe123", None),
    ],
)
def test_a_shared_file_names_no_stage_and_no_commit_of_one(
    made_up: MadeUp, comment: str, named: str | None
) -> None:
    made_up.write(SECOND, "file.py", f"x = 1  # {comment}\n")
    made_up.toml(SECOND, '[changed]\n"file.py" = "New."\n', COMMITS[1])
    made_up.toml(THIRD, '[changed]\n"file.py" = "Gone."\n')
    assert whats(made_up) == []  # its own file may
    made_up.toml(THIRD)
    for name in (THIRD, LAST):
        made_up.write(name, "file.py", f"x = 1  # {comment}\n")
    expected = [
        f"stages/{after}/file.py:1 names {named} and is shared with {before}"
        for before, after in ((SECOND, THIRD), (THIRD, LAST))
    ]
    assert whats(made_up) == (expected if named else [])


def test_what_is_not_python_is_one_sentence(made_up: MadeUp, fledge: Callable) -> None:
    made_up.write_all("broken.py", "x = 1\ndef\n")
    done = fledge("stages", "check")
    assert done.exit_code == 2
    assert f"stages/{FIRST}/broken.py:2 is not Python" in done.output


def test_a_stage_outside_the_story_is_refused(made_up: MadeUp, fledge: Callable) -> None:
    made_up.toml("part5_dreams")
    done = fledge("stages", "check")
    assert done.exit_code == 2 and "stages/part5_dreams has no place in the story" in done.output


MUTANT = """\
stage = "part4_worker"
breaks = "x is two"
killed_by = ["tests/test_x.py::test_x"]

--- a/file.py
+++ b/file.py
@@ -1 +1 @@
-x = 1
+x = 2
"""


@pytest.mark.parametrize(
    ("patch", "what"),
    [
        (MUTANT, None),
        (MUTANT.replace("-x = 1", "-x = 0"), "does not apply (error: patch failed"),
        (MUTANT.replace('"part4_worker"', '"part5_dreams"'), "is for part5_dreams, which does not exist"),
        (MUTANT.replace("breaks", "brakes"), "needs a header"),
        (MUTANT.replace('breaks = "x is two"\n', ""), "needs a header"),
        (MUTANT.partition("---")[0], "needs a diff"),
        (
            MUTANT.replace('["tests/test_x.py::test_x"]', "[]"),
            "needs a diff, a sentence `breaks` and at least",
        ),
    ],
)
def test_every_mutant_has_a_header_and_applies(made_up: MadeUp, patch: str, what: str | None) -> None:
    made_up.write_all("file.py", "x = 1\n")
    folder = made_up.folder / "tests" / "mutants"
    folder.mkdir(parents=True)
    (folder / "two.patch").write_text(patch)
    found = whats(made_up)
    if what is None:
        assert found == []
    else:
        assert len(found) == 1 and found[0].startswith(f"tests/mutants/two.patch {what}")


# list


def test_the_list_has_every_stage_and_says_which_are_not_there(made_up: MadeUp, fledge: Callable) -> None:
    made_up.write(FIRST, "more.py", "x = 1\ny = 2\n")
    text = made_up.path(LAST, "stage.toml").read_text()
    made_up.path(LAST, "stage.toml").write_text(text.replace('["page"]', '["page", "tree"]'))
    lines = fledge("stages", "list").output.splitlines()
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert names == list(story.ORDER)
    assert lines[0].rstrip() == f"{FIRST}  About {FIRST}"
    facts = f"sglang {COMMITS[0][:10]}  #1  2025-01-02  3 lines of Python in 2 files"
    assert [line.strip() for line in lines[1:3]] == [facts, "+ page"]
    assert lines[-2].strip() == "+ tree"
    assert lines[-1] == "spec_v2  not yet"
