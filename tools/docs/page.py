"""Small pieces of Markdown that several generated fragments are made of."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..bench.tables import markdown

SNIPPETS = "snippets"  # under docs/generated


class Problem(Exception):
    """Data that a page cannot be made from; the message is a sentence that says what to mend."""


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's table. Raises Problem where it is none."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise Problem(f"{path} cannot be read ({error}).") from None


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a bar inside a cell is kept from ending it."""
    lines = [[str(cell).replace("|", "\\|") for cell in line] for line in (head, *rows)]
    return markdown(lines, names=len(head))


def not_yet(what: str) -> str:
    """An admonition for what the site has a place for and nobody has made yet."""
    return f'!!! note "Not yet"\n    {what}\n'


def fence(text: str, language: str, title: str = "") -> str:
    """A code block; longer fences than any in the text."""
    marks = "```"
    while marks in text:
        marks += "`"
    head = f'{language} title="{title}"' if title else language
    return f"{marks}{head}\n{text.rstrip()}\n{marks}\n"


def fold(summary: str, body: str) -> str:
    """A closed box that opens on a click."""
    inside = "\n".join(f"    {line}".rstrip() for line in body.strip().splitlines())
    return f'??? note "{summary}"\n{inside}\n'
