"""From the raw numbers of a result file to medians, spreads and ratios: its "summary"."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .configurations import METHODS, PLAIN, shape_of
from .measure import Run
from .steady import Steady

Key = tuple[str, str, int]  # configuration, prompt set, batch

# Two processes of one configuration whose medians are further apart have no common median worth a claim.
DISAGREE = 1.25


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles, extremes and number of samples."""
    middle = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    low, median, high = middle
    return {
        "median": median,
        "q1": low,
        "q3": high,
        "min": min(samples),
        "max": max(samples),
        "samples": len(samples),
    }


def runs_of(cell: dict[str, Any]) -> list[Run]:
    """The timed runs that a cell of a result file holds as columns."""
    names = Run.__dataclass_fields__
    return [Run(*values) for values in zip(*(cell[name] for name in names), strict=True)]


def each_cell(data: dict[str, Any], kind: str) -> Iterator[tuple[Key, dict[str, Any], dict[str, Any]]]:
    """Every cell of the processes of a kind, with its process, in the order they ran."""
    for process in data["processes"]:
        if process["kind"] == kind:
            for cell in process["cells"]:
                yield (process["configuration"], cell["set"], cell["batch"]), process, cell


def cells_of(data: dict[str, Any], kind: str = "engine") -> dict[Key, list[Run]]:
    """All runs of a result file, those of both turns together, in the order of the configurations."""
    found: dict[Key, list[Run]] = defaultdict(list)
    for key, _, cell in each_cell(data, kind):
        found[key] += runs_of(cell)
    return dict(found)


def codes_of(data: dict[str, Any], kind: str = "engine") -> dict[Key, str | None]:
    """The hash of the code that each cell was measured with."""
    return {key: process.get("sources_sha256") for key, process, _ in each_cell(data, kind)}


def process_medians(data: dict[str, Any], kind: str = "engine") -> dict[Key, list[float]]:
    """The median tokens/s of each process that measured a cell, in the order they ran."""
    found: dict[Key, list[float]] = defaultdict(list)
    for key, _, cell in each_cell(data, kind):
        found[key].append(statistics.median(run.speed for run in runs_of(cell)))
    return dict(found)


def processes_disagree(row: dict[str, Any]) -> bool:
    """Whether the processes behind a row of a summary are further apart than DISAGREE."""
    medians = row["process_medians"]
    return max(medians) > DISAGREE * min(medians)


def steady_of(data: dict[str, Any], name: str, batch: int) -> list[Steady]:
    """The steady rounds of a configuration at one batch size, one for each turn."""
    return [
        Steady(**entry)
        for process in data["processes"]
        if process["kind"] == "engine" and process["configuration"] == name
        for entry in process["steady"]
        if entry["batch"] == batch
    ]


def phase_samples(data: dict[str, Any], name: str, batch: int, phase: str) -> list[float]:
    """Seconds of the device that a phase of those rounds took, of all turns."""
    return [sample for entry in steady_of(data, name, batch) for sample in entry.phases.get(phase, [])]


def result_of(data: dict[str, Any], kind: str, name: str | None = None) -> dict[str, Any] | None:
    """What a process that gives one result gave, the last one if there are several."""
    found = [
        process["result"]
        for process in data["processes"]
        if process["kind"] == kind and name in (None, process["configuration"]) and process["result"]
    ]
    return found[-1] if found else None


def best_per_batch(data: dict[str, Any], kind: str) -> dict[int, str]:
    """The shape with the most tokens/s on the eight questions."""
    speeds: dict[int, dict[str, float]] = defaultdict(dict)
    for (name, prompts, batch), runs in cells_of(data, kind).items():
        if prompts == "questions" and name != PLAIN and name not in METHODS:
            speeds[batch][name] = statistics.median(run.speed for run in runs)
    return {batch: max(named, key=named.__getitem__) for batch, named in sorted(speeds.items())}


def floor_seconds(data: dict[str, Any], name: str) -> float | None:
    """The least a step or round of a configuration can take: its weights, read at the copy's speed.

    A round reads the target once and the draft once for each of its steps (the last is the draft extend).
    What other methods read is not known from their names: None.
    """
    floor = result_of(data, "floor")
    if floor is None or name in METHODS:
        return None
    sizes, shape = floor["weight_bytes"], shape_of(name)
    total = sizes["target"] + (shape[0] * sizes.get("draft", 0) if shape else 0)
    return total / statistics.median(floor["copy_bytes_per_second"])


def median_or_none(samples: Iterable[float | None]) -> float | None:
    """The median of what is known."""
    known = [sample for sample in samples if sample is not None]
    return statistics.median(known) if known else None


def summarise(data: dict[str, Any], kind: str = "engine") -> list[dict[str, Any]]:
    """One row for each configuration, prompt set and batch size; times in seconds, unknown ones None.

    `kind` "tune" gives the short runs in which shapes were chosen.

    `step_seconds` is the mean wall time of a step or round of a whole run; `device_seconds` and
    `host_seconds` are those of a steady one (see steady.py), measured on the eight questions. The latter is a
    difference, with its sign; `host_resolution` is how much of it could be chance: half the interquartile
    range of its samples, and no less than what it is below 0, which no host's time can be.
    `over_floor` is `step_seconds` over the floor; `over_plain` is tokens/s over plain decoding's, if it is of
    the same code.
    """
    cells, codes, by_process = cells_of(data, kind), codes_of(data, kind), process_medians(data, kind)
    rows = []
    for (name, prompts, batch), runs in cells.items():
        speeds = spread([run.speed for run in runs])
        step = statistics.median(run.step_seconds for run in runs)
        beside = (PLAIN, prompts, batch)
        is_comparable = codes.get(beside) == codes[name, prompts, batch]
        plain = [run.speed for run in cells.get(beside, [])] if is_comparable else []
        floor = floor_seconds(data, name)
        steady = steady_of(data, name, batch) if kind == "engine" else []
        host, resolution = _host([seconds for entry in steady for seconds in entry.host])
        rows.append(
            {
                "configuration": name,
                "set": prompts,
                "batch": batch,
                "tokens_per_second": speeds,
                "process_medians": by_process[name, prompts, batch],
                "tokens_per_round": statistics.median(run.tokens_per_round for run in runs),
                "step_seconds": step,
                "device_seconds": median_or_none(s for entry in steady for s in entry.device),
                "host_seconds": host,
                "host_resolution": resolution,
                "prefill_share": statistics.median(run.prefill_seconds / run.seconds for run in runs),
                "over_floor": step / floor if floor else None,
                "over_plain": speeds["median"] / statistics.median(plain) if plain else None,
            }
        )
    return rows


def _host(samples: Sequence[float]) -> tuple[float | None, float | None]:
    """The median, and what it resolves."""
    if not samples:
        return None, None
    found = spread(samples)
    return found["median"], max((found["q3"] - found["q1"]) / 2, -found["median"])


def row_of(
    data: dict[str, Any], name: str | None, batch: int, prompts: str = "questions"
) -> dict[str, Any] | None:
    """The row of a configuration at one batch size; None where it was not measured."""
    wanted = (name, prompts, batch)
    rows = summarise(data)
    return next((r for r in rows if (r["configuration"], r["set"], r["batch"]) == wanted), None)
