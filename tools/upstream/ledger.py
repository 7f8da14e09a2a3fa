"""`LedgerHistory`: the recorded facts of what this course names, for a reader without a clone.

`docs/data/ledger.json` is written by `fledge upstream record` (record.py) and proven by `fledge upstream
check`. It holds hashes, dates, titles, names and counts; no code of upstream's.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from ..provenance import REPO
from .history import (
    SPECULATIVE,
    Change,
    Commit,
    History,
    Life,
    NoSuchRef,
    NotRecorded,
    Symbol,
    UpstreamError,
    as_pull,
    check_path,
    check_ref,
    is_hash,
)

LEDGER = REPO / "docs" / "data" / "ledger.json"
_FETCH = "A clone has it: fledge upstream fetch"


class LedgerHistory(History):
    """What the ledger recorded. Raises NotRecorded, with what to run, for everything else."""

    label = "the recorded ledger"

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table
        self.newest = table["newest"]

    @classmethod
    def load(cls, path: Path = LEDGER) -> LedgerHistory:
        """Raises UpstreamError where the file is missing or no ledger."""
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            table["newest"], table["commits"], table["refs"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UpstreamError(
                f"The ledger {path} cannot be used ({type(error).__name__}: {error}). "
                "It is part of the repository: take it from there again."
            ) from None
        return cls(table)

    # What only the ledger knows

    @cached_property
    def wheel(self) -> RecordedWheel | None:
        return RecordedWheel(self.table["wheel"]) if self.table.get("wheel") else None

    @property
    def groups(self) -> dict[str, dict[str, Any]]:
        """Name → title and the hashes in it, as docs/data/named.toml has them."""
        return self.table["groups"]

    def group(self, name: str) -> list[Commit]:
        """The commits of a group by their authors' days. Raises NotRecorded for an unknown name."""
        if name not in self.groups:
            raise NotRecorded(f"There is no group {name!r}; there are {', '.join(self.groups)}.")
        return sorted(map(self.head, self.groups[name]["commits"]), key=lambda commit: commit.day)

    def recorded(self, path: str | None = None) -> list[Commit]:
        """Every commit with files in the ledger (that touches `path` or something below it), oldest first."""
        found = [self.commit(full) for full, entry in self.table["commits"].items() if "files" in entry]
        if path is not None:
            start = check_path(path) + "/"
            found = [c for c in found if any((f.path + "/").startswith(start) for f in c.files)]
        return sorted(found, key=lambda commit: commit.day)

    def is_baseline(self, ref: str) -> bool:
        """Whether `ref` is the commit that the chapter calls its baseline."""
        known = self.table.get("baseline", {}).get("commit", "")
        return is_hash(ref) and bool(known) and (ref.startswith(known) or known.startswith(ref))

    def stand_in_note(self, ref: str) -> str:
        day = self.head(self.newest).committed[:10]
        return (
            f"{ref}, the chapter's baseline, is not here: main at {self.newest[:10]} ({day}), "
            "the newest recorded ref, stands in for it."
        )

    def find(self, ref: str) -> str | None:
        """The full hash of a recorded ref, pull request or hash; None where there is no record."""
        if ref in self.table["refs"]:
            return self.table["refs"][ref]
        if (pull := as_pull(ref)) is not None:
            found = [full for full, entry in self.table["commits"].items() if entry.get("pull") == pull]
            return found[-1] if found else None
        found = [full for full in self.table["commits"] if is_hash(ref) and full.startswith(ref)]
        return found[0] if len(found) == 1 else None

    # History

    def resolve(self, ref: str) -> str:
        full = self.find(check_ref(ref))
        if full is None and self.is_baseline(ref):
            return self.newest
        if full is None and not is_hash(ref.removesuffix("^")) and as_pull(ref.removesuffix("^")) is None:
            raise NoSuchRef(f"The ledger has no ref {ref}; it has {', '.join(self.table['refs'])}. {_FETCH}")
        if full is None:
            raise NotRecorded(f"The ledger has no record of {ref}. {_FETCH}")
        return full

    def note(self, ref: str) -> str | None:
        return self.stand_in_note(ref) if self.is_baseline(ref) and self.find(ref) is None else None

    def head(self, ref: str) -> Commit:
        full = self.resolve(ref)
        entry = self.table["commits"][full]
        return Commit(full, *(entry.get(name) for name in ("title", "pull", "author", "date", "committed")))

    def commit(self, ref: str) -> Commit:
        head = self.head(ref)
        files = self.table["commits"][head.hash].get("files")
        if files is None:
            raise NotRecorded(f"The ledger has {head.short} by its title only. {_FETCH}")
        return Commit(**{**vars(head), "files": tuple(Change(*change) for change in files)})

    def commits(self, path: str | None = None, until: str | None = None) -> list[Commit]:
        whole = until is None or self.resolve(until) == self.newest
        if path not in self.table["logs"] or not whole:
            raise NotRecorded(f"The ledger has no whole log of {path or 'main'}. {_FETCH}")
        return [self.head(full) for full in self.table["logs"][path]]

    def files(self, ref: str, under: str = SPECULATIVE) -> list[str]:
        return [path for path, _ in self._listing(ref, under)]

    def line_count(self, ref: str, path: str) -> int:
        count = dict(self._listing(ref, path.rpartition("/")[0])).get(path)
        if count is None:
            raise NotRecorded(f"The ledger has no length of {path} at {ref}. {_FETCH}")
        return count

    def _listing(self, ref: str, under: str) -> list[list]:
        """[path, lines] of every file below `under`, from the recorded folder that contains it."""
        recorded = self.table["files"].get(self.resolve(ref), {})
        start = check_path(under) + "/" if under else ""
        for folder, listing in recorded.items():
            if start.startswith(folder + "/"):
                return [[path, count] for path, count in listing if path.startswith(start)]
        raise NotRecorded(f"The ledger has no file list of {under or 'the whole tree'} at {ref}. {_FETCH}")

    def symbols(self, ref: str, path: str) -> list[Symbol]:
        found = self.table["symbols"].get(self.resolve(ref), {}).get(path)
        if found is None:
            raise NotRecorded(f"The ledger has no symbols of {path} at {ref}. {_FETCH}")
        return [Symbol(*symbol) for symbol in found]

    def lives(self, under: str = SPECULATIVE) -> list[Life]:
        if under not in self.table["lives"]:
            raise NotRecorded(f"The ledger has no births and deaths of {under}. {_FETCH}")
        return [Life(*life) for life in self.table["lives"][under]]

    def occurrences(self, word: str, ref: str, path: str | None = None, symbol: str | None = None) -> int:
        found = self._words.get((word, ref, path, symbol))
        if found is None:
            where = path or "what the commit changes"
            raise NotRecorded(f"The ledger has not counted {word!r} in {where} at {ref}. {_FETCH}")
        return found

    @cached_property
    def _words(self) -> dict[tuple, int]:
        return {tuple(asked): count for *asked, count in self.table.get("words", [])}

    def text(self, ref: str, path: str) -> str:
        raise NotRecorded(f"The ledger keeps no code. {_FETCH}")

    def diff(self, ref: str, path: str | None = None) -> str:
        raise NotRecorded(f"The ledger keeps no code. {_FETCH}")


