"""`fledge bench STAGE --against OTHER`: how much faster one engine is than another, in alternated pairs.

Two numbers that were measured an hour apart differ by what the machine did meanwhile. So both engines are
open side by side, and a pair is one run of each, now this one first and now the other. What counts is the
ratio of each pair, and how far the median of these would move if the pairs were drawn anew.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..json_files import write
from ..provenance import provenance, sources_sha256
from .bench_plans import command_line
from .bench_process import SERVER, WARM_UP_TOKENS
from .bench_results import json_like
from .configurations import canonical, flags_of
from .engine_flags import parse_engine
from .measure import timed_run
from .pairs_summary import COVERED, FORMAT, RESAMPLES, VERSION, summarise_idle, summarise_pairs
from .prompt_sets import PromptSet, waves
from .stages_door import (
    BadInput,
    Stage,
    encode_prompts,
    merge_flags,
    plain_flags,
    pool_flags,
    refuse_ranks,
    refuse_shape,
    resolve_stage,
    shape_name,
)
from .trace_record import record
from .trace_trees import Growth

_TURNS = (
    "Both engines are open in one process, each with a KV pool for the largest batch. A pair is one run of "
    "each, one after the other; the next pair has the other order. Before the first pair each engine answers "
    "all prompts for a few tokens and the first group in full. Prefix caching is off, sampling is greedy. "
    "Before a run an engine forgets the last one: its n-grams and its adapted steps too."
)
_INTERVAL = (
    f"`low` and `high` hold {COVERED:.0%} of the medians of {RESAMPLES} resamples of the pairs (bootstrap)."
)
HOW = [
    _TURNS,
    "A run is all prompts, group by group; seconds are end to end. ratio: tokens/s of the first engine over "
    f"the second's in the same pair. `median` is that of the pairs, {_INTERVAL}",
]
IDLE_HOW = [
    _TURNS,
    "A run is a trace of the first group of prompts, times and tokens alone. `idle_us` is the median, over "
    "the rounds in which every request runs, of the time for which the device has nothing to do between the "
    "end of one round's work and that of the next; `idle_share` is all idle time over all rounds' time.",
    "recovered: (second engine's `idle_us` - first engine's) / second engine's, in the same pair, for rounds "
    f"of one shape and batch size. `median` is that of the pairs, {_INTERVAL}",
]


@dataclass(frozen=True)
class Side:
    """One of two engines: as a configuration has it, or, without one, as its flags have it."""

    stage: Stage
    given: dict[str, Any]
    config: str | None = None  # the word for it

    @property
    def name(self) -> str:
        """As it stands in the name of a file."""
        return self.stage.name + (f"-{self.config.replace('/', '-')}" if self.config else "")

    def other(self, text: str) -> Side:
        """The engine that `text` names, with this configuration and these flags where it has no others."""
        stage, config, own = parse_engine(text)
        algorithm = own.get("speculative_algorithm", "").lower()
        given = plain_flags(self.given) if algorithm == "none" else self.given
        return Side(resolve_stage(stage), given | own, config or (None if algorithm else self.config))

    def flags(self, batches: Sequence[int], new_tokens: int) -> dict[str, Any]:
        """Room for the largest batch, nothing cached; the caller's own win."""
        given = {"disable_radix_cache": True, "max_running_requests": max(batches)} | self.given
        if self.config is None:
            flags = merge_flags(self.stage, given)
        else:
            refuse_shape(given)
            flags = flags_of(self.stage, given, canonical(self.config))
        refuse_ranks(flags, "bench")
        return pool_flags(flags, max(batches), new_tokens)


# (engine, groups of prompts, new tokens, whether an end is ignored) → what one run gives, by column
Once = Callable[[Any, list[list[list[int]]], int, bool], dict[str, float]]


def speed_run(
    engine: Any, groups: list[list[list[int]]], new_tokens: int, ignore_eos: bool
) -> dict[str, float]:
    """All prompts, group by group: the columns are those of `Run`."""
    gc.collect()
    return asdict(timed_run(engine, groups, new_tokens, ignore_eos)[0])


