"""The look of the tables that bench commands print and documents have, and of the numbers in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.table import Table

UNKNOWN = "-"
NOT_YET = "not measured yet"


def new_table(first: str, *numbers: str) -> Table:
    """A table with a column of names and columns of numbers; a header may have several lines."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def number(value: float | None, form: str = "", scale: float = 1.0) -> str:
    """`value · scale` as `form` has it, or a dash for None."""
    return UNKNOWN if value is None else format(value * scale, form)


def speed(value: float | None) -> str:
    """Tokens per second: a decimal below a hundred, thousands separated."""
    return number(value, ",.0f" if value is None or value >= 100 else ".1f")


def markdown(lines: list[list[str]]) -> str:
    """A table with its head in the first line."""
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def about_of(data: dict[str, Any], measured: Iterable[dict[str, Any]]) -> str:
    """Machine and versions of a result file, and the commits of what was `measured`."""
    commits = {f"{entry['commit'] or 'unknown'}"[:10] + "-dirty" * bool(entry["dirty"]) for entry in measured}
    versions = data["versions"]
    return (
        f"{data['device']}, driver {data.get('driver') or 'none'}, torch {versions['torch']}, "
        f"triton {versions.get('triton', 'none')}; commit {', '.join(sorted(commits))}."
    )
