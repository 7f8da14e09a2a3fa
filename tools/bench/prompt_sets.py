"""The prompts that `fledge bench` sends: questions past their end or to it, and code to be given back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..models.cache import sha256_of
from .stages_door import PROMPTS

T = TypeVar("T")
FILES = {
    "questions": PROMPTS,
    "held-out": PROMPTS.with_name("held_out.json"),
    "code-edits": PROMPTS.with_name("code_edits.json"),
}
DEFAULT_SETS = ("questions", "held-out")  # text that repeats itself is for methods that live on it


@dataclass(frozen=True)
class PromptSet:
    """Questions with the length of their answers; `new_tokens` is exact where the end is ignored."""

    name: str
    questions: list[str]
    new_tokens: int
    ignore_eos: bool
    file: str = ""
    sha256: str = ""


def load_sets() -> dict[str, PromptSet]:
    """All sets by name."""
    return {name: _read(name, path) for name, path in FILES.items()}


def _read(name: str, path: Path) -> PromptSet:
    data = json.loads(path.read_text(encoding="utf-8"))
    where = path.relative_to(PROMPTS.parents[2]).as_posix()
    return PromptSet(name, data["questions"], data["new_tokens"], data["ignore_eos"], where, sha256_of(path))


def waves(prompts: Sequence[T], batch: int) -> list[list[T]]:
    """All prompts in groups of `batch`, each group to be sent at once when the one before has ended.

    Every prompt is sent, in order and equally often where `batch` is a multiple of their number; the list
    starts over to fill the last group.
    """
    count = -(-len(prompts) // batch)
    endless = itertools.cycle(prompts)
    return [list(itertools.islice(endless, batch)) for _ in range(count)]
