"""The prompts that `fledge bench` sends: eight chat questions past their end, 64 held-out ones to it."""

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
HELD_OUT = PROMPTS.with_name("held_out.json")


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
    """The two sets by name."""
    return {name: _read(name, path) for name, path in (("questions", PROMPTS), ("held-out", HELD_OUT))}


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
