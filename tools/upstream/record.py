"""`fledge upstream record`: write the ledger anew from a clone and a wheel. For the course's author."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..models.cache import sha256_of
from .clone import CloneHistory
from .history import Commit, NoSuchRef, Symbol, UpstreamError, as_pull, is_hash, workers
from .named import Named
from .wheel import Wheel


def record(
    history: CloneHistory,
    wheel: Wheel | None,
    named: Named,
    progress: Callable[[Iterable], Iterable] = iter,
    asked: Iterable[tuple[str, tuple]] = (),
) -> dict[str, Any]:
    """The ledger's table: facts of everything that is named, and of what the quiz `asked` of a history, as
    pairs of a method's name and its arguments.

    Raises NoSuchRef or MissingObject where the clone lacks something; a ledger is whole or is not written.
    """
    table = named.table
    history.newest = history.resolve(table["newest"])
    names = [ref for ref in named.commits() if not is_hash(ref) and as_pull(ref) is None]  # tags, in claims
    refs = {
        name: history.resolve(ref) for name, ref in ({name: name for name in names} | table["refs"]).items()
    }
    also_at = [history.resolve(ref) for ref in table["record"]["also_at"]]
    lives = {folder: history.lives(folder) for folder in table["record"]["listed"]}
    logs = {path: history.commits(path) for path in table["record"]["logs"]}

    asked = list(dict.fromkeys(asked))
    named_hashes = [history.resolve(ref) for ref in named.commits()]
    named_hashes += [history.resolve(ref) for name, (ref, *_) in asked if name in ("head", "commit")]
    for life in (life for folder in lives.values() for life in folder if workers([life.path])):
        named_hashes += [full for full in (life.born, life.died) if full]
    commits = {commit.hash: entry(commit) for log in logs.values() for commit in log}
    for life in (life for folder in lives.values() for life in folder):
        commits |= {full: entry(history.head(full)) for full in (life.born, life.died) if full}
    for full in progress(list(dict.fromkeys(named_hashes))):
        commits[full] = entry(history.commit(full))

    in_wheel = [] if wheel is None else _with_symbols(wheel.files(), table["record"])
    places = list(dict.fromkeys([*refs.values(), *also_at]))
    return {
        "about": "Facts about sgl-project/sglang, written by `fledge upstream record`; none of its code.",
        "newest": history.newest,
        "refs": refs,
        "baseline": table.get("baseline", {}),
        "groups": {
            name: {"title": group["title"], "commits": [history.resolve(ref) for ref in group["commits"]]}
            for name, group in table["groups"].items()
        },
        "commits": dict(sorted(commits.items(), key=lambda item: (item[1]["committed"][:10], item[0]))),
        "files": {
            full: {folder: listing(history, full, folder) for folder in table["record"]["listed"]}
            for full in places
        },
        "symbols": {full: symbol_tables(history, full, table["record"]) for full in places},
        "words": [[*of, history.occurrences(*of)] for name, of in asked if name == "occurrences"],
        "lives": {
            folder: [[life.path, life.born, life.died, life.became] for life in found]
            for folder, found in lives.items()
        },
        "logs": {path: [commit.hash for commit in log] for path, log in logs.items()},
        "wheel": None if wheel is None else wheel_table(wheel, sha256_of(wheel.path), in_wheel),
    }


def entry(commit: Commit) -> dict[str, Any]:
    """A commit as the ledger keeps it, under its hash."""
    names = ("title", "pull", "author", "date", "committed")
    found = {name: getattr(commit, name) for name in names}
    if commit.files is not None:
        found["files"] = [[change.path, change.added, change.removed] for change in commit.files]
    return found


def listing(history: CloneHistory, ref: str, folder: str) -> list[list]:
    """[path, lines] of every file below a folder at a commit."""
    return [[path, history.line_count(ref, path)] for path in history.files(ref, folder)]


def symbol_tables(history: CloneHistory, ref: str, record_table: dict[str, Any]) -> dict[str, list]:
    """Path → [name, kind, first, last] of the workers and the named files of the listed folders."""
    found = [path for folder in record_table["listed"] for path in history.files(ref, folder)]
    return {path: rows(history.symbols(ref, path)) for path in _with_symbols(found, record_table)}


def rows(symbols: list[Symbol]) -> list[list]:
    """Symbols as the ledger keeps them."""
    return [[symbol.name, symbol.kind, symbol.first, symbol.last] for symbol in symbols]


def _with_symbols(paths: list[str], record_table: dict[str, Any]) -> list[str]:
    return sorted({*workers(paths), *(p for p in paths if p.rpartition("/")[2] in record_table["symbols"])})


def wheel_table(wheel: Wheel, sha256: str | None, with_symbols: list[str]) -> dict[str, Any]:
    """A wheel as the ledger keeps it."""
    return {
        "version": wheel.version,
        "name": wheel.path.name,
        "sha256": sha256,
        "files": [[path, wheel.line_count(path)] for path in wheel.files() if path.endswith(".py")],
        "symbols": {path: rows(wheel.symbols(path)) for path in with_symbols},
        "flags": wheel.flags,
    }


def refuse_partial(history: CloneHistory) -> None:
    """Raises UpstreamError for a clone from which a ledger cannot be recorded."""
    if history.is_shallow:
        raise UpstreamError(
            "A shallow clone has no births: fetch its whole history first (git fetch --unshallow)."
        )
    try:
        history.resolve("main")
    except NoSuchRef:
        raise UpstreamError(f"{history.label.capitalize()} has no branch main.") from None
