"""Numbers on pages: every one is read from a file that `fledge bench` wrote, or from docs/data/peer.json.

Where a file is not there, the page says that nothing was measured.
"""

from __future__ import annotations

import json
import statistics
from html import escape
from pathlib import Path
from typing import Any

from ..bench.bars_report import speed_table
from ..bench.bench_report import evolution_table, set_table
from ..bench.bench_results import load, result_path
from ..bench.bench_summary import best_per_batch, phase_samples, processes_disagree, row_of, summarise
from ..bench.configurations import CHAIN, PLAIN, TREE, name_of, shape_of
from ..bench.pairs_report import pairs_table
from ..bench.tables import NOT_YET, Page, about_file, about_of, host_time, small, speed, speeds
from .page import SNIPPETS, Problem, read_toml, table
from .stages import ORDER, title_of

BACKENDS = ("triton", "flashinfer")
SETS = ("questions", "held-out")
EVOLUTION_BATCH = 8  # at which every stage is measured
SHORT = (
    "Tokens/s, and below them tokens a round, in short runs that choose which shapes are measured in full; "
    "bold is the fastest of a column in these runs. They differ by the noise of the host: where the table of "
    "full runs has another best measured shape, believe that one."
)
KEYS = {"id", "title", "invariant", "hypothesis", "loses", "misleads", "measured"}
# Field of a row of a result file → how it is shown: factor, digits, unit.
FIELDS = {
    "tokens_per_second": (1.0, ",.0f", "tokens/s"),
    "tokens_per_round": (1.0, ".2f", "tokens a round"),
    "step_seconds": (1e3, ".3f", "ms a step"),
    "device_seconds": (1e3, ".3f", "ms of the device"),
    "host_seconds": (1e6, ".0f", "µs of the host"),
    "over_floor": (1.0, ".1f", "× the floor"),
    "over_plain": (1.0, ".2f", "× plain"),
    "verify_seconds": (1e3, ".2f", "ms of the device to verify"),
    "verify_over_plain": (1.0, ".2f", "× a plain step to verify"),
}

PAGE = Page(lambda path: f"`{path.name}`", is_built=True)  # files of docs/data/bench by their short names

Data = dict[str, Any]


def files(repo: Path) -> dict[str, str]:
    """The chart, the tables, the ledger of optimisations, and the peer's numbers."""
    folder = repo / "docs" / "data" / "bench"
    found = {"speed": speed_table(folder, PAGE), "evolution": evolution(folder), "tuning": tuning(folder)}
    for backend in BACKENDS:
        for prompts in SETS:
            found[f"{backend}-{prompts}"] = set_table(folder, PAGE, backend, prompts)
    found["methods"] = set_table(folder, PAGE, "triton", "questions", "spec_v2")
    found["pairs"] = pairs_table(folder, PAGE)
    found["optimisations"] = optimisations(repo, folder)
    found["verification"] = verification(folder)
    found["peer"] = peer(repo)
    return {f"{SNIPPETS}/bench/{name}.md": text for name, text in found.items()}


def results(folder: Path, stage: str, backend: str = "triton") -> Data | None:
    """A stage's result file, or None."""
    path = result_path(folder, stage, backend)
    return load(path) if path.is_file() else None


# The evolution chart


def evolution(folder: Path) -> str:
    """Tokens per second of every stage, plain and with its best drafts: bars with their extremes, a table."""
    if not any(results(folder, stage) for stage in ORDER):
        return f"{NOT_YET}: `fledge bench STAGE` on a machine with a GPU writes what this chart shows.\n"
    note = (
        "Median tokens per second on the eight questions: grey is plain decoding, light a drafted chain, "
        "dark a drafted tree. The thin line runs from the slowest run to the fastest; two numbers are two "
        "processes that disagree. From "
        "<code>docs/data/bench/STAGE-triton.json</code>."
    )
    chart = bars(folder, EVOLUTION_BATCH)
    figure = f'<figure class="drawing">\n{chart}<figcaption>{note}</figcaption></figure>\n'
    table = evolution_table(folder, PAGE, "triton", EVOLUTION_BATCH)
    return f"{figure}\n{slower(folder, EVOLUTION_BATCH)}\n{table}\n"


def slower(folder: Path, batch: int) -> str:
    """Why the bars of a stage without a drafting graph are the wrong way round, with by how much."""
    ratios = []
    for stage in ORDER[1:3]:
        rows = dict(rows_of(results(folder, stage), batch))
        if len(rows) == 2:
            plain, drafts = (median(rows[kind]) for kind in ("plain", "eagle"))
            if drafts < plain:
                ratios.append(f"{plain / drafts:.1f} times slower in {title_of(stage).lower()}")
    if not ratios:
        return ""
    return (
        f"Speculation is {' and '.join(ratios)} than plain decoding there. A plain step is one CUDA graph "
        "from part 2 on. Of a round only the verification is one: the draft's forwards and its extend run "
        "kernel by kernel until part 4. Parts 1 to 3 draft chains, part 4 and spec v2 trees.\n"
    )


