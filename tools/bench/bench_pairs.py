"""`fledge bench STAGE --against OTHER`: how much faster one engine is than another, in alternated pairs.

Two numbers that were measured an hour apart differ by what the machine did meanwhile. So both engines are
open side by side, and a pair is one run of each, now this one first and now the other. What counts is the
ratio of each pair, and how far the median of these would move if the pairs were drawn anew.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..json_files import write
from ..provenance import provenance, sources_sha256
from .bench_plans import command_line
from .bench_process import SERVER, WARM_UP_TOKENS
from .bench_results import json_like
from .bench_summary import spread
from .engine_flags import parse_engine
from .measure import Run, timed_run
from .prompt_sets import PromptSet, waves
from .stages_door import (
    BadInput,
    Stage,
    encode_prompts,
    merge_flags,
    plain_flags,
    pool_flags,
    refuse_ranks,
    resolve_stage,
    shape_name,
)

FORMAT, VERSION = "fledge-pairs", 1
RESAMPLES, COVERED = 10_000, 0.95
HOW = [
    "Both engines are open in one process, each with a KV pool for the largest batch. A pair is one run of "
    "each over all prompts, one after the other; the next pair has the other order.",
    "Before the first pair each engine answers all prompts for a few tokens and the first group in full. "
    "Prefix caching is off, sampling is greedy; seconds are end to end.",
    "ratio: tokens/s of the first engine over the second's in the same pair. `median` is that of the pairs, "
    f"`low` and `high` hold {COVERED:.0%} of the medians of {RESAMPLES} resamples of the pairs (bootstrap).",
]


@dataclass(frozen=True)
class Side:
    """One of two engines."""

    stage: Stage
    given: dict[str, Any]

    def other(self, text: str) -> Side:
        """The engine that `text` names, with these flags where it does not say otherwise."""
        stage, own = parse_engine(text)
        is_plain = own.get("speculative_algorithm", "").lower() == "none"
        return Side(resolve_stage(stage), (plain_flags(self.given) if is_plain else self.given) | own)

    def flags(self, batches: Sequence[int], new_tokens: int) -> dict[str, Any]:
        """Room for the largest batch, nothing cached; the caller's own win."""
        ours = {"disable_radix_cache": True, "max_running_requests": max(batches)}
        flags = merge_flags(self.stage, ours | self.given)
        refuse_ranks(flags, "bench")
        return pool_flags(flags, max(batches), new_tokens)


def measure_pairs(
    sides: Sequence[Side],
    sets: Sequence[PromptSet],
    batches: Sequence[int],
    pairs: int,
    new_tokens: int | None,
    raw: bool,
    path: Path,
    advance: Callable[[str], None],
) -> dict[str, Any]:
    """Measure both sides at every batch size; the file at `path` is written after each pair.

    `advance` is called with what comes next, twice and once for each set and batch size.
    """
    longest = new_tokens or max(prompts.new_tokens for prompts in sets)
    with ExitStack() as stack:
        engines, about = [], []
        for side in sides:
            advance(f"{side.stage.name}: loading")
            flags = side.flags(batches, longest)
            engines.append(stack.enter_context(side.stage.open(**flags)))
            info = engines[-1].get_server_info()
            about.append(
                {
                    "stage": side.stage.name,
                    "sources_sha256": sources_sha256(side.stage.path),
                    "shape": shape_name(info),
                    "algorithm": info["speculative_algorithm"],
                    "flags": json_like(flags),
                    "server": {key: info[key] for key in SERVER},
                }
            )
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION, **provenance(info["device"])}
        data |= {"command": command_line(sys.argv[1:]), "how": HOW, "raw": raw, "sides": about, "cells": []}
        for prompts in sets:
            ids = encode_prompts(engines[0].tokenizer, prompts.questions, raw)
            count = new_tokens or prompts.new_tokens
            for batch in batches:
                advance(f"{prompts.name}, batch {batch}: {pairs} pairs")
                cell: dict[str, Any] = {"set": prompts.name, "sha256": prompts.sha256, "batch": batch}
                cell |= {"new_tokens": count, "pairs": []}
                data["cells"].append(cell)
                for pair in _pairs(engines, waves(ids, batch), pairs, count, prompts.ignore_eos):
                    cell["pairs"].append(pair)
                    cell["summary"] = summarise_pairs(cell["pairs"])
                    write(path, data)
    return data


def _pairs(
    engines: Sequence[Any], groups: list[list[list[int]]], pairs: int, new_tokens: int, ignore_eos: bool
) -> Iterator[dict[str, Any]]:
    """Each pair: which engine was `first`, and of both, in the order of the engines, what their runs were."""
    for engine in engines:
        timed_run(engine, groups, min(new_tokens, WARM_UP_TOKENS), ignore_eos)
        timed_run(engine, groups[:1], new_tokens, ignore_eos)
    for number in range(pairs):
        order = [0, 1] if number % 2 == 0 else [1, 0]
        runs: dict[int, Run] = {}
        for which in order:
            gc.collect()
            runs[which], _ = timed_run(engines[which], groups, new_tokens, ignore_eos)
        yield {"first": order[0]} | {key: [asdict(runs[w])[key] for w in (0, 1)] for key in asdict(runs[0])}


def summarise_pairs(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Speeds of both sides, tokens per round, and the ratio with its interval."""
    runs = [[Run(**{k: v[w] for k, v in pair.items() if k != "first"}) for pair in pairs] for w in (0, 1)]
    speeds = [[run.speed for run in found] for found in runs]
    ratios = [a / b for a, b in zip(*speeds, strict=True)]
    low, high = bootstrap(ratios)
    return {
        "tokens_per_second": [spread(samples) for samples in speeds],
        "tokens_per_round": [statistics.median(run.tokens_per_round for run in found) for found in runs],
        "ratio": {"median": statistics.median(ratios), "low": low, "high": high, "pairs": len(ratios)},
    }


def bootstrap(samples: Sequence[float]) -> tuple[float, float]:
    """The interval that COVERED of the medians of resamples lie in; the same samples give the same one."""
    drawn = np.random.default_rng(0).choice(np.asarray(samples), (RESAMPLES, len(samples)))
    tail = (1 - COVERED) / 2
    low, high = np.quantile(np.median(drawn, axis=1), [tail, 1 - tail])
    return float(low), float(high)


def lines_of(data: dict[str, Any]) -> list[str]:
    """What a file says, a line for each set and batch size."""
    names = [
        f"{side['stage']} ({side['algorithm'] or 'no draft'}, {side['shape']})" for side in data["sides"]
    ]
    lines = [f"{names[0]} over {names[1]}"]
    for cell in data["cells"]:
        found = cell["summary"]
        ratio, (mine, other) = found["ratio"], (s["median"] for s in found["tokens_per_second"])
        lines.append(
            f"{cell['set']}, batch {cell['batch']}: {ratio['median']:.3f} "
            f"({ratio['low']:.3f}–{ratio['high']:.3f}) in {ratio['pairs']} pairs; "
            f"{mine:,.0f} over {other:,.0f} tokens/s"
        )
    return lines


def pairs_path(folder: Path, sides: Sequence[Side]) -> Path:
    """Where a comparison is kept unless the caller says so."""
    return folder / f"{sides[0].stage.name}-over-{sides[1].stage.name}.json"


def refuse_existing(path: Path, fresh: bool) -> None:
    """Raise BadInput for a file whose numbers would be lost."""
    if path.exists() and not fresh:
        raise BadInput(f"{path} is there: give another --out, or --fresh to throw its numbers away.")
