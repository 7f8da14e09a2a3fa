"""`fledge quiz`: questions that upstream's history answers, one after another or one by its id.

The answer that counts is recomputed from the reader's clone, or from the recorded ledger where there is none.
A first wrong answer gets a hint, a second one the command that shows it, a third one the answer. Whoever asks
gets the hint, or the answer, without a wrong one.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ..bench.stages_door import BadInput
from ..stages.story import verb
from ..upstream.history import History, UpstreamError
from ..upstream.ledger import LedgerHistory
from ..upstream.source import open_history
from ..upstream.verbs import aside, say
from .progress import Progress, progress_path
from .questions import Question, find_question, read_questions
from .rules import NoAnswer, recompute

PROMPT = "answer, ?, skip or q > "


@verb
def quiz(
    name: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="One question; default: those that are open.")
    ] = None,
    answer: Annotated[str | None, typer.Option(help="Answer without being asked; needs ID.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Name all questions.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Forget the answers, or those to ID.")] = False,
) -> None:
    """Ask about upstream's history; progress is kept in the cache folder.

    Exit status: 0 for a right answer, 1 for a wrong one, 2 for what is no answer.
    """
    questions, progress = read_questions(), Progress.load()
    if name is not None:
        questions = [find_question(questions, name)]
    if reset:
        return _reset(questions, progress)
    if list_all:
        return _list(questions, progress)
    history = _history()
    if answer is not None:
        if name is None:
            raise BadInput("An answer needs its question: fledge quiz ID --answer …")
        if _asks_for_hint(answer):
            return say(f"Hint: {questions[0].hint}")
        if not _judge(questions[0], answer, history, progress):
            raise typer.Exit(1)
        return
    opened = (
        [question for question in questions if question.id not in progress.right]
        if name is None
        else questions
    )
    if not opened:
        return say("Every question is answered. fledge quiz --reset starts anew.")
    if not _at_a_terminal():
        _ask(opened[0])
        return say(f"Answer with: fledge quiz {opened[0].id} --answer …  (--answer hint gives the hint)")
    _converse(opened, history, progress)


def answer_of(question: Question, history: History) -> Any:
    """The answer from `history`; from the ledger, after saying so, where the history lacks something for it.

    Raises BadInput where the facts contradict the question itself.
    """
    try:
        found = recompute(question, history)
    except UpstreamError as error:
        aside(f"The recorded ledger answers this one: {error}")
        found = recompute(question, LedgerHistory.load())
    except NoAnswer as error:
        raise BadInput(
            f"{history.label.capitalize()} does not answer this question as it was meant: {error}."
        ) from None
    if found != question.answer:
        aside(f"Here it is {question.written(found)}; recorded was {question.written(question.answer)}.")
    return found


def _at_a_terminal() -> bool:
    return sys.stdin.isatty()


def _asks_for_hint(words: str) -> bool:
    return words.strip().lower() in ("?", "hint")


def _converse(opened: list[Question], history: History, progress: Progress) -> None:
    """Ask until the reader has had enough; an empty line goes on to the next question."""
    aside("? gives a hint, skip the answer, an empty line goes on, q or Ctrl-D ends. Answers are kept.\n")
    for i, question in enumerate(opened, 1):
        aside(f"{i} of {len(opened)}")
        _ask(question)
        if not _until_answered(question, history, progress):
            break
        say()
    aside(_count(read_questions(), progress))


def _until_answered(question: Question, history: History, progress: Progress) -> bool:
    """Judge what is typed until it is right or passed over; False where the reader leaves."""
    while True:
        try:
            words = input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            aside("")
            return False
        if not words.strip():
            return True
        if words.strip().lower() in ("q", "quit", "exit"):
            return False
        try:
            if _asks_for_hint(words):
                say(f"Hint: {question.hint}")
            elif words.strip().lower() == "skip":
                say(_told(question, history))
                return True
            elif _judge(question, words, history, progress):
                return True
        except BadInput as error:
            aside(f"{error} Or ? for a hint, skip for the answer, q to leave.")


def _ask(question: Question) -> None:
    say(f"{question.asks}  [{question.id}]")
    for letter, choice in question.lettered():
        say(f"  {letter}  {choice}")
    aside(f"Answer as {question.form}.")


def _judge(question: Question, words: str, history: History, progress: Progress) -> bool:
    """Say whether the answer is right, and what helps where it is not."""
    given = question.read(words)
    answer = answer_of(question, history)
    right = given == answer
    wrong = progress.note(question.id, right)
    if right:
        say(f"Right: {question.written(answer)}. {question.because}")
        aside(question.see)
    elif wrong == 1:
        say(f"Not so. Hint: {question.hint}")
    elif wrong == 2:
        say(f"Not so. {question.see}")
    else:
        say(f"Not so. {_told(question, history)}")
    return right


def _told(question: Question, history: History) -> str:
    """The answer, why, and the command that shows it."""
    return f"It is {question.written(answer_of(question, history))}. {question.because} {question.see}"


def _list(questions: list[Question], progress: Progress) -> None:
    width = max(len(question.id) for question in questions)
    for question in questions:
        state = (
            "right"
            if question.id in progress.right
            else "tried"
            if progress.tries.get(question.id)
            else "open"
        )
        say(f"{question.id:<{width}}  {state:<5}  {question.asks}")
    aside(f"{_count(questions, progress)} Kept in {progress_path()}.")


def _count(questions: list[Question], progress: Progress) -> str:
    right = sum(question.id in progress.right for question in questions)
    return f"{right} of {len(questions)} answered rightly."


def _reset(questions: list[Question], progress: Progress) -> None:
    for question in questions:
        progress.tries.pop(question.id, None)
    progress.right = [name for name in progress.right if name not in {question.id for question in questions}]
    progress.save()
    say(f"Forgotten: the answers to {len(questions)} question{'s' if len(questions) != 1 else ''}.")


def _history() -> History:
    try:
        history = open_history()
    except UpstreamError as error:
        raise BadInput(str(error)) from None
    aside(f"What counts is recomputed from {history.label}.")
    return history
