"""Quiz and exercises as they stand in the repository; their own packages say what there is."""

from __future__ import annotations

from pathlib import Path

from .page import SNIPPETS, not_yet


def files(repo: Path) -> dict[str, str]:
    """A fragment that says what there is."""
    return {
        f"{SNIPPETS}/exercises.md": not_yet(
            "`fledge quiz` and `fledge exercise` are not built yet. The questions on each page stand already."
        )
    }
