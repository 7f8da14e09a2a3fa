"""For how much of a round the device had nothing to do, from a trace."""

from __future__ import annotations

import itertools
import statistics
from typing import Any, NamedTuple

ON_DEVICE = ("prefill", "draft prefill", "forward", "draft", "verify", "draft extend")


class Gap(NamedTuple):
    """One round, from the end of the last one's work to the end of its own; microseconds."""

    round_us: float
    idle_us: float


def work_of(step: dict[str, Any]) -> list[tuple[float, float]]:
    """Start and end of each phase in which the device works, by its own clock or else the host's."""
    spans = (
        phase["device_us"] or (phase["start_us"], phase["end_us"])
        for phase in step["phases"]
        if phase["name"] in ON_DEVICE
    )
    return sorted((start, end) for start, end in spans)


def gaps(steps: list[dict[str, Any]]) -> list[Gap]:
    """Of every round or decode step that follows another one, as long as no request has ended yet."""
    rounds = [step["requests"] for step in steps if step["kind"] != "prefill"]
    most = max(map(len, rounds), default=0)
    found = []
    for before, step in itertools.pairwise(steps):
        works = work_of(before), work_of(step)
        is_full = all(s["kind"] != "prefill" and len(s["requests"]) == most for s in (before, step))
        if is_full and all(works):
            begin = at = works[0][-1][1]
            idle = 0.0
            for start, end in works[1]:
                idle, at = idle + max(0.0, start - at), max(at, end)
            found.append(Gap(at - begin, idle))
    return found


def idle_summary(steps: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Number of the rounds that `gaps` finds, medians in microseconds, and the idle share of all of them."""
    found = gaps(steps)
    total = sum(gap.round_us for gap in found)
    if not total:
        return None
    return {
        "rounds": len(found),
        "round_us": round(statistics.median(gap.round_us for gap in found), 1),
        "idle_us": round(statistics.median(gap.idle_us for gap in found), 1),
        "idle_share": round(sum(gap.idle_us for gap in found) / total, 4),
    }
