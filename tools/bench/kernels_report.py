"""How fast a layer's products and attention are, from docs/data/kernels.json: see tools/bench/kernels.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .tables import Page, about_of, markdown

HEAD = ["rows", "library", "plan in use", "it takes", "best other plan tried", "it takes"]


def kernels_table(path: Path, page: Page) -> str:
    """A line for each row count: the library, the plan in use, and the best of the others that were tried."""
    data = json.loads(path.read_text(encoding="utf-8"))
    lines = [HEAD]
    for row in data["rows"]:
        used = row["in_use"]
        mine = next((time for time, plan in row["plans_us"] if plan == used), None)
        other, plan = next((entry for entry in row["plans_us"] if entry[1] != used), (None, None))
        times = (row["library_us"], mine, other)
        library, mine, other = ("" if time is None else f"{time:.0f} µs" for time in times)
        lines.append([str(row["rows"]), library, _name(used), mine, _name(plan) if plan else "", other])
    return _with_source(lines, data, path, page)


def attention_table(path: Path, page: Page) -> str:
    """A line for each batch, a column for each program of attention; bold is the one in use."""
    data = json.loads(path.read_text(encoding="utf-8"))
    found = data.get("attention")
    if not found:
        return "not measured yet: `python -m tools.bench.kernels OUT.json` on a machine with a GPU"
    programs = sorted({tuple(program) for row in found for _, program in row["programs_us"]}, reverse=True)
    lines = [["requests", "rows each", *(f"{warps} warps, {columns} columns" for warps, columns in programs)]]
    for row in found:
        times = {tuple(program): f"{time:.0f} µs" for time, program in row["programs_us"]}
        used = tuple(row["in_use"])
        times[used] = f"**{times[used]}**"
        batch = [str(row[key]) for key in ("requests", "rows_each")]
        lines.append(batch + [times.get(program, "") for program in programs])
    return _with_source(lines, data, path, page)


def _with_source(lines: list[list[str]], data: dict[str, Any], path: Path, page: Page) -> str:
    about = about_of({**data, "sides": []}, [data], page)
    return f"{markdown(lines)}\n\n{about} Source: {page.link(path)}"


def _name(plan: dict[str, Any] | None) -> str:
    """Such as "tiles 64 × 16, 4 warps, 5 stages of 128": rows by columns of a program, and its inner loop."""
    if plan is None:
        return "the library"
    inner = {"few_rows": "", "sliced": ", slices of {block_k}", "tiles": ", {stages} stages of {block_k}"}
    words = "{way} {block_m} × {block_n}, {warps} warp" + "s" * (plan["warps"] > 1) + inner[plan["way"]]
    return words.format(**plan)
