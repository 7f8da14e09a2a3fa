"""JSON that people can read and diff: a container stands on one line wherever that line is short enough."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

WIDTH = 120


def dumps(data: Any) -> str:
    """`data` as JSON text without a final newline; floats keep six significant digits."""
    return _laid_out(_rounded(data), 0)


def write(path: Path, data: Any) -> None:
    """Write `data` so that a reader finds the old file or the new one, never a part; make the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(dumps(data) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _laid_out(data: Any, indent: int) -> str:
    flat = json.dumps(data, ensure_ascii=False)
    if len(flat) + indent <= WIDTH or not isinstance(data, (dict, list)):
        return flat
    inner, outer = "\n" + " " * (indent + 1), "\n" + " " * indent
    if isinstance(data, dict):
        parts = [json.dumps(k, ensure_ascii=False) + ": " + _laid_out(v, indent + 1) for k, v in data.items()]
        return "{" + inner + f",{inner}".join(parts) + outer + "}"
    if all(isinstance(value, (int, float)) for value in data):  # numbers fill lines
        return "[" + inner + inner.join(textwrap.wrap(flat[1:-1], WIDTH - indent)) + outer + "]"
    return "[" + inner + f",{inner}".join(_laid_out(value, indent + 1) for value in data) + outer + "]"


def _rounded(data: Any) -> Any:
    if isinstance(data, float):
        return float(f"{data:.6g}")
    if isinstance(data, dict):
        return {key: _rounded(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_rounded(value) for value in data]
    return data
