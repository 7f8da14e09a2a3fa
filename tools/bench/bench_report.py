"""What a result file of `fledge bench` says: a table for the terminal, Markdown for the README.

A document has its tables between `<!-- bench NAME -->` and `<!-- /bench -->`; NAME is "speed", "pairs",
"BACKEND SET", such as "triton questions", or "BACKEND evolution BATCH". `render` writes them from
docs/data/bench, and a test compares.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from ..provenance import REPO
from .bench_plans import Asked
from .bench_results import load, result_path
from .bench_summary import best_per_batch, result_of, steady_of, summarise
from .configurations import CHAIN, PLAIN, TREE, name_of
from .pairs_report import pairs_table
from .stages_door import all_stages
from .tables import NOT_YET, about_of, markdown, new_table, number, speed

FOLDER = REPO / "docs" / "data" / "bench"
DOCUMENTS = ("README.md", "docs/data/bench/README.md")
BLOCK = re.compile(r"(<!-- bench (?P<name>[^>]+?) -->\n).*?(<!-- /bench -->)", re.DOTALL)
SCALED = (
    "A bar that names tokens/round scales with them, since how good the draft head is does not belong to the "
    "engine: “here” is the bar at the tokens/round that were reached."
)
HF_NAMES = ("hf greedy", "hf prompt look-up")

Data = dict[str, Any]


def table_of(data: Data) -> Table:
    """Every cell of a result file, one line each."""
    table = new_table(
        "configuration", "batch", "tokens\n/s", "spread", "x\nplain", "tokens\n/round", "ms per\nround",
        "device\nms", "host\nµs", "prefill", "x\nfloor",
    )  # fmt: skip
    rows = [(row["set"], row) for row in summarise(data)]
    rows.sort(key=lambda pair: pair[0] != "questions")
    rows += [("tuning", row) for row in summarise(data, "tune")]
    section = None
    for name, row in rows:
        if name != section:
            section = name
            table.add_row(section, style="bold")
        speeds = row["tokens_per_second"]
        table.add_row(
            row["configuration"],
            str(row["batch"]),
            speed(speeds["median"]),
            f"{(speeds['max'] - speeds['min']) / speeds['median']:.0%}",
            number(row["over_plain"], ".2f"),
            number(row["tokens_per_round"], ".2f"),
            number(row["step_seconds"], ".3f", 1e3),
            number(row["device_seconds"], ".3f", 1e3),
            number(row["host_seconds"], ".0f", 1e6),
            number(row["prefill_share"], ".0%"),
            number(row["over_floor"], ".1f"),
        )
    return table


def notes(data: Data) -> list[str]:
    """What a result file holds beside its cells, a line each."""
    lines = []
    if (floor := result_of(data, "floor")) is not None:
        samples = (floor["copy_bytes_per_second"], floor["layer_matmuls"]["1"], floor["lm_head"]["1"])
        copy, *rest = map(statistics.median, samples)
        layers, lm_head = (number(seconds, ".0f", 1e6) for seconds in rest)
        lines.append(
            f"floor: a copy moves {copy / 1e12:.2f} TB/s; the layers' matmuls at 1 row take {layers} µs, "
            f"the LM head {lm_head} µs"
        )
    for mode in HF_NAMES:
        if (result := result_of(data, "hf", mode)) is not None:
            lines.append(f"{mode}, batch 1: {speed(result['tokens'] / result['seconds'])} tokens/s")
    if tuned := data.get("tuned"):
        lines.append("best shape by batch: " + ", ".join(f"{batch}: {name}" for batch, name in tuned.items()))
    # A later process may have made good what an earlier one failed at.
    last = {(p["kind"], p["configuration"], p["turn"]): p["error"] for p in data["processes"]}
    lines += [f"failed: {name} ({error})" for (_, name, _), error in last.items() if error]
    return lines


# Markdown


def render(check: bool = False, folder: Path = FOLDER, documents: tuple[str, ...] = DOCUMENTS) -> list[str]:
    """Write the tables of the documents anew; returns the documents that were out of date.

    With `check` nothing is written.
    """
    stale = []
    for name in documents:
        path = REPO / name
        old = path.read_text(encoding="utf-8")
        new = rendered(old, folder, path.parent)
        if new != old:
            stale.append(name)
            if not check:
                path.write_text(new, encoding="utf-8")
    return stale


def rendered(text: str, folder: Path = FOLDER, start: Path = REPO) -> str:
    """`text` with every table between its marks as the files in `folder` have it; links begin at `start`."""

    def link(path: Path) -> str:
        return f"[{path.name}]({Path(os.path.relpath(path, start)).as_posix()})"

    def fill(found: re.Match[str]) -> str:
        words = found["name"].split()
        if words == ["speed"]:
            table = speed_table(folder, link)
        elif words == ["pairs"]:
            table = pairs_table(folder, link)
        elif words[1] == "evolution":
            table = evolution_table(folder, link, words[0], int(words[2]))
        else:
            table = set_table(folder, link, *words)
        return f"{found[1]}{table}\n{found[3]}"

    return BLOCK.sub(fill, text)


def speed_table(folder: Path, link: Callable[[Path], str]) -> str:
    """The bars that were set before measuring, and what was reached."""
    goals = json.loads((folder / "goals.json").read_text(encoding="utf-8"))
    path = result_path(folder, goals["stage"], goals["backend"])
    data = load(path) if path.exists() else None
    # A file from another machine says nothing about these bars.
    data = data if data is not None and data["device"] == goals["device"] else None
    lines = [["", "must", "goal", "reached"]]
    for row in goals["rows"]:
        reached = REACHED[row["id"]](data) if data is not None else None
        lines.append([row["what"], *_bars(row, reached)])
    if data is None:
        return markdown(lines)
    return f"{markdown(lines)}\n\n{SCALED} {_about(data)} Source: {link(path)}"


class Reached:
    """A number that was reached, by which configuration, and at which tokens per round where bars scale."""

    def __init__(self, value: float, name: str = "", per_round: float | None = None):
        self.value, self.name, self.per_round = value, name, per_round


def _bars(row: dict[str, Any], reached: Reached | None) -> list[str]:
    less, unit, scale = row["unit"] in ("ms", "µs"), row["unit"], 1.0
    if "per_round" in row and reached is not None:
        scale = reached.per_round / row["per_round"]

    def shown(value: float) -> str:
        text = speed(value) if unit == "tok/s" else f"{value:.2f}" if unit in ("ms", "×") else f"{value:.0f}"
        return f"{text}{'' if unit == '×' else ' '}{unit}"

    def bar(value: float) -> str:
        text = f"{'≤' if less else '≥'} {shown(value)}"
        if "per_round" in row:
            text += f" at {row['per_round']} tokens/round"
            text += f", here {shown(value * scale)}" if reached else ""
        return text

    cells = [bar(row["must"]), bar(row["goal"])]
    if reached is None:
        return [*cells, NOT_YET]

    def met(value: float) -> bool:
        return reached.value <= value * scale if less else reached.value >= value * scale

    verdict = "goal met" if met(row["goal"]) else "must met" if met(row["must"]) else "short of must"
    about = [reached.name] if reached.name else []
    about += [f"{reached.per_round:.2f} tokens/round"] if reached.per_round else []
    note = f" ({', '.join(about)})" if about else ""
    return [*cells, f"{shown(reached.value)}{note}: {verdict}"]


def set_table(
    folder: Path, link: Callable[[Path], str], backend: str, prompts: str, stage: str = "part4_worker"
) -> str:
    """Tokens/s of every configuration at every batch size: median, the slowest and the fastest run."""
    path = result_path(folder, stage, backend)
    if not path.exists():
        return f"{NOT_YET}: `fledge bench {stage} --attention-backend {backend}` on a machine with a GPU"
    data = load(path)
    rows = [row for row in summarise(data) if row["set"] == prompts]
    batches = sorted({row["batch"] for row in rows})
    named = {(row["configuration"], row["batch"]): row for row in rows}
    best = best_per_batch(data, "engine")
    lines = [["tokens/s at batch", *map(str, batches)]]
    for name in (PLAIN, name_of(CHAIN), name_of(TREE)):
        if cells := [_cell(named.get((name, batch))) for batch in batches]:
            lines.append([name, *cells])
    tuned = [named.get((best.get(batch, ""), batch)) for batch in batches]
    lines.append(["EAGLE, tuned", *(_cell(row, with_name=True) for row in tuned)])
    if prompts == "questions":
        for mode in HF_NAMES:
            if (result := result_of(data, "hf", mode)) is not None:
                label = mode.replace("hf", "Hugging Face `generate`,")
                lines.append([label, speed(result["tokens"] / result["seconds"]), *[""] * (len(batches) - 1)])
    return f"{markdown(lines)}\n\n{_about(data)} Source: {link(path)}"


def evolution_table(folder: Path, link: Callable[[Path], str], backend: str, batch: int) -> str:
    """The eight questions at one batch size, stage by stage."""
    shapes = {PLAIN: PLAIN, name_of(CHAIN): "chain", name_of(TREE): "tree"}
    lines = [[f"tokens/s at batch {batch}", *shapes, "source"]]
    about: dict[str, list[str]] = {}
    for stage in all_stages():
        path = result_path(folder, stage.name, backend)
        wanted = Asked(stage, {}).configurations()
        if not path.exists():
            lines.append([stage.name, *(NOT_YET if word in wanted else "" for word in shapes.values()), ""])
            continue
        data = load(path)
        rows = [_row(data, name, batch) for name in shapes]
        cells = [
            _cell(row) if row or word in wanted else ""
            for row, word in zip(rows, shapes.values(), strict=True)
        ]
        lines.append([stage.name, *cells, link(path)])
        about.setdefault(_about(data), []).append(stage.name)
    return "\n\n".join([markdown(lines), *(f"{', '.join(names)}: {text}" for text, names in about.items())])


def _cell(row: dict[str, Any] | None, with_name: bool = False) -> str:
    if row is None:
        return NOT_YET
    speeds = row["tokens_per_second"]
    text = f"{speed(speeds['median'])} ({speed(speeds['min'])}–{speed(speeds['max'])})"
    if row["configuration"] != PLAIN:
        text += f", {row['tokens_per_round']:.2f} a round"
    if row["over_floor"] is not None:
        text += f", {row['over_floor']:.1f}× the floor"
    return f"{row['configuration']}: {text}" if with_name else text


def _about(data: Data) -> str:
    engines = [p for p in data["processes"] if p["kind"] == "engine"]
    turns = Counter((p["configuration"], cell["set"], cell["batch"]) for p in engines for cell in p["cells"])
    halves = sum(count < 2 for count in turns.values())
    which = "Each number comes" if halves == len(turns) else f"{halves} of {len(turns)} numbers come"
    half = (
        f" {which} from one process so far; the second, in the opposite order, has not run." if halves else ""
    )
    return about_of(data, data["processes"]) + half


# What the rows of goals.json ask for


def _phase(name: str, phase: str, scale: float, parts: int = 1) -> Callable[[Data], Reached | None]:
    def find(data: Data) -> Reached | None:
        samples = [s for entry in steady_of(data, name, 1) for s in entry.phases.get(phase, [])]
        return Reached(statistics.median(samples) * scale / parts, name) if samples else None

    return find


def _row(data: Data, name: str | None, batch: int, prompts: str = "questions") -> dict[str, Any] | None:
    wanted = (name, prompts, batch)
    rows = summarise(data)
    return next((r for r in rows if (r["configuration"], r["set"], r["batch"]) == wanted), None)


def _speed(batch: int, drafts: bool, over_plain: bool = False) -> Callable[[Data], Reached | None]:
    def find(data: Data) -> Reached | None:
        row = _row(data, best_per_batch(data, "engine").get(batch) if drafts else PLAIN, batch)
        if row is None or (over_plain and row["over_plain"] is None):
            return None
        value = row["over_plain"] if over_plain else row["tokens_per_second"]["median"]
        return Reached(value, row["configuration"], row["tokens_per_round"]) if drafts else Reached(value)

    return find


def _host(data: Data) -> Reached | None:
    """Of the shape that is best at batch 1."""
    row = _row(data, best_per_batch(data, "engine").get(1), 1)
    if row is None or row["host_seconds"] is None:
        return None
    hidden = "" if row["host_seconds"] else ", hidden behind the device"
    return Reached(row["host_seconds"] * 1e6, row["configuration"] + hidden)


def _never_slower(data: Data) -> Reached | None:
    """The worst ratio to plain decoding of each batch size's best shape, on either prompt set."""
    best = best_per_batch(data, "engine")
    rows = [row for row in summarise(data) if best.get(row["batch"]) == row["configuration"]]
    known = [row for row in rows if row["over_plain"] is not None]
    if not known:
        return None
    worst = min(known, key=lambda row: row["over_plain"])
    return Reached(worst["over_plain"], f"{worst['configuration']}, {worst['set']}, batch {worst['batch']}")


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