class RecordedWheel:
    """What the ledger has of the wheel: the same questions as `Wheel`, without the text."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.version, self.name, self.sha256 = (table[name] for name in ("version", "name", "sha256"))
        self.flags: list[str] = table["flags"]  # every field of ServerArgs, in upstream's order
        self._files: list[list] = table["files"]
        self._symbols: dict[str, list] = table["symbols"]

    def files(self, under: str = "sglang/srt/speculative") -> list[str]:
        """Python files below a recorded folder of the wheel, sorted; empty for any other folder."""
        return [path for path, _ in self._files if path.startswith(under.rstrip("/") + "/")]

    def line_count(self, path: str) -> int:
        count = dict(self._files).get(path)
        if count is None:
            raise NotRecorded(
                f"The ledger has no length of {path} in the wheel. Run: fledge upstream fetch --wheel"
            )
        return count

    def symbols(self, path: str) -> list[Symbol]:
        if path not in self._symbols:
            raise NotRecorded(
                f"The ledger has no symbols of {path} in the wheel. Run: fledge upstream fetch --wheel"
            )
        return [Symbol(*symbol) for symbol in self._symbols[path]]

    def text(self, path: str) -> str:
        raise NotRecorded("The ledger keeps no code. The wheel has it: fledge upstream fetch --wheel")
