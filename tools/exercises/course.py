"""`fledge course check`: what the course promises and where it has a hole. The author's gate.

Without `--run` only files are read: pages, questions (recomputed from the ledger), exercises, invariants,
links, the coverage table; and pytest is asked which tests it can run for which stage. With it every exercise
is run too: red as given, green as solved, and not green with the wrong mend that is recorded for it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench.stages_door import BadInput, Stage
from ..docs.invariants import check_test, read_invariants, tests_of
from ..docs.page import Problem
from ..provenance import REPO
from ..stages.mutants import AT_A_TIME, LIMIT, copy_repo, failing
from ..stages.story import read_story, verb
from ..upstream.history import UpstreamError
from ..upstream.ledger import LedgerHistory
from ..upstream.named import source_map
from ..upstream.verbs import aside, say
from .held import not_run
from .mend import Exercise, put_in, read_exercises
from .questions import QUIZ, Question, read_questions
from .red import run_tests
from .rules import NoAnswer, recompute

# What a stage's page has, in this order.
HEADINGS = (
    "What you can do after this page", "Invariants", "Predict first", "Read the diff", "Run it, test it",
    "Exercises", "Not here on purpose", "Upstream since then",
)  # fmt: skip
QUESTIONS, BARE_COUNTS, EXERCISES = 40, 10, 12  # at least, at most, at least


@verb
def check(
    run: Annotated[bool, typer.Option("--run", help="Run every exercise too: minutes.")] = False,
) -> None:
    """Fail where a stage, a question, an exercise or a page lacks something."""
    found = holes(REPO)
    if not found:
        found = not_run(REPO, read_invariants(REPO))
    if run and not found:
        exercises = read_exercises()
        found = [*exercises_that_fail(REPO, exercises), *wrong_mends_that_pass(REPO, exercises)]
    for hole in found:
        say(hole)
    if found:
        aside(f"{len(found)} hole{'s' if len(found) != 1 else ''}.")
        raise typer.Exit(1)
    questions, exercises = read_questions(), read_exercises()
    stages = len(read_story(REPO))
    say(f"{stages} stages, {len(questions)} questions, {len(exercises)} exercises: nothing is missing.")


def holes(repo: Path) -> list[str]:
    """What is missing, a sentence each."""
    try:
        stages, exercises = read_story(repo), read_exercises(repo)
        questions = read_questions(repo / QUIZ.relative_to(REPO))
        ledger = LedgerHistory.load(repo / "docs" / "data" / "ledger.json")
        invariants = read_invariants(repo)
    except (BadInput, UpstreamError, Problem) as error:
        return [str(error)]
    found = [hole for stage in stages for hole in _of_stage(repo, stage, questions, exercises, invariants)]
    return [
        *found,
        *_of_quiz(repo, questions, ledger),
        *_of_exercises(repo, exercises, ledger),
        *_of_pages(repo),
        *_of_coverage(repo),
    ]


def _of_stage(
    repo: Path,
    stage: Stage,
    questions: list[Question],
    exercises: list[Exercise],
    invariants: list[dict[str, Any]],
) -> Iterator[str]:
    page = repo / "docs" / f"{stage.name}.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    if not text:
        yield f"{stage.name} has no page docs/{page.name}."
    else:
        headings = [line[3:].strip() for line in text.splitlines() if line.startswith("## ")]
        if [heading for heading in headings if heading in HEADINGS] != list(HEADINGS):
            yield f"docs/{page.name} does not have the headings {', '.join(HEADINGS)}, in this order."
        for part in ("diff", "invariants"):
            if f'--8<-- "stage/{stage.name}/{part}.md"' not in text:
                yield f"docs/{page.name} does not include its {part}."
        if "??? question" not in text:
            yield f"docs/{page.name} asks no question."
    if not any(question.page == stage.name for question in questions):
        yield f"{stage.name} has no question in quiz.toml."
    if not any(exercise.stage == stage.name for exercise in exercises):
        yield f"{stage.name} has no exercise, and so no hints, in exercises.toml."
    if not list(source_map(stage.table)):
        yield f"{stage.name} has no source map: its stage.toml puts no symbol beside upstream's."
    if not any(tests_of(entry, stage.name) for entry in invariants):
        yield f"{stage.name} claims no invariant in invariants.toml."


def _of_quiz(repo: Path, questions: list[Question], ledger: LedgerHistory) -> Iterator[str]:
    if len(questions) < QUESTIONS:
        yield f"The quiz has {len(questions)} questions, not {QUESTIONS}."
    if (counts := sum(question.count for question in questions)) > BARE_COUNTS:
        yield f"{counts} questions ask for a bare count; {BARE_COUNTS} may."
    for question in questions:
        if not (repo / "docs" / f"{question.page}.md").is_file():
            yield f"The question {question.id} belongs to docs/{question.page}.md, which does not exist."
        try:
            if (answer := recompute(question, ledger)) != question.answer:
                yield f"The question {question.id} records {question.answer!r}; the ledger says {answer!r}."
        except (NoAnswer, UpstreamError) as error:
            yield f"The question {question.id} is not answered by the ledger: {error}"


def _of_exercises(repo: Path, exercises: list[Exercise], ledger: LedgerHistory) -> Iterator[str]:
    if len(exercises) < EXERCISES:
        yield f"There are {len(exercises)} exercises, not {EXERCISES}."
    for exercise in exercises:
        if error := exercise.mutant.apply(repo, only_check=True) or _misfit(repo, exercise):
            yield f"The exercise {exercise.id} does not fit its stage: {error}"
        try:
            ledger.commit(exercise.commit)
        except UpstreamError as error:
            yield f"The exercise {exercise.id}: {error}"
        for test in (*exercise.mutant.killed_by, *exercise.also):
            if "::" not in test and (repo / test).is_file():
                continue
            try:
                check_test(repo, exercise.id, test.partition("[")[0])
            except Problem:
                yield f"The exercise {exercise.id} names {test}, which does not exist."


def _misfit(repo: Path, exercise: Exercise) -> str | None:
    """Why the wrong mend of an exercise whose mutant fits cannot be put in."""
    if exercise.wrong is None:
        return None
    try:
        with _given(repo, exercise) as stage:
            exercise.wrong.put_in(stage)
    except BadInput as error:
        return str(error)
    return None


def _of_pages(repo: Path) -> Iterator[str]:
    """Pages that nothing leads to, and links that lead nowhere. Anchors are the site's own tests' matter."""
    docs = repo / "docs"
    settings = repo / "mkdocs.yml"
    listed = settings.read_text(encoding="utf-8").partition("\nnav:")[2] if settings.is_file() else ""
    in_navigation = set(re.findall(r":\s*([\w./-]+\.md)\s*$", listed, re.MULTILINE))
    for page in sorted(docs.glob("*.md")):
        if page.name not in in_navigation:
            yield f"docs/{page.name} is not in the navigation of mkdocs.yml."
    texts = [*docs.glob("*.md"), *repo.glob("*.md"), *repo.glob("stages/*/README.md")]
    for text in sorted(texts):
        for link in re.findall(r"\]\(([^)#\s]+)", _without_code(text.read_text(encoding="utf-8"))):
            if "://" not in link and not link.startswith("mailto:") and not (text.parent / link).exists():
                yield f"{text.relative_to(repo)} links to {link}, which does not exist."


def _of_coverage(repo: Path) -> Iterator[str]:
    text = (repo / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Coverage of the chapter")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    if not rows:
        yield "CONTRIBUTING.md has no table of what covers the chapter."
    for row in rows:
        where = row[-1].strip()
        pages = re.findall(r"`([\w/-]+\.(?:md|html))", where)
        absent = [page for page in pages if not (repo / ("" if "/" in page else "docs/") / page).is_file()]
        if len(row) != 2 or not pages or absent or "not yet" in where.lower():
            yield f"The coverage table has no page for {row[0].strip()!r}."


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def exercises_that_fail(repo: Path, exercises: list[Exercise]) -> list[str]:
    """Those that are not red as given, or whose test does not pass on the stage as it is, solved."""
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(AT_A_TIME) as pool:
        whole = copy_repo(repo, Path(scratch) / "repo")
        tests: dict[str, set[str]] = {}
        for exercise in exercises:
            tests.setdefault(exercise.stage, set()).update(exercise.mutant.killed_by)
        solved = {stage: pool.submit(failing, whole, sorted(tests[stage]), stage, LIMIT) for stage in tests}
        reds = pool.map(lambda exercise: _is_red(repo, exercise), exercises)
        found = [f"{x.id} is green as given." for x, red in zip(exercises, reds, strict=True) if not red]
        for exercise in exercises:
            if failed := solved[exercise.stage].result() & set(exercise.mutant.killed_by):
                found.append(f"{exercise.id} is red as solved: {', '.join(sorted(failed))}.")
    return found


def wrong_mends_that_pass(repo: Path, exercises: list[Exercise]) -> list[str]:
    """Exercises whose tests take the wrong mend that is recorded for them for a mend."""
    wrong = [exercise for exercise in exercises if exercise.wrong]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        held = pool.map(lambda exercise: _is_held(repo, exercise), wrong)
        return [f"{x.id} is green with a wrong mend." for x, red in zip(wrong, held, strict=True) if not red]


def _is_red(repo: Path, exercise: Exercise) -> bool:
    with _given(repo, exercise) as stage:
        return bool(run_tests(repo, exercise, stage, exercise.mutant.killed_by, at_most=1))


def _is_held(repo: Path, exercise: Exercise) -> bool:
    with _given(repo, exercise) as stage:
        exercise.wrong.put_in(stage)
        tests = (exercise.mutant.killed_by, exercise.also)
        return any(run_tests(repo, exercise, stage, some, at_most=1) for some in tests)


@contextmanager
def _given(repo: Path, exercise: Exercise) -> Iterator[Path]:
    """The stage as a reader gets it, for a while. Raises BadInput where the mutant does not fit it."""
    with tempfile.TemporaryDirectory() as work:
        yield put_in(repo, exercise, Path(work))
