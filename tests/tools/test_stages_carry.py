"""`fledge stages carry`: along the run of equal files, across boundaries, all or nothing."""

from collections.abc import Callable

import pytest

from tests.tools.stage_helpers import NAMES, MadeUp

FIRST, SECOND, THIRD, LAST = NAMES
TEXT = "".join(f"line{number} = {number}\n" for number in range(20))


def edited(text: str, number: int, to: str = "edited = True\n") -> str:
    return text.replace(f"line{number} = {number}\n", to)


@pytest.mark.parametrize("source", [FIRST, LAST])
def test_a_shared_file_is_carried_to_all_from_either_end(
    made_up: MadeUp, fledge: Callable, source: str
) -> None:
    made_up.write_all("shared.py", TEXT)
    made_up.commit()
    made_up.write(source, "shared.py", edited(TEXT, 4))
    done = fledge("stages", "carry", source)
    assert done.exit_code == 0, done.output
    assert made_up.texts("shared.py") == [edited(TEXT, 4)] * 4
    assert "3 files written" in done.output
    again = fledge("stages", "carry", source)
    assert again.exit_code == 0 and "Nothing to carry." in again.output


def test_an_edit_is_merged_into_a_middle_stage_of_its_own_and_beyond(
    made_up: MadeUp, fledge: Callable
) -> None:
    middle = edited(TEXT, 15, "middle = True\n")
    for name, text in zip(NAMES, (TEXT, middle, middle, TEXT), strict=True):
        made_up.write(name, "file.py", text)
    made_up.commit()
    made_up.write(LAST, "file.py", edited(TEXT, 4))
    assert fledge("stages", "carry", LAST).exit_code == 0
    both = edited(middle, 4)
    assert made_up.texts("file.py") == [edited(TEXT, 4), both, both, edited(TEXT, 4)]


def test_a_conflict_writes_nothing_and_shows_the_place(made_up: MadeUp, fledge: Callable) -> None:
    own = "first = 1\n" + edited(edited(TEXT, 4, "own = True\nmore = True\n"), 15, "other = True\n")
    for name, text in zip(NAMES, (own, TEXT, TEXT, TEXT), strict=True):
        made_up.write(name, "file.py", text)
    made_up.write_all("other.py", TEXT)
    made_up.commit()
    made_up.write(LAST, "file.py", edited(edited(TEXT, 4), 15))
    made_up.write(LAST, "other.py", edited(TEXT, 4))
    before = made_up.texts("file.py"), made_up.texts("other.py")
    done = fledge("stages", "carry", LAST)
    assert done.exit_code == 1
    places = [line for line in done.output.splitlines() if line.startswith("conflict ")]
    assert places == [f"conflict stages/{FIRST}/file.py:{line}" for line in (6, 18)]
    assert "own = True" in done.output and "edited = True" in done.output
    assert (made_up.texts("file.py"), made_up.texts("other.py")) == before


def test_what_was_settled_by_hand_is_left_alone_and_the_rest_is_carried(
    made_up: MadeUp, fledge: Callable
) -> None:
    own = edited(TEXT, 4, "own = True\n")
    for name, text in zip(NAMES, (own, TEXT, TEXT, TEXT), strict=True):
        made_up.write(name, "file.py", text)
    made_up.commit()
    made_up.write(LAST, "file.py", edited(TEXT, 4))
    made_up.write(FIRST, "file.py", edited(own, 15, "elsewhere = True\n"))
    assert fledge("stages", "carry", LAST).exit_code == 1  # changed by hand, but at another place
    by_hand = edited(TEXT, 4, "own = edited = True\n")
    made_up.write(FIRST, "file.py", by_hand)
    done = fledge("stages", "carry", LAST)
    assert done.exit_code == 0 and f"{FIRST} file.py: settled by hand, left alone" in done.output
    assert made_up.texts("file.py") == [by_hand] + [edited(TEXT, 4)] * 3


def test_a_dry_run_writes_nothing(made_up: MadeUp, fledge: Callable) -> None:
    made_up.write_all("shared.py", TEXT)
    made_up.commit()
    made_up.write(LAST, "shared.py", edited(TEXT, 4))
    done = fledge("stages", "carry", LAST, "--dry-run")
    assert done.exit_code == 0 and "3 files would be written" in done.output
    assert made_up.texts("shared.py")[:3] == [TEXT] * 3


def test_a_new_file_goes_to_later_stages_alone(made_up: MadeUp, fledge: Callable) -> None:
    made_up.write(SECOND, "package/new.py", TEXT)
    assert fledge("stages", "carry", SECOND).exit_code == 0
    assert made_up.texts("package/new.py") == [None, TEXT, TEXT, TEXT]


def test_a_new_file_leaves_another_of_its_name_alone(made_up: MadeUp, fledge: Callable) -> None:
    made_up.write(THIRD, "new.py", "mine = 1\n")
    made_up.commit()
    made_up.write(FIRST, "new.py", TEXT)
    done = fledge("stages", "carry", FIRST)
    assert done.exit_code == 0 and f"{THIRD} new.py (new): has a file of that name" in done.output
    assert made_up.texts("new.py") == [TEXT, TEXT, "mine = 1\n", None]


