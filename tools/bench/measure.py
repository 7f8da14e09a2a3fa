"""What a stretch of an engine's work cost: forwards of each model, and where the time went.

The engine counts its own forwards and its scheduling; the phases of a step are timed from here, by wrapping
methods that have upstream's names, so that no engine carries code for it. A stage that lacks a method lacks
its phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

Spots = dict[str, list[tuple[Any, str]]]  # phase → the methods (owner, name) that make it up


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


def step_phases(engine: Any) -> Spots:
    """The parts of a speculative step and its prefill, or the one forward of plain decoding."""
    scheduler = engine.scheduler
    draft = scheduler.draft_worker
    if draft is None:
        return {"forward": [(scheduler.tp_worker, "forward_batch_generation")]}
    return {
        "prefill": [(draft, "forward_target_extend"), (draft, "forward_draft_extend")],
        "draft": [(draft, "draft")],
        "verify": [(draft, "verify")],
        "draft extend": [(draft, "forward_draft_extend_after_decode")],
        "commit": [(draft, "commit")],
    }


def model_forwards(engine: Any) -> Spots:
    """The forwards of the target and of the draft; the rest is what the host does around them."""
    scheduler = engine.scheduler
    spots = {"target": [(scheduler.tp_worker.model_runner, "forward")]}
    if scheduler.draft_worker is not None:
        spots["draft"] = [(scheduler.draft_worker.model_runner, "forward")]
    return spots


@contextmanager
def measure(engine: Any, spots: Spots, counters: bool = False) -> Iterator[Cost]:
    """Fill a Cost with what the engine does inside the block.

    `counters` adds the engine's own phases, "schedule" and "process". On a GPU each method is waited for, or
    its time would be that of launching it: the split is right then, and the total a little too long.
    """
    cost, synchronize = Cost(), _synchronizer(engine)
    before = engine.get_server_info()
    with ExitStack() as stack:
        for phase, methods in spots.items():
            cost.seconds[phase] = 0.0
            for owner, name in methods:
                if hasattr(owner, name):
                    stack.enter_context(_timed(owner, name, cost.seconds, phase, synchronize))
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


def _synchronizer(engine: Any) -> Callable[[], None]:
    if engine.get_server_info()["device"] != "cuda":
        return lambda: None
    import torch

    return torch.cuda.synchronize


@contextmanager
def _timed(
    owner: Any, name: str, seconds: dict[str, float], phase: str, synchronize: Callable[[], None]
) -> Iterator[None]:
    method = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            synchronize()
            seconds[phase] += time.perf_counter() - start

    setattr(owner, name, timed)
    try:
        yield
    finally:
        delattr(owner, name)
