"""`fledge course check`: this course has no hole, a hole that is made is found, every exercise works."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tools.exercises.course import exercises_that_fail, holes, wrong_mends_that_pass
from tools.exercises.held import not_run
from tools.exercises.mend import read_exercises
from tools.provenance import REPO


def test_the_course_has_no_hole() -> None:
    assert holes(REPO) == []


@pytest.mark.slow
def test_every_exercise_is_red_as_given_and_green_as_solved() -> None:
    assert exercises_that_fail(REPO, read_exercises()) == []


# The gate tries all that are recorded. These two fit the case that is shown.
@pytest.mark.slow
def test_every_exercise_is_red_with_a_wrong_mend() -> None:
    chosen = [exercise for exercise in read_exercises() if exercise.id in ("near-the-limit", "biased-draw")]
    assert len(chosen) == 2 and wrong_mends_that_pass(REPO, chosen) == []


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the check reads; the tests are the repository's own."""
    copy = tmp_path_factory.mktemp("course")
    shutil.copytree(REPO / "docs", copy / "docs", ignore=shutil.ignore_patterns("generated"))
    for name in ("mkdocs.yml", "CONTRIBUTING.md", "README.md"):
        shutil.copy(REPO / name, copy)
    shutil.copytree(REPO / "tests" / "mutants", copy / "tests" / "mutants")
    for name in ("contract", "kernels", "stages", "docs", "tools"):
        (copy / "tests" / name).symlink_to(REPO / "tests" / name)
    shutil.copytree(REPO / "stages", copy / "stages", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tools").symlink_to(REPO / "tools")
    (copy / "LICENSE").write_text("")
    assert holes(copy) == []
    return copy


HARM = [
    # file, pattern, replacement, what is said
    ("docs/part3_scheduler.md", r"## Predict first\n", "", "does not have the headings"),
    ("docs/part3_scheduler.md", r'--8<-- "stage/part3_scheduler/diff.md"', "", "does not include its diff"),
    ("docs/part3_scheduler.md", r"\?\?\? question", "??? note", "asks no question"),
    ("docs/part3_scheduler.md", r"(?s).*", "", "has no page docs/part3_scheduler.md"),
    ("docs/data/quiz.toml", r'page = "part4_worker"', 'page = "worker"', "part4_worker has no question"),
    ("docs/data/quiz.toml", r'page = "errata"', 'page = "erratum"', "docs/erratum.md, which does not exist"),
    (
        "docs/data/quiz.toml",
        r"answer = 36",
        "answer = 12",
        "chapter-candidates records 12; the ledger says 36",
    ),
    ("docs/data/quiz.toml", r"(?s)\[\[question\]\]\nid = \"part4-removed.*", "", "questions, not 40"),
    ("docs/data/ledger.json", r'"expand_scores,"', '"other"', "not answered by the ledger"),
    (
        "docs/data/exercises.toml",
        r"(?s)\[\[exercise\]\]\nid = \"idle-rank\".*?(?=\[\[exercise)",
        "",
        "part2_cudagraph_dp has no exercise",
    ),
    ("docs/data/exercises.toml", r"(?s)\[\[exercise\]\]\nid = \"s.*", "", "exercises, not 12"),
    ("docs/data/exercises.toml", r'mutant = "idle_rank\w*"', 'mutant = "gone"', "there is no mutant 'gone'"),
    (
        "docs/data/exercises.toml",
        r"test_nothing_stays_reserved_between_steps",
        "test_gone",
        "test_gone, which does not exist",
    ),
    (
        "docs/data/exercises.toml",
        r'given = "context_len',
        'given = "no_len',
        "has 0 times what its wrong mend",
    ),
    (
        "tests/mutants/idle_rank_decides_for_itself.patch",
        r"test_graph_or_eager\w*",
        "test_gone",
        "test_gone, which does not exist",
    ),
    (
        "tests/mutants/idle_rank_decides_for_itself.patch",
        r"-        if step.extends:",
        "-        if step.ends:",
        "does not fit",
    ),
    (
        "tests/mutants/idle_rank_decides_for_itself.patch",
        r"commit = \"\w+\"",
        'commit = "' + "0" * 40 + '"',
        "no record of 0000",
    ),
    (
        "docs/data/invariants.toml",
        r"stages = \[.*\]",
        'stages = ["spec_v2"]',
        "part1_draft_model claims no invariant",
    ),
    ("docs/data/invariants.toml", r"::test_tree_matrix", "::test_gone", "test_gone, which does not exist"),
    ("mkdocs.yml", r"  - Exercises: exercises.md\n", "", "docs/exercises.md is not in the navigation"),
    ("docs/worker.md", r"\Z", "[away](nowhere.md#there)\n", "docs/worker.md links to nowhere.md"),
    ("README.md", r"\Z", "[away](docs/nowhere.md)\n", "README.md links to docs/nowhere.md"),
    (
        "CONTRIBUTING.md",
        r"\| how to explain it \| `explain.md` \|",
        "| how to explain it | |",
        "no page for 'how to explain it'",
    ),
    (
        "CONTRIBUTING.md",
        r"\| how to explain it \| `explain.md` \|",
        "| how to explain it | `told.md` |",
        "no page for 'how to explain it'",
    ),
    (
        "CONTRIBUTING.md",
        r"\| how to explain it \| `explain.md` \|",
        "| how to explain it | `explain.md`, not yet |",
        "no page for 'how to explain it'",
    ),
    ("CONTRIBUTING.md", r"## Coverage of the chapter", "## Coverage", "no table of what covers the chapter"),
]


@pytest.mark.slow
@pytest.mark.parametrize("path, pattern, new, said", HARM, ids=[case[3][:40] for case in HARM])
def test_a_hole_is_found(course: Path, path: str, pattern: str, new: str, said: str) -> None:
    file = course / path
    before = file.read_text(encoding="utf-8")
    after = re.sub(pattern, lambda _: new, before)
    assert after != before
    try:
        file.write_text(after, encoding="utf-8")
        found = holes(course)
    finally:
        file.write_text(before, encoding="utf-8")
    assert any(said in hole for hole in found), found


@pytest.mark.slow
def test_an_invariant_names_tests_of_its_own_stage() -> None:
    """Cases of a stage, files that import one, and a test of everything: asked of pytest in one go."""
    ranks = "tests/stages/part4_worker/test_dp_attention.py::test_all_ranks_take_the_same_step"
    trees = "tests/contract/test_draft_state.py::test_kv_after_scripted_accepts"
    held = [{"stages": ["part2_cudagraph_dp", "part4_worker"], "tests": [ranks, trees]}]
    assert not_run(REPO, [{"id": "x", "says": "", "held": held}]) == [
        f"invariants.toml: x has {test} for part2_cudagraph_dp, for which pytest cannot run it."
        for test in (ranks, trees)
    ]


@pytest.mark.slow
def test_the_command(fledge: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    done = fledge("course", "check")
    assert done.exit_code == 0 and "nothing is missing" in done.stdout
    monkeypatch.setattr("tools.exercises.course.holes", lambda repo: ["A has no B."])
    done = fledge("course", "check", "--run")
    assert done.exit_code == 1 and done.stdout == "A has no B.\n" and "1 hole." in done.stderr
    monkeypatch.setattr("tools.exercises.course.holes", lambda repo: [])
    monkeypatch.setattr("tools.exercises.course.exercises_that_fail", lambda repo, exercises: [])
    monkeypatch.setattr(
        "tools.exercises.course.wrong_mends_that_pass", lambda repo, exercises: ["C is green."]
    )
    assert fledge("course", "check").exit_code == 0
    assert fledge("course", "check", "--run").stdout == "C is green.\n"
