"""The bars that were set for part4_worker before it was measured, and what was reached of each.

A row of `rows` in goals.json has a bar that must be met and one that is the goal; REACHED finds in a result
file what each is about.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bench_results import load, result_path
from .bench_summary import best_per_batch, phase_samples, processes_disagree, row_of, summarise
from .configurations import CHAIN, PLAIN, TREE, name_of
from .tables import NOT_YET, Page, about_file, host_time, markdown, small, speed, speeds

ABOUT = (
    "A bar that names tokens/round scales with them, since how good the draft head is does not belong to the "
    "engine: “here” is the bar at the tokens/round that were reached. Speeds are medians, EAGLE's are of the "
    "best measured shape at a batch size. Host time is the last steady rounds less their graphs "
    "replayed alone, with texts of about the same length: a difference that is known no finer than ±, so a "
    "bar is met where it holds for the difference and ± together."
)

Data = dict[str, Any]


@dataclass(frozen=True)
class Reached:
    """A number that was reached, as it is judged, and what is said of it.

    `worst` is that of the slowest run, `name` says which configuration reached it, `per_round` at how many
    tokens per round where bars scale with them; `text` is shown in the number's place.
    """

    value: float
    worst: float
    name: str = ""
    per_round: float | None = None
    text: str | None = None


def speed_table(folder: Path, page: Page) -> str:
    """The bars that were set before measuring, and what was reached."""
    goals = json.loads((folder / "goals.json").read_text(encoding="utf-8"))
    path = result_path(folder, goals["stage"], goals["backend"])
    data = load(path) if path.exists() else None
    # A file from another machine says nothing about these bars.
    data = data if data is not None and data["device"] == goals["device"] else None
    lines = [["", "must", "goal", "reached", "verdict"]]
    for row in goals["rows"]:
        reached = REACHED[row["id"]](data) if data is not None else None
        lines.append([row["what"], *_cells(row, reached)])
    if data is None:
        return markdown(lines)
    return f"{markdown(lines)}\n\n{ABOUT}\n\n{about_file(data, page)} Source: {page.link(path)}"


def _cells(row: dict[str, Any], reached: Reached | None) -> list[str]:
    """Both bars, what was reached, and the verdict."""
    less, unit, scale = row["unit"] in ("ms", "µs"), row["unit"], 1.0
    if "per_round" in row and reached is not None:
        scale = reached.per_round / row["per_round"]

    def shown(value: float) -> str:
        text = speed(value) if unit == "tok/s" else f"{value:.2f}" if unit in ("ms", "×") else f"{value:.0f}"
        return f"{text}{'' if unit == '×' else ' '}{unit}"

    def bar(value: float) -> str:
        text = f"{'≤' if less else '≥'} {shown(value)}"
        if "per_round" in row:
            here = f"; here {shown(value * scale)}" if reached else ""
            text += small(f"at {row['per_round']} tokens/round{here}")
        return text

    cells = [bar(row["must"]), bar(row["goal"])]
    if reached is None:
        return [*cells, NOT_YET, ""]

    def met(value: float, bar: float) -> bool:
        return value <= bar * scale if less else value >= bar * scale

    highest = next((name for name in ("goal", "must") if met(reached.value, row[name])), None)
    verdict = f"{highest} met" if highest else "short of must"
    if highest and not met(reached.worst, row[highest]):
        verdict += small(f"not by the slowest run, {shown(reached.worst)}")
    about = [reached.name] if reached.name else []
    about += [f"{reached.per_round:.2f} tokens/round"] if reached.per_round else []
    return [
        *cells,
        (reached.text or shown(reached.value)) + (small(", ".join(about)) if about else ""),
        verdict,
    ]


# What the rows of goals.json ask for


def _phase(name: str, phase: str, scale: float, parts: int = 1) -> Callable[[Data], Reached | None]:
    def find(data: Data) -> Reached | None:
        samples = phase_samples(data, name, 1, phase)
        if not samples:
            return None
        return Reached(statistics.median(samples) * scale / parts, max(samples) * scale / parts, name)

    return find


def _speed(batch: int, drafts: bool, over_plain: bool = False) -> Callable[[Data], Reached | None]:
    def find(data: Data) -> Reached | None:
        row = row_of(data, best_per_batch(data, "engine").get(batch) if drafts else PLAIN, batch)
        if row is None or (over_plain and row["over_plain"] is None):
            return None
        found = row["tokens_per_second"]
        value, worst = _ratios(row) if over_plain else (found["median"], found["min"])
        name = row["configuration"] if drafts else ""
        if processes_disagree(row):
            name += f"{', ' * drafts}processes disagree: {speeds(row)} tok/s"
        return Reached(value, worst, name, row["tokens_per_round"] if drafts else None)

    return find


def _ratios(row: Data) -> tuple[float, float]:
    """To plain decoding's median: of the median, and of the slowest run."""
    found = row["tokens_per_second"]
    return row["over_plain"], row["over_plain"] * found["min"] / found["median"]


def _host(data: Data) -> Reached | None:
    """Of the shape that is best at batch 1. Judged is the most that it could be."""
    row = row_of(data, best_per_batch(data, "engine").get(1), 1)
    if row is None or row["host_seconds"] is None:
        return None
    most = (max(0.0, row["host_seconds"]) + row["host_resolution"]) * 1e6
    return Reached(most, most, row["configuration"], text=host_time(row))


def _never_slower(data: Data) -> Reached | None:
    """The worst ratio to plain decoding of each batch size's best shape, on either prompt set."""
    best = best_per_batch(data, "engine")
    rows = [row for row in summarise(data) if best.get(row["batch"]) == row["configuration"]]
    known = [row for row in rows if row["over_plain"] is not None]
    if not known:
        return None
    lowest = min(known, key=lambda row: row["over_plain"])
    name = f"{lowest['configuration']}, {lowest['set']}, batch {lowest['batch']}"
    return Reached(lowest["over_plain"], min(_ratios(row)[1] for row in known), name)


REACHED: dict[str, Callable[[Data], Reached | None]] = {
    "plain_step": _phase(PLAIN, "forward", 1e3),
    "verify_step": _phase(name_of(TREE), "verify", 1e3),
    # The whole draft phase by its forwards: growing and choosing the tree is in it.
    "draft_forward": _phase(name_of(CHAIN), "draft", 1e6, CHAIN[0] - 1),
    "host_round": _host,
    "plain_1": _speed(1, drafts=False),
    "plain_64": _speed(64, drafts=False),
    "eagle_1": _speed(1, drafts=True),
    "eagle_over_plain_1": _speed(1, drafts=True, over_plain=True),
    "eagle_64": _speed(64, drafts=True),
    "never_slower": _never_slower,
}
