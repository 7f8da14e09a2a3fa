"""The verbs that bring and check upstream's history: fetch, check, record."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, track

from .. import json_files
from ..exercises.questions import read_questions
from ..exercises.rules import what_is_asked
from .check import FAILED, PROVEN, STATES, UNCHECKED
from .check import check as all_facts
from .clone import CloneHistory
from .fetch import fetch_clone, fetch_wheel
from .history import UpstreamError
from .ledger import LEDGER, LedgerHistory
from .named import Named
from .record import record as record_table
from .record import refuse_partial
from .source import open_history, open_wheel
from .verbs import aside, say, verb


@verb
def fetch(
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[REF]…", help="Commits to fetch whole.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="PATH|URL", help="A clone to read in place, or an address to clone from."
        ),
    ] = None,
    wheel: Annotated[
        bool, typer.Option("--wheel", help="The released sglang as a zip, instead of a clone.")
    ] = False,
) -> None:
    """Clone upstream's history into the cache, or name a clone that is here; resumes where it was stopped."""
    ledger = LedgerHistory.load()
    if wheel:
        fetch_wheel(Path(source) if source else None, ledger, aside)
        return
    if source is None:
        aside("Commits and folders, and of the files only what the course names: about 40 MB.")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<18}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("asking", total=None)
        fetch_clone(
            source,
            more or [],
            Named.read(),
            ledger,
            aside,
            lambda doing, share: bar.update(task, description=doing, total=1, completed=share or 0),
        )


@verb
def check(
    every: Annotated[bool, typer.Option("--all", help="Name the proven facts too.")] = False,
) -> None:
    """Prove the ledger, the stages' source maps and the pages' claims against the clone in use."""
    history, console = _clone(), Console(stderr=True)
    ledger = LedgerHistory.load()
    aside(f"Against {history.label}.")

    def progress(tasks: list) -> object:
        return track(tasks, "checking", console=console, transient=True, disable=not console.is_terminal)

    facts = all_facts(history, open_wheel(), ledger, Named.read(), progress)
    for fact in facts:
        if every or fact.state in (FAILED, UNCHECKED):
            say(f"{fact.state:<14} {fact.where}: {fact.what}{': ' + fact.why if fact.why else ''}")
    counts = Counter(fact.state for fact in facts)
    say(", ".join(f"{counts[state]} {state}" for state in STATES))
    if not counts[PROVEN]:
        raise UpstreamError(
            "Nothing could be proven here: this is no clone of sgl-project/sglang, or far too old."
        )
    if counts[FAILED]:
        raise typer.Exit(1)


@verb
def record() -> None:
    """Write docs/data/ledger.json anew, from the clone and the wheel in use. For the course's author."""
    history, console = _clone(), Console(stderr=True)
    refuse_partial(history)
    wheel = open_wheel()
    if wheel is None:
        raise UpstreamError("The ledger records the wheel too. Run: fledge upstream fetch --wheel")
    columns = (TextColumn("recording"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        asked = what_is_asked(read_questions(), history)
        table = record_table(CloneHistory(history.path), wheel, Named.read(), bar.track, asked)
    json_files.write(LEDGER, table)
    aside(f"{LEDGER}: {len(table['commits'])} commits.")


def _clone() -> CloneHistory:
    history = open_history()
    if not isinstance(history, CloneHistory):
        raise UpstreamError("This needs a clone of upstream. Run: fledge upstream fetch")
    return history
