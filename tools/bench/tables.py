"""The look of the tables that the bench commands print, and of the numbers in them."""

from __future__ import annotations

from rich import box
from rich.table import Table

UNKNOWN = "-"


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