def bars(folder: Path, batch: int) -> str:
    """One chart of 360 px, which fits a phone: two bars for each stage."""
    groups = [(stage, rows_of(results(folder, stage), batch)) for stage in ORDER]
    top = max((row["tokens_per_second"]["max"] for _, rows in groups for _, row in rows), default=1.0)
    width, left, room, y, parts = 360, 4, 210, 34, []
    parts.append(f'<text class="head" x="{left}" y="16">{batch} request{"s" * (batch > 1)} at once</text>')
    for stage, rows in groups:
        parts.append(f'<text x="{left}" y="{y}">{title_of(stage)}</text>')
        y += 7
        for kind, row in rows:
            scale = room / top
            shape = shape_of(row["configuration"])
            kind = "chain" if shape and shape[1] == 1 else kind
            label = f"{speeds(row)} {escape(row['configuration'])}"
            long, low, high = (row["tokens_per_second"][name] * scale for name in ("median", "min", "max"))
            parts.append(
                f'<rect class="bar {kind}" x="{left}" y="{y}" width="{long:.1f}" height="13" rx="2"/>'
                f'<path class="range" d="M{left + low:.1f} {y + 6.5}H{left + high:.1f}"/>'
                f'<text class="small" x="{left + high + 5:.1f}" y="{y + 11}">{label}</text>'
            )
            y += 17
        if not rows:
            parts.append(f'<text class="small" x="{left}" y="{y + 9}">{NOT_YET}</text>')
            y += 15
        y += 16
    label = f"Tokens per second by stage, {batch} at once"
    return (
        f'<svg viewBox="0 0 {width} {y - 12}" role="img" aria-label="{label}">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def rows_of(data: Data | None, batch: int) -> list[tuple[str, Data]]:
    """("plain", its row) and ("eagle", the row of the best drafts), as far as they were measured."""
    if data is None:
        return []
    named = {(row["configuration"], row["set"], row["batch"]): row for row in summarise(data)}
    best = best_per_batch(data, "engine").get(batch, "")
    pairs = [
        ("plain", named.get((PLAIN, "questions", batch))),
        ("eagle", named.get((best, "questions", batch))),
    ]
    return [(kind, row) for kind, row in pairs if row is not None]


# The choice of shape


def tuning(folder: Path, stage: str = "part4_worker") -> str:
    """Tokens per second of every shape that was tried, at every batch size."""
    data = results(folder, stage)
    rows = summarise(data, "tune") if data is not None else []
    if not rows:
        return f"{NOT_YET}: `fledge bench {stage} --tune` on a machine with a GPU\n"
    batches = sorted({row["batch"] for row in rows})
    best = {batch: max((r for r in rows if r["batch"] == batch), key=median) for batch in batches}
    lines = []
    for name in dict.fromkeys(row["configuration"] for row in rows):
        cells = {row["batch"]: row for row in rows if row["configuration"] == name}
        line = [name]
        for batch in batches:
            row = cells.get(batch)
            text = NOT_YET
            if row is not None:
                mark = "**" * (row is best[batch])
                text = f"{mark}{speed(median(row))}{mark}" + small(f"{row['tokens_per_round']:.2f}")
            line.append(text)
        lines.append(line)
    about = about_of(data, (p for p in data["processes"] if p["kind"] == "tune"), PAGE)
    name = PAGE.link(Path(f"{stage}-triton.json"))
    shown = table(["steps/topk/tokens, at batch", *map(str, batches)], lines)
    return f"{shown}\n\n{SHORT}\n\n{about} Source: {name}\n"


def median(row: Data) -> float:
    return row["tokens_per_second"]["median"]


# What a verification costs


def verify_times(data: Data, name: str, batch: int) -> dict[str, float]:
    """Seconds of the device that a configuration's verification takes, and over plain decoding's step."""

    def seconds(configuration: str, phase: str) -> float | None:
        found = phase_samples(data, configuration, batch, phase)
        return statistics.median(found) if found else None

    verify, plain = seconds(name, "verify"), seconds(PLAIN, "forward")
    if verify is None or plain is None:
        return {}
    return {"verify_seconds": verify, "plain_seconds": plain, "verify_over_plain": verify / plain}


def verification(folder: Path, stage: str = "part4_worker") -> str:
    """The sentence that goes with “a few rows cost about what one costs”: what they cost here."""
    data = results(folder, stage)
    times = {s: verify_times(data, name_of(s), 1) for s in (CHAIN, TREE)} if data is not None else {}
    known = {shape: found for shape, found in times.items() if found}
    if not known:
        return f"What it costs here: {NOT_YET}.\n"
    plain = next(iter(known.values()))["plain_seconds"]
    costs = "; ".join(
        f"{found['verify_seconds'] * 1e3:.2f} ms to verify the {shape[2]} rows of {name_of(shape)}, "
        f"{found['verify_over_plain']:.2f} times as much"
        for shape, found in known.items()
    )
    over = dict(rows_of(data, 1))["plain"]["over_floor"]
    floor = f": a plain step takes {over:.1f} times as long as reading the weights once" if over else ""
    return (
        f"Measured here at batch 1, one {data['device']}: {plain * 1e3:.2f} ms of the device for a plain "
        f"step; {costs}. A model this small is not bound by reading at batch 1{floor}. Each kernel costs a "
        "few microseconds of latency however little it reads, and the kernels for several rows need the "
        "tensor cores, which one row does without. "
        f"From {PAGE.link(result_path(folder, stage, 'triton'))}.\n"
    )


# The ledger of optimisations


def optimisations(repo: Path, folder: Path) -> str:
    """docs/data/optimisations.toml, each with what was measured of it."""
    data = {stage: results(folder, stage) for stage in ORDER}
    parts = []
    for entry in read_toml(repo / "docs" / "data" / "optimisations.toml").get("optimisation", []):
        if set(entry) != KEYS:
            raise Problem(f"optimisations.toml: {entry.get('id', entry)} needs {', '.join(sorted(KEYS))}.")
        rows = [
            ["Invariant", entry["invariant"]],
            ["Hypothesis", entry["hypothesis"]],
            ["Measured", "<br>".join(measured(data, wanted, entry["id"]) for wanted in entry["measured"])],
            ["Where it loses", entry["loses"]],
            ["How the number could mislead", entry["misleads"]],
        ]
        parts.append(f"### {entry['title']} {{ #{entry['id']} }}\n\n{table(['', ''], rows)}")
    parts += [
        f"{PAGE.link(result_path(folder, stage, 'triton'))}: {about_file(found, PAGE)}"
        for stage, found in data.items()
        if found is not None
    ]
    return "\n\n".join(parts)


def measured(data: dict[str, Data | None], wanted: dict[str, Any], where: str) -> str:
    """One measured quantity, or that nobody measured it. `wanted`: stage, configuration, batch, field."""
    if set(wanted) != {"stage", "configuration", "batch", "field"} or wanted["field"] not in FIELDS:
        raise Problem(f"optimisations.toml: {where} asks for {wanted}, which no result file has.")
    found = data[wanted["stage"]]
    head = f"{wanted['stage']}, {wanted['configuration']}, batch {wanted['batch']}: "
    name = wanted["configuration"]
    if found is not None and name == "best":
        name = best_per_batch(found, "engine").get(wanted["batch"])
    row = row_of(found, name, wanted["batch"]) if found is not None else None
    value = row and (row | verify_times(found, name, wanted["batch"])).get(wanted["field"])
    if value is None:
        return head + NOT_YET
    scale, form, unit = FIELDS[wanted["field"]]
    if isinstance(value, dict):
        spread = f" ({value['min']:{form}}–{value['max']:{form}}, {value['samples']} runs)"
        note = ", processes disagree" * processes_disagree(row)
        return f"{head}{speeds(row)} {unit}{spread}{note}"
    if wanted["field"] == "host_seconds":
        return f"{head}{host_time(row)} of the host"
    return f"{head}{value * scale:{form}} {unit}"


# The peer


def peer(repo: Path) -> str:
    """What upstream itself reached on the same GPU, with its conditions."""
    found = json.loads((repo / "docs" / "data" / "peer.json").read_text(encoding="utf-8"))
    batches = found["batches"]
    rows = [
        [row["what"], *(f"{value:,}" for value in row["tokens_per_second"]), f"{row['ms']:.2f} ms"]
        for row in found["rows"]
    ]
    best = max(found["rows"], key=lambda row: statistics.median(row["tokens_per_second"]))
    head = ["tokens/s at batch", *map(str, batches), "a step or round, batch 1"]
    return (
        f"{found['engine']} {found['version']}, {found['device']}, {found['date']}. {found['conditions']}\n\n"
        f"{table(head, rows)}\n\nThe row to beat is the best one, “{best['what']}”.\n"
    )
