"""`fledge upstream map`: a stage's symbols beside upstream's, from the table [[symbols]] of its stage.toml.

Ours is shown from the stage; upstream's text comes from the reader's clone alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from ..bench.stages_door import BadInput, Stage, resolve_stage
from .check import upstream_symbol
from .history import History, NoSuchRef, NotRecorded, Symbol, UpstreamError, printable
from .named import source_map
from .symbols import excerpt, find_symbol, python_symbols
from .verbs import aside, history_said, say, verb


@verb
def show_map(
    stage: Annotated[
        str, typer.Argument(metavar="STAGE", help="A stage's name, or the path of its directory.")
    ],
    symbol: Annotated[
        str | None, typer.Argument(metavar="[SYMBOL]", help="One symbol, ours or upstream's.")
    ] = None,
) -> None:
    """A stage's symbols and upstream's: path, commit and lines; with SYMBOL both texts side by side."""
    try:
        found = resolve_stage(stage)
    except BadInput as error:
        raise UpstreamError(str(error)) from None
    entries = list(source_map(found.table))
    history = history_said()
    if symbol is None:
        for entry in entries:
            say(f"{entry['here']:<72} {_lines(ours(found, entry)[1])}")
            say(f"  {entry['upstream']:<70} {_theirs(history, entry)}  {entry['commit'][:10]}")
        aside(f"{len(entries)} symbols. One of them side by side: fledge upstream map {found.name} SYMBOL")
        return
    chosen = [entry for entry in entries if is_meant(entry, symbol)]
    if not chosen:
        names = ", ".join(entry["here"].partition(":")[2] for entry in entries)
        raise UpstreamError(f"{found.name} maps no {symbol!r}; it maps {names}.")
    for entry in chosen:
        Console().print(_beside(found, history, entry))


def is_meant(entry: dict[str, Any], symbol: str) -> bool:
    """Whether `symbol` is a name in an entry of the map, whole or its last part, ours or upstream's."""
    names = [entry[side].partition(":")[2] for side in ("here", "upstream")]
    return symbol in (*names, entry["here"], entry["upstream"], *(name.rpartition(".")[2] for name in names))


def ours(stage: Stage, entry: dict[str, Any]) -> tuple[str, Symbol]:
    """Text and place of our symbol. Raises UpstreamError where the stage does not define it."""
    path, _, name = entry["here"].partition(":")
    text = Path(stage.path / path).read_text(encoding="utf-8")
    found = find_symbol(python_symbols(text), name)
    if found is None:
        raise UpstreamError(f"{stage.name}/{path} defines no {name}; its stage.toml says so.")
    return excerpt(text, found), found


def _theirs(history: History, entry: dict[str, Any]) -> str:
    try:
        return _lines(upstream_symbol(history, entry))
    except (NotRecorded, NoSuchRef):
        return _lines(None)


def _lines(symbol: Symbol | None) -> str:
    return f"{symbol.lines:>5} lines" if symbol else "    - lines"


def _beside(stage: Stage, history: History, entry: dict[str, Any]) -> Table:
    table = Table(show_lines=True)
    text, place = ours(stage, entry)
    cells = [Syntax(text, "python", line_numbers=True, start_line=place.first, word_wrap=True)]
    path = entry["upstream"].partition(":")[0]
    try:
        symbol = upstream_symbol(history, entry)
        whole = printable(history.text(entry["commit"], path))
        if symbol is None:
            cells.append(f"{path} has the name; `fledge upstream` lists symbols of Python files only.")
        else:
            cells.append(
                Syntax(
                    excerpt(whole, symbol),
                    "python",
                    line_numbers=True,
                    start_line=symbol.first,
                    word_wrap=True,
                )
            )
    except UpstreamError as error:
        cells.append(printable(str(error)))
    table.add_column(f"{stage.name}\n{entry['here']}", ratio=1)
    table.add_column(f"upstream at {entry['commit'][:10]}\n{entry['upstream']}", ratio=1)
    table.add_row(*cells)
    return table
