"""The bars that were set for spec_v2 before it was measured, and what alternated pairs say of each.

A row of `pairs` in goals.json names the files, prompt set and batch sizes that it is about, and which of a
cell's intervals (pairs_summary.py) its bars hold for. A bar is reached where the whole interval is beyond it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .pairs_summary import load_pairs, side_name
from .tables import NOT_YET, Page, about_of, markdown, small

WITHIN_NOISE = "within noise"
ENOUGH = 10  # pairs
ABOUT = (
    "Medians of alternated pairs, below them the bootstrap interval: 95 % of the medians of resamples. "
    "A bar is reached where all of the interval lies beyond it; within noise is an interval that reaches 1×."
)


def pairs_table(folder: Path, page: Page) -> str:
    """A line for each bar and batch size; what is not measured is said to be."""
    goals = json.loads((folder / "goals.json").read_text(encoding="utf-8"))
    lines, sources = [["", "must", "goal", "reached", "verdict"]], {}
    for row in goals["pairs"]["rows"]:
        found = {name: data for name in row["files"] if (data := _load(folder, name, goals["device"]))}
        for batch in row["batches"]:
            lines.append([f"{row['what']}, batch {batch}", *_bars(row), *_reached(row, found, batch)])
        sources |= found
    about: dict[str, list[str]] = {}
    for name, data in sources.items():
        about.setdefault(about_of(data, [data], page), []).append(page.link(folder / f"{name}.json"))
    return "\n\n".join([markdown(lines), ABOUT, *(f"{', '.join(f)}: {text}" for text, f in about.items())])


def _load(folder: Path, name: str, device: str) -> dict[str, Any] | None:
    """A file of pairs; one from another machine says nothing about these bars."""
    path = folder / f"{name}.json"
    data = load_pairs(path) if path.exists() else None
    return data if data is not None and data["device"] == device else None


def _bars(row: dict[str, Any]) -> list[str]:
    def bar(value: float | str | None) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        return f"{'<' if row.get('less') else '>'} {_shown(row, value)}"

    return [bar(row.get("must")), bar(row.get("goal"))]


def _shown(row: dict[str, Any], value: float) -> str:
    return f"{value:.2f}×" if row["quantity"] == "ratio" else f"{value:.1%}"


def _reached(row: dict[str, Any], found: dict[str, dict[str, Any]], batch: int) -> list[str]:
    """The interval, and what it makes of the bars; of several files the one that looks worst."""
    cells = [
        (cell["summary"][row["quantity"]], side_name(data["sides"][1]))
        for data in found.values()
        for cell in data["cells"]
        if (cell["set"], cell["batch"]) == (row["set"], batch)
    ]
    if len(cells) < len(row["files"]):
        return [NOT_YET, ""]
    worst, other = min(cells, key=lambda cell: cell[0]["median"])
    median, low, high = (_shown(row, worst[name]) for name in ("median", "low", "high"))
    over = f" over {other}" if len(cells) > 1 else ""
    return [median + small(f"{low}–{high}, {worst['pairs']} pairs{over}"), _verdict(row, worst)]


def _verdict(row: dict[str, Any], found: dict[str, Any]) -> str:
    def met(bar: float | str | None) -> bool:
        if bar == WITHIN_NOISE:
            return found["high"] >= 1
        if bar is None or isinstance(bar, str):
            return False
        return found["high"] < bar if row.get("less") else found["low"] > bar

    if found["pairs"] < ENOUGH:
        return f"no verdict on fewer than {ENOUGH} pairs"
    if met(row.get("goal")):
        return "goal reached"
    if "must" not in row:
        return "short of goal"
    return "must reached" if met(row["must"]) else "short of must"
