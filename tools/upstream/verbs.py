"""The verbs that show upstream's history: timeline, show, diff, files, symbols, log.

What is asked for goes to standard output, where it comes from to standard error.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ..sentences import sentences
from .history import SPECULATIVE, Commit, History, NoSuchRef, NotRecorded, UpstreamError, printable, workers
from .ledger import LedgerHistory, RecordedWheel
from .source import open_history, open_wheel
from .symbols import excerpt, find_symbol
from .wheel import SPECULATIVE_IN_WHEEL, Wheel

Ref = Annotated[
    str, typer.Argument(metavar="REF", help="A tag, branch, hash or pull request (#2150 or 2150).")
]


verb = sentences(1, UpstreamError, shown=printable)


def say(text: str = "") -> None:
    typer.echo(printable(text))


def aside(text: str) -> None:
    typer.echo(printable(text), err=True)


def history_said() -> History:
    """The reader's history, after saying which it is."""
    history = open_history()
    more = "; a clone has more: fledge upstream fetch" if isinstance(history, LedgerHistory) else ""
    aside(f"From {history.label}{more}.")
    return history


def _line(commit: Commit) -> str:
    return f"{commit.day}  {commit.short}  {commit.subject}"


@verb
def timeline(
    group: Annotated[
        str, typer.Argument(help="chapter, groundwork, month, spring, since, fixes, …")
    ] = "chapter",
) -> None:
    """The commits of a group, oldest first; without one the chapter's twelve."""
    history, ledger = history_said(), LedgerHistory.load()
    for commit in ledger.group(group):
        try:
            say(_line(history.head(commit.hash)))
        except NoSuchRef:
            say(_line(commit) + "  [not in this clone; from the ledger]")
    others = ", ".join(name for name in ledger.groups if name != group)
    aside(f"{ledger.groups[group]['title']}. Other groups: {others}.")


@verb
def show(commit: Ref) -> None:
    """A commit: its dates, its title, and the lines that it adds and removes in each file."""
    history = history_said()
    found = history.commit(commit)
    _note(history, commit)
    say(f"commit     {found.hash}")
    say(f"author     {found.author}, {found.date}")
    say(f"committed  {found.committed}")
    say(f"title      {found.subject}\n")
    for change in found.files:
        counts = ["binary", ""] if change.added is None else [f"+{change.added}", f"-{change.removed}"]
        say(f"{counts[0]:>7} {counts[1]:>6}  {change.path}")
    say(f"{f'+{found.added}':>7} {f'-{found.removed}':>6}  in {len(found.files)} files")


@verb
def diff(
    commit: Ref,
    path: Annotated[str | None, typer.Option(help="Only this file or folder.")] = None,
) -> None:
    """What a commit changed. Needs a clone."""
    history = history_said()
    text = history.diff(commit, path and _whole(path))
    _note(history, commit)
    if not text:
        aside(f"{commit} changes nothing below {path}.")
    say(text.rstrip("\n"))


@verb
def files(
    refs: Annotated[
        list[str], typer.Argument(metavar="REF…", help="One ref or several; 0.5.23 is the wheel.")
    ],
    under: Annotated[str, typer.Option(help="The folder.")] = SPECULATIVE,
) -> None:
    """The Python files of a folder at a ref, and how many are workers; several refs make a table."""
    history, ledger = history_said(), LedgerHistory.load()
    for ref in refs:
        wheel = _wheel(ref, ledger)
        if wheel is not None:
            found = wheel.files(under.replace(SPECULATIVE, SPECULATIVE_IN_WHEEL))
        else:
            found = history.files(ref, under)
            _note(history, ref)
        found = [path for path in found if path.endswith(".py")]
        names = [path.rpartition("/")[2].removesuffix(".py") for path in workers(found)]
        say(f"{ref:<12} {len(found):>3} files, {len(names):>2} with _worker: {' '.join(names)}")
        if len(refs) == 1:
            for path in found:
                say(f"  {path}")


@verb
def symbols(
    ref: Ref,
    path: Annotated[str, typer.Argument(help="From upstream's root, or a file name in speculative/.")],
    name: Annotated[str | None, typer.Argument(metavar="[SYMBOL]", help="Print this one's text.")] = None,
) -> None:
    """The classes, functions and methods of a Python file at a ref, with their lines; or one of them."""
    history = history_said()
    wheel = _wheel(ref, LedgerHistory.load())
    path = _whole(path)
    if wheel is not None:
        found = wheel.symbols(path.removeprefix("python/"))
    else:
        found = history.symbols(ref, path)
        _note(history, ref)
    if name is not None:
        chosen = find_symbol(found, name)
        if chosen is None:
            raise NoSuchRef(f"{path} at {ref} defines no {name}.")
        text = wheel.text(path.removeprefix("python/")) if wheel is not None else history.text(ref, path)
        say(excerpt(text, chosen).rstrip("\n"))
        return
    for symbol in found:
        say(f"{symbol.first:>5}-{symbol.last:<5} {symbol.lines:>5}  {symbol.kind:<5}  {symbol.name}")
    aside(f"{len(found)} symbols.")


@verb
def log(
    path: Annotated[str, typer.Argument(help="From upstream's root, or a file name in speculative/.")],
) -> None:
    """The commits of main that touch a file or a folder, oldest first."""
    history, path = history_said(), _whole(path)
    try:
        until = None if isinstance(history, LedgerHistory) else "main"
        found = history.commits(path, until)
    except NotRecorded:
        found = history.recorded(path)
        aside("Only those that the course names; the ledger has no whole log of this path.")
        if not found:
            raise
    for commit in found:
        say(_line(commit))
    aside(f"{len(found)} commits.")


def _note(history: History, ref: str) -> None:
    if note := history.note(ref):
        aside(note)


def _whole(path: str) -> str:
    return path if "/" in path else f"{SPECULATIVE}/{path}"


def _wheel(ref: str, ledger: LedgerHistory) -> Wheel | RecordedWheel | None:
    """The wheel, if `ref` is its version; else None."""
    known = ledger.wheel
    if known is None or ref != known.version:
        return None
    wheel = open_wheel() or known
    aside(f"{ref} from {wheel.label}." if isinstance(wheel, Wheel) else f"{ref} from the wheel as recorded.")
    return wheel
