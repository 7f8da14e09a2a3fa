"""The questions of the quiz, `docs/data/quiz.toml`, and what counts as an answer to them.

[[question]]
id = "part2-idle"
page = "part2_cudagraph_dp"      # a page of docs/
asks = "Which forward mode …?"
kind = "choice"                  # or another of FORMS
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
from ..sentences import did_you_mean

QUIZ = REPO / "docs" / "data" / "quiz.toml"
FORMS = {  # kind → what an answer looks like
    "choice": "a letter, {letters}, or the words themselves",
    "number": "a number, like 12",
    "rows": 'row numbers in any order, like 0 2 5, or "none"',
    "file": "the name of a file, like scheduler.py",
    "order": "every letter once: {letters}",
}


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

    @property
    def form(self) -> str:
        """What an answer looks like."""
        return FORMS[self.kind].format(letters=", ".join(letter for letter, _ in self.lettered()))

    @property
    def see(self) -> str:
        """The command that shows it, after what it needs."""
        needs = ""
        if self.shows.startswith("git "):
            needs = " in a clone of SGLang"
        elif self.shows.startswith("fledge upstream diff"):
            needs = " with a clone (fledge upstream fetch)"
        return f"See it{needs}: {self.shows}"

    def read(self, text: str) -> Any:
        """What a reader's words mean, in the form of `answer`.

        Raises BadInput, with what an answer looks like, for words that are none.
        """
        words = _plain(text)
        letters = dict(self.lettered())
        if self.kind == "number" and re.fullmatch(r"-?\d[\d_ ]*", words):
            return int(re.sub(r"[_ ]", "", words))
        if self.kind == "rows" and re.fullmatch(r"none|\d+( \d+)*", words):
            return sorted({int(row) for row in words.split() if row != "none"})
        if self.kind == "file" and re.fullmatch(r"[\w./-]*\w", words):
            return words.rpartition("/")[2].removesuffix(".py") + ".py"
        if self.kind == "choice" and (choice := letters.get(words) or self._begins_so(words)):
            return choice
        if self.kind == "order":
            given = re.sub(r"[ >]", "", words)
            if sorted(given) == sorted(letters):
                return [letters[letter] for letter in given]
            named = [self._begins_so(word) for word in words.replace(">", " ").split()]
            if None not in named and sorted(named) == sorted(self.choices):
                return named
        raise BadInput(f"{text!r} is no answer here: answer as {self.form}.")

    def _begins_so(self, words: str) -> str | None:
        """The choice that has these words, or the only one that begins with them; one letter is no word."""
        found = [choice for choice in self.choices if _plain(choice) == words]
        found = found or [choice for choice in self.choices if _plain(choice).startswith(words)]
        return found[0] if len(found) == 1 and len(words) > 1 else None

    def written(self, answer: Any) -> str:
        """An answer as one line."""
        if self.kind == "rows":
            return " ".join(map(str, answer)) or "none"
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
    near = "" if found else did_you_mean(name, [question.id for question in questions])
    raise BadInput(f"{many}; fledge quiz --list names them all.{near}")


def _question(entry: dict[str, Any]) -> Question:
    try:
        lists = {name: tuple(entry[name]) for name in ("choices", "of") if name in entry}
        question = Question(**{**entry, **lists})
    except TypeError as error:
        raise BadInput(f"quiz.toml, question {entry.get('id', '?')!r}: {error}") from None
    needs_choices = question.kind in ("choice", "order")
    well = question.kind in FORMS and needs_choices == bool(question.choices)
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
    return " ".join(re.sub(r"[,`'\"()]", " ", words).lower().split())
