"""`fledge stages diff`: the step from one stage to another, as text in colour or as one HTML page."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..bench.stages_door import BadInput, resolve_stage
from ..bench.tables import new_table
from . import story
from .diff_html import render_page
from .fold import FileDiff, Part, Totals, fold

_STYLES = {"+": "green", "-": "red", " ": "", "…": "dim"}


@story.verb
def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="The earlier stage: a name or a path.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The later one.")],
    file: Annotated[str | None, typer.Option(metavar="F", help="This file alone, as in engine.py.")] = None,
    html: Annotated[
        bool, typer.Option("--html", help="Print a page of HTML that needs no other file.")
    ] = False,
) -> None:
    """What changes from stage A to stage B, function by function.

    Functions and classes that are as they were take one line, and so do those that only moved. stage.toml and
    README.md are left out: they always differ.
    """
    stages = [resolve_stage(name) for name in (before, after)]
    if stages[0].path == stages[1].path:
        raise BadInput(f"{stages[0].name} twice is the same stage: nothing to compare.")
    diffs = fold(*(stage.path for stage in stages))
    if file is not None:
        diffs = [found for found in diffs if found.path == file]
        if not diffs:
            raise BadInput(
                f"Neither stage has a file {file!r}: give a path inside the stage, as in engine.py."
            )
    reasons = stages[1].table.get("changed", {})
    title = f"{stages[0].name} → {stages[1].name}"
    if html:
        typer.echo(render_page(title, diffs, reasons))
    else:
        print_diff(Console(highlight=False), title, diffs, reasons)


def print_diff(console: Console, title: str, diffs: list[FileDiff], reasons: dict[str, str]) -> None:
    """The summary, then every file that differs; `reasons` says of a path why it does."""
    table = new_table(title, "lines", "+", "−", "to read")
    differing = [found for found in diffs if found.kind != "identical"]
    for found in differing:
        numbers = (found.length, found.added, found.removed, found.folded)
        table.add_row(f"{found.kind:<8}{found.path}", *map(str, numbers))
    if differing:
        console.print(table)
    console.print(f"{Totals.of(diffs)}.")
    for found in differing:
        console.print()
        console.rule(Text(f"{found.path} ({found.kind})", "bold"), align="left", style="dim")
        if reason := reasons.get(found.path):
            console.print(Text(reason, "italic"))
        for part in found.parts:
            _print_part(console, part)


def _print_part(console: Console, part: Part) -> None:
    style = {"same": "dim", "moved": "cyan"}.get(part.kind, "bold")
    console.print(Text(part.headline(), style), soft_wrap=True)
    if not part.is_folded:
        for mark, line in part.lines:
            console.print(Text(f"  {mark} {line}".rstrip(), _STYLES[mark]), soft_wrap=True)
