"""What a result file of `fledge bench` says: a table for the terminal, Markdown for the README.

A document has its tables between `<!-- bench NAME -->` and `<!-- /bench -->`; NAME is "speed", "pairs",
"kernels", "attention", "BACKEND SET" (of part4_worker) or "BACKEND SET STAGE", such as "triton questions
spec_v2", or "BACKEND evolution BATCH". `render` writes them from docs/data/bench, and a test compares.
"""

from __future__ import annotations

import os
import re
import statistics
from pathlib import Path
from typing import Any

from rich.table import Table

from ..provenance import REPO
from .bars_report import speed_table
from .bench_plans import Asked
from .bench_results import load, result_path
from .bench_summary import (
    DISAGREE,
    best_per_batch,
    processes_disagree,
    result_of,
    row_of,
    summarise,
)
from .configurations import CHAIN, PLAIN, TREE, name_of
from .kernels_report import attention_table, kernels_table
from .pairs_report import pairs_table
from .stages_door import all_stages
from .tables import NOT_YET, Page, about_file, markdown, new_table, number, small, speed, speeds

FOLDER = REPO / "docs" / "data" / "bench"
DOCUMENTS = ("README.md", "docs/data/bench/README.md")
BLOCK = re.compile(r"(<!-- bench (?P<name>[^>]+?) -->\n).*?(<!-- /bench -->)", re.DOTALL)
COLUMNS = ("tokens/s", "a round")
SPREAD = "Below a speed stand the slowest and the fastest run."
BEST = f"{SPREAD} Bold is the best of EAGLE's shapes at its batch size."
AGAINST = (
    f"{SPREAD} No difference is seen where the runs of two stages overlap. Two speeds are those of two "
    f"processes that disagree: they are more than {DISAGREE}× apart, and no ratio is made of them."
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
    lines += [
        f"processes disagree: {row['configuration']}, {row['set']}, batch {row['batch']}: {speeds(row)}"
        for row in summarise(data)
        if processes_disagree(row)
    ]
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
    page = Page(lambda path: f"[{path.name}]({Path(os.path.relpath(path, start)).as_posix()})")

    def fill(found: re.Match[str]) -> str:
        words = found["name"].split()
        if words == ["speed"]:
            table = speed_table(folder, page)
        elif words == ["pairs"]:
            table = pairs_table(folder, page)
        elif words == ["kernels"]:
            table = kernels_table(folder.parent / "kernels.json", page)
        elif words == ["attention"]:
            table = attention_table(folder.parent / "kernels.json", page)
        elif words[1] == "evolution":
            table = evolution_table(folder, page, words[0], int(words[2]))
        else:
            table = set_table(folder, page, *words)
        return f"{found[1]}{table}\n{found[3]}"

    return BLOCK.sub(fill, text)


def set_table(folder: Path, page: Page, backend: str, prompts: str, stage: str = "part4_worker") -> str:
    """Every configuration at every batch size, a line each; the best measured shape of a batch is bold."""
    path = result_path(folder, stage, backend)
    data = load(path) if path.exists() else {"processes": []}
    rows = [row for row in summarise(data) if row["set"] == prompts]
    if not rows:
        which = f"--attention-backend {backend} --set {prompts}"
        return f"{NOT_YET}: `fledge bench {stage} {which}` on a machine with a GPU"
    named = {(row["batch"], row["configuration"]): row for row in rows}
    best, names = best_per_batch(data, "engine"), (PLAIN, name_of(CHAIN), name_of(TREE))
    others = [name for name in dict.fromkeys(row["configuration"] for row in rows) if name not in names]
    lines = [["batch", "drafts", *COLUMNS, "× floor"]]
    for batch in sorted({row["batch"] for row in rows}):
        for name in (*names, *others):
            row = named.get((batch, name))
            if row is None and name in others:
                continue
            floor = row and row["over_floor"]
            first, rounds, spread = _columns(row)
            mark = "**" * (row is not None and best.get(batch) == name)
            cells = [f"{mark}{first}{mark}{spread}", rounds, f"{floor:.1f}" if floor else ""]
            lines.append([str(batch), f"{mark}{name}{mark}", *cells])
        if prompts == "questions" and batch == 1:
            for mode in HF_NAMES:
                if (result := result_of(data, "hf", mode)) is not None:
                    label = mode.replace("hf", "Hugging Face `generate`,")
                    lines.append(["1", label, speed(result["tokens"] / result["seconds"]), "", ""])
    hf = [p for p in data["processes"] if p["kind"] == "hf" and prompts == "questions"]
    if not any(line[-1] for line in lines[1:]):  # the floor is measured with part4_worker
        lines = [line[:-1] for line in lines]
    about = about_file(data, page, prompts, hf)
    return f"{markdown(lines, 2)}\n\n{BEST}\n\n{about} Source: {page.link(path)}"


def evolution_table(folder: Path, page: Page, backend: str, batch: int) -> str:
    """The eight questions at one batch size, a line for each configuration of each stage that has it."""
    lines = [["drafts", "stage", *COLUMNS, "to the stage before"]]
    stages = {stage.name: stage for stage in all_stages()}
    files = {stage: result_path(folder, stage, backend) for stage in stages}
    data = {stage: load(path) for stage, path in files.items() if path.exists()}
    for name, word in {PLAIN: PLAIN, name_of(CHAIN): "chain", name_of(TREE): "tree"}.items():
        before = None
        for stage, found in stages.items():
            row = row_of(data[stage], name, batch) if stage in data else None
            if row or word in Asked(found, {}).configurations():
                first, rounds, spread = _columns(row)
                lines.append([name, stage, first + spread, rounds, against(row, before)])
            before = row
    about: dict[str, list[str]] = {}
    for stage, results in data.items():
        about.setdefault(about_file(results, page), []).append(page.link(files[stage]))
    return "\n\n".join(
        [markdown(lines, 2), AGAINST, *(f"{', '.join(f)}: {text}" for text, f in about.items())]
    )


def _columns(row: Data | None) -> list[str]:
    """The cells under COLUMNS, and the second line of the first: the slowest and the fastest run."""
    if row is None:
        return [NOT_YET, "", ""]
    found, note = row["tokens_per_second"], "; processes disagree" * processes_disagree(row)
    rounds = "" if row["configuration"] == PLAIN else f"{row['tokens_per_round']:.2f}"
    return [speeds(row), rounds, small(f"{speed(found['min'])}–{speed(found['max'])}{note}")]


def against(row: Data | None, before: Data | None) -> str:
    """How a configuration stands to that of the stage before, if the runs of both can tell."""
    if row is None or before is None:
        return ""
    mine, other = row["tokens_per_second"], before["tokens_per_second"]
    if mine["min"] <= other["max"] and other["min"] <= mine["max"]:
        return "no difference seen"
    if processes_disagree(row) or processes_disagree(before):
        return "faster" if mine["median"] > other["median"] else "slower"
    return f"{mine['median'] / other['median']:.2f}×"
