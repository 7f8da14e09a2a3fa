"""What a stretch of an engine's work cost: seconds, rounds, forwards of each model, and where the time went.

The engine counts its own forwards and its scheduling; everything else is seen from here, by wrapping methods
that have upstream's names, so that no engine carries code for it. A stage that lacks a method lacks its
phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from .stages_door import generate

Spots = dict[str, list[tuple[Any, str]]]  # phase → the methods (owner, name) that make it up
# (phase, method, *its arguments) → what the method returns
Around = Callable[..., Any]


@dataclass
class Cost:
    """Forwards and seconds; `seconds` is by phase, without overlap, and need not add up to `total`."""

    total: float = 0.0
    target_forwards: int = 0
    draft_forwards: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def rest(self) -> float:
        """Seconds in no phase."""
        return max(0.0, self.total - sum(self.seconds.values()))


@dataclass
class Run:
    """One pass over all prompts of a set: seconds end to end, of which some went into prefill steps.

    `steps` are the steps that were no prefill; `rounds` sums the verifications over the requests.
    """

    seconds: float
    prefill_seconds: float
    requests: int
    tokens: int
    steps: int
    rounds: int

    @classmethod
    def of(
        cls, results: Sequence[dict[str, Any]], seconds: float, prefill_seconds: float = 0.0, steps: int = 0
    ) -> Run:
        """From the engine's results."""
        tokens = sum(len(result["output_ids"]) for result in results)
        rounds = sum(result["meta_info"].get("spec_verify_ct", 0) for result in results)
        return cls(seconds, prefill_seconds, len(results), tokens, steps, rounds)

    @property
    def speed(self) -> float:
        """Output tokens per second, end to end."""
        return self.tokens / self.seconds

    @property
    def tokens_per_round(self) -> float:
        """Tokens that all rounds made over the number of rounds; 1 for plain decoding.

        A request's first token is its prefill's and belongs to no round.
        """
        return (self.tokens - self.requests) / self.rounds if self.rounds else 1.0

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step or round, prefill left out."""
        return (self.seconds - self.prefill_seconds) / self.steps if self.steps else 0.0


def draft_worker(engine: Any) -> Any | None:
    """The draft model's worker; None without speculation."""
    return getattr(engine.scheduler, "draft_worker", None)


def steps_of(engine: Any) -> list[tuple[Any, str]]:
    """The methods that make a step: the scheduler's, or those that an offline loop goes through."""
    is_loop = hasattr(engine.scheduler, "decode")
    return [(engine.scheduler, name) for name in (("prefill", "decode") if is_loop else ("step",))]


def step_phases(engine: Any) -> Spots:
    """The parts of a speculative step and its prefill, or the one forward of plain decoding."""
    scheduler, draft = engine.scheduler, draft_worker(engine)
    if draft is None:
        return {"forward": [(scheduler.tp_worker, "forward_batch_generation")]}
    return {
        "prefill": [(draft, "forward_target_extend"), (draft, "forward_draft_extend")],
        "draft": [(draft, "draft"), (scheduler, "draft")],
        "verify": [(draft, "verify")],
        "draft extend": [(draft, "forward_draft_extend_after_decode")],
        "commit": [(draft, "commit"), (scheduler, "commit")],
    }


def model_forwards(engine: Any) -> Spots:
    """The forwards of the target and of the draft; the rest is what the host does around them."""
    spots = {"target": [(engine.scheduler.tp_worker.model_runner, "forward")]}
    if (draft := draft_worker(engine)) is not None:
        spots["draft"] = [(draft.model_runner, "forward")]
    return spots


@contextmanager
def wrap(spots: Spots, around: Around) -> Iterator[None]:
    """Send every call of the spots' methods through `around(phase, method, *arguments)`."""
    with ExitStack() as stack:
        for phase, methods in spots.items():
            for owner, name in methods:
                if hasattr(owner, name):
                    stack.enter_context(_wrapped(owner, name, phase, around))
        yield


@contextmanager
def _wrapped(owner: Any, name: str, phase: str, around: Around) -> Iterator[None]:
    method, outer = getattr(owner, name), vars(owner).get(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(phase, method, *args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        if outer is None:
            delattr(owner, name)
        else:  # a wrapper around ours
            setattr(owner, name, outer)


@contextmanager
def measure(engine: Any, spots: Spots, counters: bool = False) -> Iterator[Cost]:
    """Fill a Cost with what the engine does inside the block.

    `counters` adds the engine's own phases, "schedule" and "process". On a GPU each method is waited for, or
    its time would be that of launching it: the split is right then, and the total a little too long.
    """
    cost, synchronize = Cost(seconds=dict.fromkeys(spots, 0.0)), synchronizer(engine)

    def timed(phase: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            synchronize()
            cost.seconds[phase] += time.perf_counter() - start

    before = engine.get_server_info()
    with wrap(spots, timed):
        start = time.perf_counter()
        yield cost
        cost.total = time.perf_counter() - start
    after = engine.get_server_info()
    cost.target_forwards, cost.draft_forwards = (
        after["forward_ct"][model] - before["forward_ct"][model] for model in ("target", "draft")
    )
    if counters:
        for phase in ("schedule", "process"):
            cost.seconds[phase] = after[f"{phase}_seconds"] - before[f"{phase}_seconds"]


def timed_run(
    engine: Any, waves: Sequence[list[list[int]]], new_tokens: int, ignore_eos: bool
) -> tuple[Run, list[dict[str, Any]]]:
    """Answer the prompts wave by wave, greedily, with nothing cached; each wave is sent at once."""
    scheduler, results = engine.scheduler, []
    engine.flush_cache()
    prefill_seconds = 0.0

    def step(phase: str, method: Callable[..., Any], *args: Any) -> Any:
        nonlocal prefill_seconds
        before, start = scheduler.counters.forward_ct_prefill, time.perf_counter()
        result = method(*args)
        if scheduler.counters.forward_ct_prefill > before:
            prefill_seconds += time.perf_counter() - start
        return result

    with wrap({"step": steps_of(engine)}, step):
        start = time.perf_counter()
        for prompts in waves:
            results += generate(engine, prompts, new_tokens, ignore_eos=ignore_eos)
        seconds = time.perf_counter() - start
    return Run.of(results, seconds, prefill_seconds, scheduler.counters.forward_ct_decode), results


def synchronizer(engine: Any) -> Callable[[], None]:
    """A function that waits for the engine's device; nothing on a CPU."""
    if engine.get_server_info()["device"] != "cuda":
        return lambda: None
    import torch

    return torch.cuda.synchronize
