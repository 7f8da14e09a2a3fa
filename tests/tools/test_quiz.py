"""`fledge quiz` as a reader meets it: answers, help after wrong ones, progress, and what is no answer."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from tests.tools.upstream_repos import build
from tools.bench.stages_door import BadInput
from tools.exercises import questions
from tools.exercises.progress import progress_path
from tools.exercises.questions import read_questions
from tools.upstream import source

QUIZ = """\
[[question]]
id = "lines"
page = "worker"
asks = "How many lines?"
kind = "number"
answer = 16
rule = { by = "added", commit = "#12", path = "eagle_worker.py" }
hint = "Count them."
shows = "git show"
because = "So it is."

[[question]]
id = "order-one"
page = "worker"
asks = "In which order?"
kind = "order"
choices = ["twelve", "seven"]
of = ["#12", "#7"]
answer = ["twelve", "seven"]
rule = { by = "merged" }
hint = "By day."
shows = "git log"
because = "One day apart."
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def quiz(fledge: Callable[..., Result]) -> Callable[..., Result]:
    return lambda *words: fledge("quiz", *words)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two questions over a built clone, which is in use."""
    build(tmp_path / "clone")
    source.remember("clone", tmp_path / "clone")
    (tmp_path / "quiz.toml").write_text(QUIZ)
    monkeypatch.setattr(read_questions, "__defaults__", (tmp_path / "quiz.toml",))
    return tmp_path / "quiz.toml"


def test_a_right_answer_is_kept(quiz: Callable[..., Result]) -> None:
    done = quiz("chapter-candidates", "--answer", " 36 ")
    assert done.exit_code == 0 and done.stdout.startswith("Right: 36. ")
    assert "See it in a clone of SGLang: git show v0.4.6" in done.stderr and "recorded ledger" in done.stderr
    listed = quiz("--list")
    [line] = [line for line in listed.stdout.splitlines() if line.startswith("chapter-candidates ")]
    assert line.split()[1] == "right" and "1 of" in listed.stderr
    assert str(progress_path()) in listed.stderr


def test_wrong_answers_bring_hint_command_and_answer_in_turn(quiz: Callable[..., Result]) -> None:
    said = [quiz("part2-idle", "--answer", answer) for answer in ("a", "EXTEND", "b", "c")]
    assert [done.exit_code for done in said] == [1, 1, 1, 0]
    hint, command, answer, right = (done.stdout for done in said)
    assert "has no request" in hint and "fledge upstream diff" not in hint and "IDLE" not in hint
    assert "fledge upstream diff b0524c3789" in command and "IDLE" not in command
    assert "It is IDLE." in answer and right.startswith("Right: IDLE.")
    assert "has no request" in quiz("part2-idle", "--answer", "a").stdout  # help begins anew


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["part2-idle", "--answer", "z"], "answer as a letter, a, b, c, d"),
        (["chapter-candidates", "--answer", "many"], "answer as a number, like 12"),
        (["month-order", "--answer", "abca"], "every letter once: a, b, c, d"),
        (["page-mask", "--answer", "rows 3 to 7"], 'like 0 2 5, or "none"'),
        (["page-mask", "--answer", " "], 'like 0 2 5, or "none"'),
        (["longest-file", "--answer", "the utils"], "like scheduler.py"),
        (["nothing", "--answer", "1"], "--list names them all"),
        (["pagemask", "--answer", "1"], "Did you mean page-mask?"),
        (["part", "--answer", "1"], "begins"),
        (["--answer", "1"], "An answer needs its question"),
    ],
)
def test_what_is_no_answer_counts_as_none(
    quiz: Callable[..., Result], words: list[str], sentence: str
) -> None:
    done = quiz(*words)
    assert done.exit_code == 2 and sentence in done.stderr and done.stdout == ""
    assert not progress_path().exists()


def test_an_answer_in_several_forms(quiz: Callable[..., Result]) -> None:
    for answer in ("c d a b", "C,D,A,B", "cdab", "c > d > a > b"):
        assert quiz("month-order", "--answer", answer).exit_code == 0
    assert quiz("month-order", "--answer", "cdba").exit_code == 1
    for answer in ("3,4,5,6,7", "3 4 5 6 7", "`3, 4, 5, 6, 7`", "7 6 5 4 3"):
        assert quiz("page-mask", "--answer", answer).exit_code == 0
    for answer in ("3 4 5 6", "34567", "2 3 4 5 6 7", "none"):
        assert quiz("page-mask", "--answer", answer).exit_code == 1
    assert quiz("page-mask-partly", "--answer", "None").exit_code == 0
    assert quiz("page-mask-partly", "--answer", "3 4 5").exit_code == 1
    for answer in ("eagle_utils.py", "eagle_utils", "speculative/EAGLE_utils.py"):
        assert quiz("longest-file", "--answer", answer).exit_code == 0


def test_reset_forgets_one_or_all(quiz: Callable[..., Result]) -> None:
    quiz("part2-idle", "--answer", "c")
    quiz("page-mask", "--answer", "none")
    quiz("longest-file", "--answer", "eagle_utils.py")
    assert "1 question." in quiz("part2-idle", "--reset").stdout
    assert json.loads(progress_path().read_text()) == {"tries": {"page-mask": 1}, "right": ["longest-file"]}
    assert quiz("--reset").exit_code == 0
    assert json.loads(progress_path().read_text()) == {"tries": {}, "right": []}


def test_a_progress_file_that_cannot_be_read_is_kept_aside(quiz: Callable[..., Result]) -> None:
    progress_path().parent.mkdir(parents=True)
    progress_path().write_text("{half")
    assert quiz("longest-file", "--answer", "eagle_utils.py").exit_code == 0
    assert progress_path().with_name("quiz.json.unreadable").read_text() == "{half"


def test_without_a_terminal_the_next_open_question_is_shown(quiz: Callable[..., Result]) -> None:
    first, second = (question.id for question in read_questions()[:2])
    done = quiz()
    assert (
        f"[{first}]" in done.stdout
        and "\n  b  " in done.stdout
        and f"fledge quiz {first} --answer" in done.stdout
    )
    quiz(first, "--answer", "b")
    assert f"[{second}]" in quiz().stdout


def typed(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """A terminal at which these lines are typed, and then Ctrl-D."""
    left: Iterator[str] = iter(lines)

    def read(prompt: str = "") -> str:
        assert "?" in prompt and "skip" in prompt and " q " in prompt
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)
    monkeypatch.setattr("tools.exercises.quiz._at_a_terminal", lambda: True)


def test_at_a_terminal(small: Path, quiz: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that is no answer, a hint, a wrong answer and a right one; the next question; then Ctrl-D."""
    typed(monkeypatch, ["x", "?", "3", "16", "ba"])
    done = quiz()
    assert done.exit_code == 0
    said = [line for line in done.stdout.splitlines() if line]
    assert said[0].startswith("How many lines?") and said[1:4] == [
        "Hint: Count them.",
        "Not so. Hint: Count them.",
        "Right: 16. So it is.",
    ]
    assert said[-1] == "Not so. Hint: By day." and "1 of 2 answered rightly." in done.stderr
    assert "answer as a number" in done.stderr


