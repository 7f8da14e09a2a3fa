"""Where the chapter and the diffs disagree: docs/data/errata.toml, with the commands that show it."""

from __future__ import annotations

from pathlib import Path

from ..upstream.claims import command, expected
from .claims import claims_of
from .page import SNIPPETS, Problem, fence, read_toml

KEYS = {"id", "title", "chapter", "diffs", "claims"}


def files(repo: Path) -> dict[str, str]:
    """One section for each disagreement."""
    claims = {claim.id: claim for claim in claims_of(repo)}
    parts = []
    for number, entry in enumerate(read_toml(repo / "docs" / "data" / "errata.toml").get("errata", []), 1):
        if set(entry) != KEYS or not entry["claims"]:
            raise Problem(
                f"errata.toml: entry {number} needs {', '.join(sorted(KEYS))}, and a claim at least."
            )
        if unknown := [name for name in entry["claims"] if name not in claims]:
            raise Problem(f"errata.toml: {entry['id']} names the claim {unknown[0]!r}, which does not exist.")
        shown = "\n".join(
            f"- [{claims[name].says}](claims.md#{name})"
            + (f" The command {what}." if (what := expected(claims[name])) else "")
            for name in entry["claims"]
        )
        commands = "\n".join(text for name in entry["claims"] if (text := command(claims[name])))
        parts.append(
            f"## {number}. {entry['title']} {{ #{entry['id']} }}\n\n"
            f"The chapter: {entry['chapter']}\n\n**The diffs:** {entry['diffs']}\n\n{shown}\n\n"
            + (fence(commands, "sh") if commands else "")
        )
    return {f"{SNIPPETS}/errata.md": "\n\n".join(parts)}
