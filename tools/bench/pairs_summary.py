"""What alternated pairs of runs say together: medians, bootstrap intervals, and a line for each cell."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .bench_summary import spread
from .measure import Run
from .stages_door import BadInput

FORMAT, VERSION = "fledge-pairs", 1
RESAMPLES, COVERED = 10_000, 0.95


def summarise_pairs(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Speeds of both sides, tokens per round, and the ratio with its interval."""
    runs = [[Run(**{k: v[w] for k, v in pair.items() if k != "first"}) for pair in pairs] for w in (0, 1)]
    speeds = [[run.speed for run in found] for found in runs]
    return {
        "tokens_per_second": [spread(samples) for samples in speeds],
        "tokens_per_round": [statistics.median(run.tokens_per_round for run in found) for found in runs],
        "ratio": interval([a / b for a, b in zip(*speeds, strict=True)]),
    }


def summarise_idle(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How much of the time for which the second engine leaves the device idle the first one recovers.

    Of a round each, both of one shape and batch size, in the same pair:

        recovered = (idle time of the second's round − idle time of the first's) / that of the second's

    It is below 0 where the first is idle for longer, and 0 where the second never is. `idle_left` is the
    first engine's idle share, `idle_us` and `round_us` are microseconds of both engines' rounds.
    """
    idle = [pair["idle_us"] for pair in pairs]
    return {
        name: [spread([pair[name][which] for pair in pairs]) for which in (0, 1)]
        for name in ("idle_us", "round_us")
    } | {
        "recovered": interval([(other - mine) / other if other else 0.0 for mine, other in idle]),
        "idle_left": interval([pair["idle_share"][0] for pair in pairs]),
    }


def interval(samples: Sequence[float]) -> dict[str, Any]:
    """The median of one number for each pair, and how far it would move."""
    low, high = bootstrap(samples)
    return {"median": statistics.median(samples), "low": low, "high": high, "pairs": len(samples)}


def bootstrap(samples: Sequence[float]) -> tuple[float, float]:
    """The interval that COVERED of the medians of resamples lie in; the same samples give the same one."""
    drawn = np.random.default_rng(0).choice(np.asarray(samples), (RESAMPLES, len(samples)))
    tail = (1 - COVERED) / 2
    low, high = np.quantile(np.median(drawn, axis=1), [tail, 1 - tail])
    return float(low), float(high)


def lines_of(data: dict[str, Any]) -> list[str]:
    """What a file says, a line for each set and batch size."""
    lines = [" over ".join(map(side_name, data["sides"]))]
    for cell in data["cells"]:
        found, start = cell["summary"], f"{cell['set']}, batch {cell['batch']}"
        if "recovered" in found:
            share, left = found["recovered"], found["idle_left"]
            mine, other = (spread["median"] for spread in found["idle_us"])
            lines.append(
                f"{start}: {share['median']:.1%} ({share['low']:.1%}–{share['high']:.1%}) of the idle time "
                f"recovered in {share['pairs']} pairs; {mine:.0f} over {other:.0f} µs a round, "
                f"{left['median']:.1%} of it left idle"
            )
            continue
        ratio, (mine, other) = found["ratio"], (s["median"] for s in found["tokens_per_second"])
        lines.append(
            f"{start}: {ratio['median']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f}) "
            f"in {ratio['pairs']} pairs; {mine:,.0f} over {other:,.0f} tokens/s"
        )
    return lines


def side_name(side: dict[str, Any]) -> str:
    """One of a file's sides in words: "spec_v2 adaptive (EAGLE, chain 3/1/4)"."""
    config = f" {side['config']}" if side.get("config") else ""
    return f"{side['stage']}{config} ({side['algorithm'] or 'no draft'}, {side['shape']})"


def load_pairs(path: Path) -> dict[str, Any]:
    """A file of pairs. Raises BadInput where it is none of this version."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if (data["format"], data["version"]) == (FORMAT, VERSION):
            return data
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise BadInput(f"{path} is no file of pairs of `fledge bench --against`, version {VERSION}.")