def test_skip_tells_the_answer_and_q_leaves(
    small: Path, quiz: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither counts as an answer, and what was answered before stays."""
    typed(monkeypatch, ["skip", "twelve seven"])
    said = quiz().stdout
    assert "It is 16. So it is." in said and "Right: twelve · seven." in said
    typed(monkeypatch, ["Q", "16"])
    done = quiz()
    assert done.exit_code == 0 and "Right" not in done.stdout and "1 of 2 answered" in done.stderr
    assert json.loads(progress_path().read_text()) == {"tries": {}, "right": ["order-one"]}


def test_a_hint_for_the_asking_is_no_answer(quiz: Callable[..., Result]) -> None:
    done = quiz("part2-idle", "--answer", "?")
    assert done.exit_code == 0 and done.stdout.startswith("Hint: ") and not progress_path().exists()


def test_an_option_in_its_own_words(quiz: Callable[..., Result]) -> None:
    for answer, status in (("draft", 1), ("EXTEND", 1), ("idle", 0), ("Idl", 0)):
        assert quiz("part2-idle", "--answer", answer).exit_code == status
    assert quiz("part3-eagle", "--answer", "The server").exit_code == 2  # several begin so
    assert quiz("part3-eagle", "--answer", "the server cannot start").exit_code == 0
    assert quiz("trees-in-v2", "--answer", "#26866 > #26981 > #26997").exit_code == 0


def test_the_clones_answer_counts(small: Path, quiz: Callable[..., Result]) -> None:
    small.write_text(QUIZ.replace("answer = 16", "answer = 99"))
    done = quiz("lines", "--answer", "16")
    assert done.exit_code == 0 and "Here it is 16; recorded was 99." in done.stderr
    assert quiz("lines", "--answer", "99").exit_code == 1


def test_what_the_clone_lacks_is_answered_by_the_ledger(quiz: Callable[..., Result], tmp_path: Path) -> None:
    build(tmp_path / "clone")
    source.remember("clone", tmp_path / "clone")
    done = quiz("chapter-candidates", "--answer", "36")
    assert done.exit_code == 0 and "The recorded ledger answers this one" in done.stderr


def test_facts_that_give_no_answer_are_said(small: Path, quiz: Callable[..., Result]) -> None:
    small.write_text(QUIZ.replace('of = ["#12", "#7"]', 'of = ["#7", "#7"]'))
    done = quiz("order-one", "--answer", "ab")
    assert done.exit_code == 2 and "two of them are equal" in done.stderr


@pytest.mark.parametrize(
    "harm",
    [
        ('kind = "number"', 'kind = "riddle"'),
        ('id = "order-one"', 'id = "lines"'),
        ('choices = ["twelve", "seven"]', ""),
        ('answer = ["twelve", "seven"]', 'answer = ["twelve", "two"]'),
        ('rule = { by = "merged" }', 'rule = { by = "merged", holds = [] }'),
        ('hint = "By day."', ""),
        ("[[question]]", "[[questions]]"),
    ],
)
def test_a_malformed_question_is_named(tmp_path: Path, harm: tuple[str, str]) -> None:
    (tmp_path / "quiz.toml").write_text(QUIZ.replace(*harm))
    with pytest.raises(BadInput, match="quiz.toml"):
        questions.read_questions(tmp_path / "quiz.toml")
