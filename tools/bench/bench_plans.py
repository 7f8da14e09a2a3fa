"""Which processes `fledge bench` starts, in which order, and what each is told.

HOW says what a reader of the numbers must know; it stands in every result file.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..models.cache import find_model
from ..provenance import provenance, sources_sha256
from .bench_results import Results, json_like
from .bench_runs import Plan
from .configurations import (
    BATCHES,
    GRID,
    PLAIN,
    canonical,
    flags_of,
    grid_of,
    name_of,
    there_and_back,
)
from .prompt_sets import PromptSet, load_sets
from .stages_door import Stage, merge_flags, pool_flags, refusals

HF_MODES = ("greedy", "prompt look-up")
TUNE_REPEATS, TUNE_SECONDS = 2, 3.0
HOW = [
    "Each configuration (an engine with its flags) runs in two processes of its own, one after another, in "
    "the order A B C C B A, so that a machine that drifts hits all alike; `turn` says which of the two.",
    "A process opens its engine once, for the largest batch asked for, and measures every prompt set at "
    "every batch size: a warm-up of all prompts for a few tokens and of the first group in full, then the "
    "runs. A cell stops repeating when its runs have taken longer than `seconds` together.",
    "batch N: N requests are sent at once, and the next N when the last of them has ended. A set smaller "
    "than N is sent several times over.",
    "seconds are end to end, from the call of `generate` to its return, prefill and host included. Prefix "
    "caching is off, sampling is greedy.",
    "prefill_seconds are the steps that ran a prefill; steps counts the others; rounds sums the "
    "verifications over the requests, so (tokens - requests) / rounds is what one round gives.",
    "steady: single rounds with the whole batch running, in the order they ran (`rounds`, on the clock), and "
    "the CUDA graphs of the round after them replayed alone and back to back (`phases` each, `device` all in "
    "order). On a CPU the models' forwards stand for the device.",
    "Host time is a difference with its sign: the last quarter of the rounds, whose texts are about as long "
    "as at the replays, less the median of `device`. Earlier rounds read fewer keys (attention takes a step "
    "up at each further tile), so a median over all rounds can be less than `device`. Its resolution, ±, is "
    "half the interquartile range of those differences, and no less than what their median is below 0.",
    "tune: one process opens the shapes of a listed grid in turn, for short runs of the eight questions; the "
    "shape with the most tokens/s at a batch size is measured again there, as `tuned`.",
    "floor: tools/bench/floor.py. A ratio to the floor is the time of a step over the time to read its "
    "weights at the speed of a device copy; a round reads the target's once and the draft's once a level.",
]


@dataclass(frozen=True)
class Asked:
    """What a command line asks for; `given` are its engine flags."""

    stage: Stage
    given: dict[str, Any]
    batches: tuple[int, ...] = BATCHES
    sets: tuple[PromptSet, ...] = ()
    repeat: int = 5
    seconds: float = 10.0
    new_tokens: int | None = None
    raw: bool = False

    @cached_property
    def resolved(self) -> Any:
        """The flags as an engine resolves them for plain decoding. Raises BadInput for its refusals."""
        server_args = importlib.import_module(f"{self.stage.package().__name__}.server_args")
        with refusals():
            return server_args.ServerArgs.from_kwargs(**self.flags(PLAIN))

    @cached_property
    def own_flags(self) -> dict[str, Any]:
        """`given`, with folders named whole: the processes run in another folder than the caller."""
        return {
            name: str(Path(value).resolve()) if name.endswith("_path") and Path(value).is_dir() else value
            for name, value in self.given.items()
        }

    def flags(self, name: str) -> dict[str, Any]:
        """Flags of one configuration: room for the largest batch, nothing cached; the caller's own win."""
        length = self.new_tokens or max(prompts.new_tokens for prompts in load_sets().values())
        ours = {"disable_radix_cache": True, "max_running_requests": max(self.batches)}
        return pool_flags(flags_of(self.stage, ours | self.own_flags, name), max(self.batches), length)

    def header(self) -> dict[str, Any]:
        """What a result file says of itself."""
        return {
            "stage": self.stage.name,
            "sources_sha256": sources_sha256(self.stage.path),
            **provenance(self.resolved.device),
            "command": command_line(sys.argv[1:]),
            "flags": self.own_flags,
            "prompt_sets": [asdict(prompts) for prompts in load_sets().values()],
            "new_tokens": self.new_tokens,
            "raw": self.raw,
            "how": HOW,
        }

    def job(self, configurations: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """What a process of engines reads; `more` replaces settings."""
        settings = {
            "stage": str(self.stage.path),
            "sets": [asdict(prompts) for prompts in self.sets],
            "new_tokens": self.new_tokens,
            "repeat": self.repeat,
            "seconds": self.seconds,
            "raw": self.raw,
            "steady": True,
        }
        return settings | more | {"configurations": configurations}

    def engine(self, name: str, batches: Sequence[int]) -> dict[str, Any]:
        """An entry of a job's configurations."""
        flags = json_like(self.flags(name))
        return {"name": name, "kind": "engine", "flags": flags, "batches": [*batches]}

    def configurations(self, config: Sequence[str] | None = None) -> list[str]:
        """Those asked for, or else plain, chain, tree and tuned, as far as stage and flags have them."""
        if config is not None:
            return [*config]
        if merge_flags(self.stage, self.given).get("speculative_algorithm") is None:
            return [PLAIN]
        return [PLAIN, "chain", *(["tree"] if self.stage.has("tree") else []), "tuned"]


def command_line(words: Sequence[str]) -> str:
    """The command as it can be repeated elsewhere: where its file went is nobody's business."""
    at = words.index("--out") if "--out" in words else len(words)
    return shlex.join(["fledge", *words[:at], *words[at + 2 :]])


def engine_plans(asked: Asked, results: Results, config: Sequence[str]) -> list[Plan]:
    """Two processes for each configuration, in ABBA order, each with the batch sizes that it lacks."""
    wanted = _batches_by_name(asked, results, config)
    names = [prompts.name for prompts in asked.sets]
    wants_steady = any(prompts.ignore_eos for prompts in asked.sets)
    plans, turns = [], dict.fromkeys(wanted, 0)
    for name in there_and_back(list(wanted)):
        turns[name] += 1
        lacking = results.missing_batches("engine", name, turns[name], wanted[name], names, wants_steady)
        if lacking:
            plans.append(Plan("engine", turns[name], asked.job([asked.engine(name, lacking)])))
    return plans


def _batches_by_name(asked: Asked, results: Results, config: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Configurations and the batch sizes to measure each at; "tuned" is whatever shape won there."""
    found: dict[str, tuple[int, ...]] = {}
    for word in config:
        if word != "tuned":
            found[canonical(word)] = asked.batches
            continue
        for batch in asked.batches:
            name = results.data.get("tuned", {}).get(str(batch))
            if name is not None and batch not in found.get(name, ()):
                found[name] = (*found.get(name, ()), batch)
    return found


def tune_plans(asked: Asked, results: Results) -> list[Plan]:
    """One process for all shapes of the grid that still lack a batch size."""
    entries = []
    for name in map(name_of, grid_of(asked.stage, GRID)):
        lacking = results.missing_batches("tune", name, 1, asked.batches, ["questions"], False)
        if lacking:
            entries.append(asked.engine(name, lacking))
    short = {
        "sets": [asdict(load_sets()["questions"])],
        "repeat": min(asked.repeat, TUNE_REPEATS),
        "seconds": min(asked.seconds, TUNE_SECONDS),
        "steady": False,
    }
    return [Plan("tune", 1, asked.job(entries, **short))] if entries else []


def floor_plans(asked: Asked, results: Results) -> list[Plan]:
    """The process that measures the machine's limits, for the models that are measured."""
    head = merge_flags(asked.stage, asked.own_flags).get("speculative_draft_model_path")
    return _single(asked, results, "floor", "floor", head=head and str(find_model(head)))


def hf_plans(asked: Asked, results: Results) -> list[Plan]:
    """One process for each mode of `generate`, on the eight questions."""
    questions = load_sets()["questions"]
    new_tokens = asked.new_tokens or questions.new_tokens
    shared = {"questions": questions.questions, "new_tokens": new_tokens, "raw": asked.raw}
    return [
        plan for mode in HF_MODES for plan in _single(asked, results, f"hf {mode}", "hf", mode=mode, **shared)
    ]


def _single(asked: Asked, results: Results, name: str, kind: str, **arguments: Any) -> list[Plan]:
    """The process of a measurement without an engine, unless its result is there."""
    if results.has_result(kind, name):
        return []
    args = asked.resolved
    model = {"model": str(find_model(args.model_path)), "device": args.device, "dtype": args.dtype}
    entry = {"name": name, "kind": kind, "arguments": model | arguments}
    return [Plan(kind, 1, {"configurations": [entry]})]
