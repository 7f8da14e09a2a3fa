"""What this course names of upstream: named.toml, every stage.toml and the claims of the pages."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..provenance import REPO
from .claims import Claim, read_claims
from .history import UpstreamError

NAMED = REPO / "docs" / "data" / "named.toml"
STAGES = REPO / "stages"


@dataclass(frozen=True)
class Named:
    """The tables as they are read, and what follows from them."""

    table: dict[str, Any]  # named.toml
    stages: dict[str, dict[str, Any]]  # stage → its stage.toml
    claims: list[Claim]

    @classmethod
    def read(cls, named: Path = NAMED, stages: Path = STAGES, claims: list[Claim] | None = None) -> Named:
        """Raises UpstreamError for a file that cannot be used."""
        try:
            tables = {p.parent.name: _toml(p) for p in sorted(stages.glob("*/stage.toml"))}
            return cls(_toml(named), tables, read_claims() if claims is None else claims)
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise UpstreamError(f"What the course names cannot be read: {error}") from None

    def commits(self) -> list[str]:
        """Every commit that is named, as it is written, each once, without the chapter's baseline."""
        found = [*self.table["refs"].values(), self.table["newest"], *self.table["record"]["also_at"]]
        for group in self.table["groups"].values():
            found += group["commits"]
        for table in self.stages.values():
            found += hashes(table)
        found += [claim.proof["commit"].removesuffix("^") for claim in self.claims if claim.kind == "git"]
        baseline = self.table.get("baseline", {}).get("commit")
        return [ref for ref in dict.fromkeys(found) if ref != baseline]

    def texts(self) -> list[tuple[str, str]]:
        """(commit, path) of every file of which a source map or a claim needs the text."""
        found = [
            (entry["commit"], entry["upstream"].partition(":")[0])
            for table in self.stages.values()
            for entry in source_map(table)
        ]
        found += [
            (claim.proof["commit"], claim.proof["path"])
            for claim in self.claims
            if claim.kind == "git" and "path" in claim.proof and claim.proof.get("exists") is not False
        ]
        return list(dict.fromkeys(found))


def source_map(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The entries of a stage.toml that put a symbol of ours beside one of upstream's."""
    yield from (
        entry for entry in tables_in(table) if "here" in entry and "upstream" in entry and "commit" in entry
    )


def tables_in(value: Any) -> Iterator[dict[str, Any]]:
    """Every table inside a TOML value, itself included."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from tables_in(inner)


def hashes(value: Any) -> list[str]:
    """Every string inside a TOML value that is a commit's hash, of ten digits or all."""
    if isinstance(value, str):
        return [value] if re.fullmatch(r"[0-9a-f]{10}|[0-9a-f]{40}", value) else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [found for item in inner for found in hashes(item)]


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))
