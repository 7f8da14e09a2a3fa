"""The look of the tables that bench commands print and documents have, and of the numbers in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ..provenance import changed_files, sources_sha256
from .bench_summary import each_cell, processes_disagree
from .stages_door import STAGES

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


def speeds(row: dict[str, Any]) -> str:
    """Tokens per second of a row of a summary: the median, or one for each process where they disagree."""
    if processes_disagree(row):
        return " / ".join(map(speed, row["process_medians"]))
    return speed(row["tokens_per_second"]["median"])


def host_time(row: dict[str, Any]) -> str:
    """The host's µs of a round with sign and resolution, in words where nothing was resolved."""
    found, resolution = row["host_seconds"], row["host_resolution"]
    text = f"{found * 1e6:+.0f} ± {resolution * 1e6:.0f} µs".replace("-", "−")
    return text if found > resolution else f"below what this method resolves ({text})"


def small(text: str) -> str:
    """A second line of a cell."""
    return f"<br><small>{text}</small>"


def markdown(lines: list[list[str]], names: int = 1) -> str:
    """A table with its head in the first line; the first `names` columns hold words, the others numbers."""
    rule = ["---"] * names + ["---:"] * (len(lines[0]) - names)
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


@dataclass(frozen=True)
class Page:
    """Where a table stands: how a file is named there, and whether the page is made anew by every build.

    What changes with every commit may stand on a page that is built, and not in a committed document.
    """

    link: Callable[[Path], str]
    is_built: bool = False


def about_of(data: dict[str, Any], measured: Iterable[dict[str, Any]], page: Page) -> str:
    """Machine and versions of a result file, the commits of what was `measured`, and what changed since."""
    commits = {
        f"{entry['commit'] or 'unknown'}"[:10]
        + "-dirty" * bool(entry["dirty"])
        + " (earlier code)" * (entry.get("sources_sha256") not in (None, data.get("sources_sha256")))
        for entry in measured
    }
    versions = data["versions"]
    hashes = {side["stage"]: side["sources_sha256"] for side in data.get("sides", [data])}
    # Of two stages each with its number, or both in one breath.
    since = dict.fromkeys(changed_since(*side, data["commit"], page) for side in hashes.items())
    return (
        f"{data['device']}, driver {data.get('driver') or 'none'}, torch {versions['torch']}, "
        f"triton {versions.get('triton', 'none')}; measured at commit {', '.join(sorted(commits))}"
        f"{''.join(since)}."
    )


def about_file(
    data: dict[str, Any], page: Page, prompts: str = "questions", beside: Iterable[dict[str, Any]] = ()
) -> str:
    """What `about_of` says of a file's numbers of one prompt set, and whether their second turns have run.

    `beside` are processes that a table shows as well.
    """
    cells = [(key, process) for key, process, _ in each_cell(data, "engine") if key[1] == prompts]
    turns = Counter(key for key, _ in cells)
    text = about_of(data, [*(process for _, process in cells), *beside], page)
    halves = sum(count < 2 for count in turns.values())
    if not halves:
        return text
    which = "Each number comes" if halves == len(turns) else f"{halves} of {len(turns)} numbers come"
    return f"{text} {which} from one process so far; the second, in the opposite order, has not run."


def changed_since(stage: str, sha256: str, commit: str | None, page: Page) -> str:
    """ "; 12 files of part4_worker have changed since", or nothing where a stage's code is what was measured.

    The number stands on a page that is built, where git knows the commit; else it is "; the code has …".
    """
    folder = STAGES / stage
    if sources_sha256(folder) == sha256:
        return ""
    count = changed_files(commit, folder) if page.is_built else None
    if count is None:
        return "; the code has changed since"
    return f"; {count} file{'s' * (count > 1)} of {stage} {'have' if count > 1 else 'has'} changed since" * (
        count > 0
    )
