"""`fledge upstream check`: the ledger, the source maps and the claims of the pages, proven against a clone.

Every fact is proven, told (it has no proof and says why), failed, or not checkable with this clone. A commit
that a clone lacks is not checkable as long as the clone is shallow or older than what was recorded; in any
other clone it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from .claims import Disproved, prove
from .clone import CloneHistory
from .history import History, MissingObject, NoSuchRef, UpstreamError
from .ledger import LedgerHistory
from .named import Named, hashes, source_map, tables_in
from .record import entry, listing, rows, wheel_table
from .symbols import find_symbol, has_name
from .wheel import Wheel

PROVEN, TOLD, FAILED, UNCHECKED = STATES = ("proven", "told", "failed", "not checkable")


@dataclass(frozen=True)
class Fact:
    """One thing that was looked at: where it is said, what it is, how it came out and, if not well, why."""

    where: str
    what: str
    state: str
    why: str = ""


def check(
    history: CloneHistory,
    wheel: Wheel | None,
    ledger: LedgerHistory,
    named: Named,
    progress: Callable[[list], Iterable] = iter,
) -> list[Fact]:
    """All facts, in order: ledger, stages, claims."""
    present = history.present()
    is_whole = not history.is_shallow and ledger.newest in present
    facts = []
    tasks = [
        *_ledger_tasks(history, wheel, ledger),
        *_stage_tasks(history, named),
        *_claim_tasks(history, wheel, named),
    ]
    for where, what, proof in progress(tasks):
        if proof is None:
            facts.append(Fact(where, what, TOLD))
            continue
        try:
            proof()
            facts.append(Fact(where, what, PROVEN))
        except NoSuchRef as error:
            facts.append(Fact(where, what, FAILED if is_whole else UNCHECKED, str(error)))
        except MissingObject as error:
            facts.append(Fact(where, what, UNCHECKED, str(error)))
        except UpstreamError as error:
            facts.append(Fact(where, what, FAILED, str(error)))
    return facts


Task = tuple[str, str, Callable[[], None] | None]


def _ledger_tasks(history: CloneHistory, wheel: Wheel | None, ledger: LedgerHistory) -> Iterator[Task]:
    """Each recorded fact, made again from the clone and compared."""

    def task(what: str, recorded: Any, make: Callable[..., Any], *arguments: Any) -> Task:
        return "ledger", what, lambda: _same(recorded, make(*arguments))

    table = ledger.table
    for name, full in table["refs"].items():
        if name == "main":  # it moves on; the recorded commit stays a part of it
            yield task("ref main", full, history.holds_on_main, full)
        else:
            yield task(f"ref {name}", full, history.resolve, name)
    for full, recorded in table["commits"].items():
        read = history.commit if "files" in recorded else history.head
        yield task(f"commit {full[:10]}", recorded, lambda read=read, full=full: entry(read(full)))
    for full, folders in table["files"].items():
        for folder, recorded in folders.items():
            yield task(f"files in {folder} at {full[:10]}", recorded, listing, history, full, folder)
    for full, paths in table["symbols"].items():
        for path, recorded in paths.items():
            read = partial(history.symbols, full, path)
            yield task(f"symbols of {path} at {full[:10]}", recorded, lambda read=read: rows(read()))
    for *of, count in table.get("words", []):
        yield task(f"{of[0]!r} in {of[2] or 'the diff'} at {of[1]}", count, history.occurrences, *of)
    for folder, recorded in table["lives"].items():
        found = cache(
            lambda folder=folder: [[x.path, x.born, x.died, x.became] for x in history.lives(folder)]
        )
        yield task(f"number of files that lived in {folder}", len(recorded), lambda found=found: len(found()))
        for life in recorded:
            yield "ledger", f"birth and death of {life[0]}", partial(_among, life, found)
    for path, recorded in table["logs"].items():
        yield task(f"log of {path}", recorded, lambda path=path: [c.hash for c in history.commits(path)])
    for part in ("files", "symbols", "flags") if table.get("wheel") else ():
        yield "ledger", f"{part} of the wheel", partial(_wheel_part, table["wheel"], part, wheel)


def _wheel_part(recorded: dict[str, Any], part: str, wheel: Wheel | None) -> None:
    if wheel is None:
        raise MissingObject("There is no wheel here. Run: fledge upstream fetch --wheel")
    _same(recorded[part], wheel_table(wheel, recorded["sha256"], list(recorded["symbols"]))[part])


def _stage_tasks(history: CloneHistory, named: Named) -> Iterator[Task]:
    for stage, table in named.stages.items():
        for full in dict.fromkeys(hashes(table)):
            yield stage, f"commit {full[:10]}", partial(_finds, history.resolve, full)
        for inner in tables_in(table):
            for name, commit in inner.items():
                if name in ("commit", "until") and isinstance(commit, str):
                    start = "" if name == "commit" else "until_"
                    about = {
                        key: inner[start + key] for key in ("pull", "date", "tag") if start + key in inner
                    }
                    for key, said in about.items():
                        yield (
                            stage,
                            f"{key} {said} of {commit[:10]}",
                            partial(_about, history, commit, key, said),
                        )
        for item in source_map(table):
            what = f"{item['upstream']} at {item['commit'][:10]}"
            yield stage, what, partial(upstream_symbol, history, item)


def _finds(resolve: Callable[[str], str], full: str) -> None:
    _same(full, resolve(full)[: len(full)])


def _about(history: History, commit: str, key: str, said: Any) -> None:
    if key == "tag":
        return _same(commit, history.resolve(said))
    head = history.head(commit)
    _same(str(said), str(head.pull if key == "pull" else head.day))


def upstream_symbol(history: History, item: dict[str, Any]) -> Any:
    """The symbol that an entry of a source map names, from its file at its commit.

    Returns a `Symbol` for Python and None for other languages, where the name is searched for. Raises
    Disproved or NoSuchFile where it is not there.
    """
    path, _, name = item["upstream"].partition(":")
    if path.endswith(".py"):
        found = find_symbol(history.symbols(item["commit"], path), name)
        if found is not None:
            return found
    elif has_name(history.text(item["commit"], path), name):
        return None
    raise Disproved(f"{path} at {item['commit'][:10]} defines no {name}")


def _claim_tasks(history: CloneHistory, wheel: Wheel | None, named: Named) -> Iterator[Task]:
    for claim in named.claims:
        what = f"{claim.id}{' (wheel)' if claim.kind == 'wheel' else ''}"
        proof = None if claim.kind == "told" else lambda claim=claim: prove(claim, history, wheel)
        yield f"claims/{claim.page}", what, proof


def _same(said: Any, found: Any) -> None:
    if said != found:
        raise Disproved(_difference(said, found))


def _among(life: list, found: Callable[[], list[list]]) -> None:
    lives = found()
    if life not in lives:
        raise Disproved(f"recorded {life[1:]}, found {[other[1:] for other in lives if other[0] == life[0]]}")


def _difference(said: Any, found: Any) -> str:
    """Where two values differ, as short as it can be said."""
    if isinstance(said, dict) and isinstance(found, dict):
        names = [name for name in said | found if said.get(name) != found.get(name)]
        return "; ".join(f"{name}: {_difference(said.get(name), found.get(name))}" for name in names)
    if isinstance(said, list) and isinstance(found, list) and said and found:
        only = [[x for x in a if x not in b][:2] for a, b in ((said, found), (found, said))]
        return f"recorded only {only[0]}, found only {only[1]}"
    return f"recorded {said!r}, found {found!r}"