def idle_run(
    engine: Any, groups: list[list[list[int]]], new_tokens: int, ignore_eos: bool
) -> dict[str, float]:
    """The first group, traced: the columns are those of `idle_summary`.

    Raises BadInput for answers that are too short to have two rounds.
    """
    gc.collect()
    # Trees are not recorded, so nobody has to have watched them grow.
    found = record(engine, Growth(), groups[0], new_tokens, has_trees=False, ignore_eos=ignore_eos)
    if found["summary"] is None:
        raise BadInput(f"{new_tokens} tokens make no two rounds of all requests: give more --max-new-tokens.")
    return found["summary"]


def measure_pairs(
    sides: Sequence[Side],
    sets: Sequence[PromptSet],
    batches: Sequence[int],
    pairs: int,
    new_tokens: int | None,
    raw: bool,
    path: Path,
    advance: Callable[[str], None],
    idle: bool = False,
) -> None:
    """Measure both sides at every batch size; the file at `path` is written after each pair.

    With `idle` a run is a trace, and what is compared is the time of a round in which the device is idle.
    `advance` is called with what comes next, twice and once for each set and batch size.
    """
    longest = new_tokens or max(prompts.new_tokens for prompts in sets)
    once, summarise, how = (idle_run, summarise_idle, IDLE_HOW) if idle else (speed_run, summarise_pairs, HOW)
    with ExitStack() as stack:
        engines, about = [], []
        all_flags = [side.flags(batches, longest) for side in sides]  # both refusals before either opens
        for side, flags in zip(sides, all_flags, strict=True):
            advance(f"{side.name}: loading")
            engines.append(stack.enter_context(side.stage.open(**flags)))
            info = engines[-1].get_server_info()
            about.append(
                {
                    "stage": side.stage.name,
                    "config": side.config,
                    "sources_sha256": sources_sha256(side.stage.path),
                    "shape": shape_name(info),
                    "algorithm": info["speculative_algorithm"],
                    "flags": json_like(flags),
                    "server": {key: info[key] for key in SERVER},
                }
            )
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION, **provenance(info["device"])}
        data |= {"command": command_line(sys.argv[1:]), "how": how, "raw": raw, "sides": about, "cells": []}
        if idle and about[0]["shape"] != about[1]["shape"]:
            shapes = " and ".join(side["shape"] for side in about)
            raise BadInput(f"--idle compares rounds that do the same work, and these are of {shapes}.")
        for prompts in sets:
            ids = encode_prompts(engines[0].tokenizer, prompts.questions, raw)
            count = new_tokens or prompts.new_tokens
            for batch in batches:
                advance(f"{prompts.name}, batch {batch}: {pairs} pairs")
                cell: dict[str, Any] = {"set": prompts.name, "sha256": prompts.sha256, "batch": batch}
                cell |= {"new_tokens": count, "pairs": []}
                data["cells"].append(cell)
                for pair in _pairs(engines, once, waves(ids, batch), pairs, count, prompts.ignore_eos):
                    cell["pairs"].append(pair)
                    cell["summary"] = summarise(cell["pairs"])
                    write(path, data)


def _pairs(
    engines: Sequence[Any],
    once: Once,
    groups: list[list[list[int]]],
    pairs: int,
    new_tokens: int,
    ignore_eos: bool,
) -> Iterator[dict[str, Any]]:
    """Each pair: which engine was `first`, and of both, in the order of the engines, what their runs were."""
    for engine in engines:
        timed_run(engine, groups, min(new_tokens, WARM_UP_TOKENS), ignore_eos)
        timed_run(engine, groups[:1], new_tokens, ignore_eos)
    for number in range(pairs):
        order = [0, 1] if number % 2 == 0 else [1, 0]
        runs = {which: once(engines[which], groups, new_tokens, ignore_eos) for which in order}
        yield {"first": order[0]} | {key: [runs[which][key] for which in (0, 1)] for key in runs[0]}


def pairs_path(folder: Path, sides: Sequence[Side], idle: bool = False) -> Path:
    """Where a comparison is kept unless the caller says so."""
    return folder / f"{sides[0].name}-over-{sides[1].name}{'-idle' * idle}.json"


def refuse_existing(path: Path, fresh: bool) -> None:
    """Raise BadInput for a file whose numbers would be lost."""
    if path.exists() and not fresh:
        raise BadInput(f"{path} is there: give another --out, or --fresh to throw its numbers away.")
