"""Which clone and which wheel this reader has; `fledge upstream fetch` remembers them in the cache."""

from __future__ import annotations

import json
from pathlib import Path

from ..models.cache import cache_root, write_json
from .clone import CloneHistory
from .history import History
from .ledger import LedgerHistory
from .wheel import Wheel

_KINDS = ("clone", "wheel")


def upstream_root() -> Path:
    """The folder in the cache for what is fetched of upstream."""
    return cache_root() / "upstream"


def remembered(kind: str) -> Path | None:
    """The path of the "clone" or the "wheel" in use; None where none was fetched or named."""
    try:
        path = json.loads((upstream_root() / "source.json").read_text(encoding="utf-8")).get(kind)
    except (OSError, ValueError, AttributeError):
        return None
    return Path(path) if path else None


def remember(kind: str, path: Path) -> None:
    """Use `path` from now on."""
    upstream_root().mkdir(parents=True, exist_ok=True)
    now = {other: str(remembered(other)) for other in _KINDS if remembered(other)}
    write_json(upstream_root() / "source.json", now | {kind: str(path.resolve())})


def open_history() -> History:
    """The reader's clone, or the ledger where there is none; `label` says which."""
    ledger, path = LedgerHistory.load(), remembered("clone")
    if path is None:
        return ledger
    if not path.is_dir():
        ledger.label = f"the recorded ledger, since the clone in {path} is gone"
        return ledger
    return CloneHistory(path, ledger, is_ours=path.parent == upstream_root().resolve())


def open_wheel() -> Wheel | None:
    """The reader's wheel of sglang; None where there is none."""
    path = remembered("wheel")
    return Wheel(path) if path is not None and path.is_file() else None
