"""The questions of the quiz, `docs/data/quiz.toml`, and what counts as an answer to them.

[[question]]
id = "part2-idle"
page = "part2_cudagraph_dp"      # a page of docs/
asks = "Which forward mode …?"
kind = "choice"                  # or "number", "text", "order"
choices = ["IDLE", "EXTEND"]     # of a choice, and the items of an order
of = ["#2640", "#2684"]          # of an order: what the rule's key is asked of
answer = "IDLE"                  # as recorded; the rule recomputes it
rule = { by = "brings", … }      # rules.py
hint = "…"
shows = "fledge upstream diff b0524c3789"    # or a git command in a clone
because = "…"
count = true                     # only of a question for a bare count
"""

from __future__ import annotations

import re
import string
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench.stages_door import BadInput
from ..provenance import REPO

QUIZ = REPO / "docs" / "data" / "quiz.toml"
KINDS = ("choice", "number", "text", "order")


@dataclass(frozen=True)
class Question:
    """One question; the fields are those of quiz.toml."""

    id: str
    page: str
    asks: str
    kind: str
    answer: Any
    rule: dict[str, Any]
    hint: str
    shows: str
    because: str
    choices: tuple[str, ...] = ()
    of: tuple[str, ...] = ()
    count: bool = False

    def lettered(self) -> list[tuple[str, str]]:
        """(letter, choice); for a question without choices an empty list."""
        return list(zip(string.ascii_lowercase, self.choices, strict=False))

    def read(self, text: str) -> Any:
        """What a reader's words mean: a choice, a number, a text, or the items in order.

        Raises BadInput, with what an answer looks like, for words that are none.
        """
        words = text.strip()
        letters = {letter: choice for letter, choice in self.lettered()}
        if self.kind == "number":
            if not re.fullmatch(r"-?\d[\d,_ ]*", words):
                raise BadInput(f"{text!r} is no number: answer with one, like 12.")
            return int(re.sub(r"[,_ ]", "", words))
        if self.kind == "choice":
            if words.lower() in letters:
                return letters[words.lower()]
            found = [choice for choice in self.choices if _plain(choice) == _plain(words)]
            if not found:
                raise BadInput(f"{text!r} is no choice: answer with a letter, {', '.join(letters)}.")
            return found[0]
        if self.kind == "order":
            given = list(re.sub(r"[\s,>]", "", words.lower()))
            if sorted(given) != sorted(letters):
                raise BadInput(f"{text!r} is no order: answer with every letter once: {', '.join(letters)}.")
            return [letters[letter] for letter in given]
        if not _plain(words):
            raise BadInput("That is no answer.")
        return words

    def is_right(self, given: Any, answer: Any) -> bool:
        """Whether what `read` gave is `answer`; of a text neither case, commas nor quotes matter."""
        return _plain(given) == _plain(answer) if self.kind == "text" else given == answer

    def written(self, answer: Any) -> str:
        """An answer as one line."""
        return " · ".join(answer) if isinstance(answer, list) else str(answer)


def read_questions(path: Path = QUIZ) -> list[Question]:
    """Every question. Raises BadInput, naming it, for one that is malformed."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["question"]
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise BadInput(f"{path} cannot be used ({type(error).__name__}: {error}).") from None
    questions = [_question(entry) for entry in entries]
    ids = [question.id for question in questions]
    if twice := {name for name in ids if ids.count(name) > 1}:
        raise BadInput(f"{path.name}: the id {min(twice)!r} is used twice.")
    return questions


def find_question(questions: Sequence[Question], name: str) -> Question:
    """The question with that id, or the only one that begins so. Raises BadInput else."""
    found = [question for question in questions if question.id == name]
    found = found or [question for question in questions if question.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    many = f"{name!r} begins {len(found)} of them" if found else f"There is no question {name!r}"
    raise BadInput(f"{many}; fledge quiz --list names them all.")


def _question(entry: dict[str, Any]) -> Question:
    try:
        lists = {name: tuple(entry[name]) for name in ("choices", "of") if name in entry}
        question = Question(**{**entry, **lists})
    except TypeError as error:
        raise BadInput(f"quiz.toml, question {entry.get('id', '?')!r}: {error}") from None
    needs_choices = question.kind in ("choice", "order")
    well = question.kind in KINDS and needs_choices == bool(question.choices)
    well = well and len(set(question.choices)) == len(question.choices)
    if question.kind == "choice":
        well = well and question.answer in question.choices
    if question.kind == "order":
        well = (
            well
            and sorted(question.answer) == sorted(question.choices)
            and len(question.of) == len(question.choices)
        )
    if not well or ("holds" in question.rule) + ("each" in question.rule) + ("by" in question.rule) != 1:
        raise BadInput(
            f"quiz.toml, question {question.id!r}: kind, choices, answer and rule do not fit together."
        )
    return question


def _plain(words: str) -> str:
    return " ".join(re.sub(r"[,`'\"()]", " ", str(words)).lower().split())
