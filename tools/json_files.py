"""JSON that people can read and diff: a container stands on one line wherever that line is short enough."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

WIDTH = 120


def dumps(data: Any, digits: int = 6) -> str:
    """`data` as JSON text without a final newline; floats keep so many significant digits."""
    return _laid_out(_rounded(data, digits), 0)


def write(path: Path, data: Any, digits: int = 6) -> None:
    """Write `data` so that a reader finds the old file or the new one, never a part; make the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(dumps(data, digits) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _laid_out(data: Any, indent: int) -> str:
    flat = json.dumps(data, ensure_ascii=False)
    if len(flat) + indent <= WIDTH or not isinstance(data, (dict, list)):
        return flat
    is_dict = isinstance(data, dict)
    names = [json.dumps(name, ensure_ascii=False) + ": " if is_dict else "" for name in data]
    values = list(data.values()) if is_dict else data
    parts = [name + _laid_out(value, indent + 1) for name, value in zip(names, values, strict=True)]
    if len(data) > 16 and not any(isinstance(value, (dict, list)) for value in values):
        parts = _filled(parts, WIDTH - indent)
    inner, outer = "\n" + " " * (indent + 1), "\n" + " " * indent
    first, last = "{}" if is_dict else "[]"
    return first + inner + f",{inner}".join(parts) + outer + last


def _filled(parts: list[str], width: int) -> list[str]:
    """The same parts with as many on a line as fit."""
    lines = parts[:1]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 2 <= width:
            lines[-1] += ", " + part
        else:
            lines.append(part)
    return lines


def _rounded(data: Any, digits: int) -> Any:
    if isinstance(data, float):
        return float(f"{data:.{digits}g}")
    if isinstance(data, dict):
        return {name: _rounded(value, digits) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_rounded(value, digits) for value in data]
    return data