def test_a_file_is_deleted_where_it_was_the_same(made_up: MadeUp, fledge: Callable) -> None:
    for name, text in zip(NAMES, ("own = 1\n", TEXT, TEXT, TEXT), strict=True):
        made_up.write(name, "old.py", text)
    made_up.commit()
    made_up.path(THIRD, "old.py").unlink()
    done = fledge("stages", "carry", THIRD)
    assert done.exit_code == 0 and f"{FIRST} old.py (deleted): keeps its own version" in done.output
    assert made_up.texts("old.py") == ["own = 1\n", None, None, None]


def test_a_renamed_file_is_renamed_with_its_edit_in_every_version(made_up: MadeUp, fledge: Callable) -> None:
    own = edited(TEXT, 15, "own = True\n")
    for name, text in zip(NAMES, (own, TEXT, TEXT), strict=False):
        made_up.write(name, "old.py", text)  # the last stage does not have it
    made_up.commit()
    made_up.path(THIRD, "old.py").unlink()
    made_up.write(THIRD, "package/new.py", edited(TEXT, 4))
    assert fledge("stages", "carry", THIRD).exit_code == 0
    assert made_up.texts("old.py") == [None] * 4
    assert made_up.texts("package/new.py") == [edited(own, 4), edited(TEXT, 4), edited(TEXT, 4), None]


def test_uncommitted_changes_are_kept_or_stop_the_carry(made_up: MadeUp, fledge: Callable) -> None:
    made_up.write_all("shared.py", TEXT)
    made_up.commit()
    made_up.write(LAST, "shared.py", edited(TEXT, 4))
    elsewhere = edited(TEXT, 15, "elsewhere = True\n")
    made_up.write(SECOND, "shared.py", elsewhere)
    assert fledge("stages", "carry", LAST).exit_code == 0
    assert made_up.texts("shared.py")[:2] == [edited(TEXT, 4), edited(elsewhere, 4)]
    made_up.git("checkout", "--quiet", ".")
    made_up.write(LAST, "shared.py", edited(TEXT, 4))
    made_up.write(SECOND, "shared.py", edited(TEXT, 4, "other = True\n"))
    done = fledge("stages", "carry", LAST)
    assert done.exit_code == 1 and f"stages/{SECOND}/shared.py:5" in done.output
    assert made_up.texts("shared.py")[::2] == [TEXT, TEXT]


@pytest.mark.parametrize("is_deleted_here", [True, False])
def test_a_deletion_against_an_uncommitted_change_is_a_conflict(
    made_up: MadeUp, fledge: Callable, is_deleted_here: bool
) -> None:
    made_up.write_all("shared.py", TEXT)
    made_up.commit()
    deleted, changed = (LAST, FIRST) if is_deleted_here else (FIRST, LAST)
    made_up.path(deleted, "shared.py").unlink()
    made_up.write(changed, "shared.py", edited(TEXT, 4))
    assert fledge("stages", "carry", LAST).exit_code == 1
    assert made_up.texts("shared.py")[1:3] == [TEXT, TEXT]


def test_what_says_which_stage_it_is_stays_at_home(made_up: MadeUp, fledge: Callable) -> None:
    made_up.write(LAST, "README.md", "new words\n")
    made_up.toml(LAST, 'x = "new"\n')
    done = fledge("stages", "carry", LAST)
    assert "Nothing to carry." in done.output
    assert made_up.git("status", "--short").count("\n") == 2


def test_changes_since_an_older_revision_that_are_half_carried(made_up: MadeUp, fledge: Callable) -> None:
    made_up.write_all("shared.py", TEXT)
    made_up.commit()
    made_up.write(LAST, "shared.py", edited(TEXT, 4))
    made_up.write(THIRD, "shared.py", edited(TEXT, 4))
    made_up.commit()
    assert "Nothing to carry." in fledge("stages", "carry", LAST).output
    assert fledge("stages", "carry", LAST, "--since", "HEAD~1").exit_code == 0
    assert made_up.texts("shared.py") == [edited(TEXT, 4)] * 4


def test_a_stage_newer_than_the_revision_takes_part(made_up: MadeUp, fledge: Callable) -> None:
    made_up.write(LAST, "shared.py", TEXT)
    made_up.git("rm", "-r", "--quiet", f"stages/{FIRST}")
    made_up.commit()
    made_up.git("checkout", "--quiet", "HEAD~1", "--", f"stages/{FIRST}")
    made_up.write(FIRST, "shared.py", TEXT)
    made_up.write(LAST, "shared.py", edited(TEXT, 4))
    assert fledge("stages", "carry", LAST).exit_code == 0
    assert made_up.texts("shared.py")[0] == edited(TEXT, 4)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["no_stage"], "There is no stage 'no_stage' to carry from"),
        ([LAST, "--since", "no_revision"], "no_revision"),
    ],
)
def test_what_is_not_there_is_one_sentence(
    made_up: MadeUp, fledge: Callable, words: list[str], sentence: str
) -> None:
    done = fledge("stages", "carry", *words)
    assert done.exit_code == 2 and sentence in done.output
