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
    """Forwards and seconds; `seconds` is by phase, without overlap, and need not add up to `total`.

    Of an engine that overlaps, phases are the device's, so `rest` is what the host took and nothing hid.
    """

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


def processes_later(engine: Any) -> bool:
    """Whether steps are launched first and their results processed from a queue; without overlap at once."""
    return hasattr(engine.scheduler, "result_queue")


def overlaps(engine: Any) -> bool:
    """Whether the next step is launched before a result is processed."""
    return processes_later(engine) and engine.get_server_info()["is_on"]["overlap_schedule"]


def wait_for_forwards(engine: Any) -> None:
    """Wait for what is launched, where the host does not do so within a step."""
    if processes_later(engine):
        engine.scheduler.forward_stream.synchronize()


def most_tokens(engine: Any) -> int:
    """The most that a request gets in one step."""
    draft = draft_worker(engine)
    if draft is None:
        return 1
    return 1 + (draft.max_path if processes_later(engine) else draft.speculative_num_steps)


def prefill_watch(scheduler: Any) -> Callable[[], bool]:
    """Called before a step; what it returns says after it whether the step's time went into a prefill.

    That is a step that launches one, and one that waits for the result of one.
    """
    launched = scheduler.counters.forward_ct_prefill
    waits = any(batch.forward_mode.is_extend() for batch, _ in getattr(scheduler, "result_queue", ()))
    return lambda: waits or scheduler.counters.forward_ct_prefill > launched


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
        "prefill": [
            (draft, name) for name in ("forward_target_extend", "forward_draft_extend", "forward_extend")
        ],
        "draft": [(draft, "draft"), (scheduler, "draft")],
        "verify": [(draft, "verify")],
        "draft extend": [(draft, "forward_draft_extend_after_decode")],
        "commit": [(draft, "commit"), (scheduler, "commit")],
    }


def model_forwards(engine: Any) -> Spots:
    """The forwards of the target and of the draft; the rest is what the host does around them."""
    scheduler, draft = engine.scheduler, draft_worker(engine)
    spots = {"target": [(scheduler.tp_worker.model_runner, "forward")]}
    if draft is not None:
        # A method may have several draft models, or none.
        runners = draft.model_runners[1:] if processes_later(engine) else [draft.draft_model_runner]
        spots["draft"] = [(runner, "forward") for runner in runners]
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

    `counters` adds the engine's own phases, "schedule" and "process", unless they overlap with the others. On
    a GPU each method is waited for, or its time would be that of launching it: the split is right then, and
    the total a little too long. Where waiting would undo an overlap, events on the stream are read instead.
    """
    cost, synchronize, is_over = Cost(seconds=dict.fromkeys(spots, 0.0)), synchronizer(engine), False
    hides, events = overlaps(engine), []
    on_stream = hides and engine.get_server_info()["device"] == "cuda"

    def timed(phase: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            synchronize()
            if not is_over:  # of a step that was launched ahead, for requests that had ended
                cost.seconds[phase] += time.perf_counter() - start

    def noted(phase: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        try:
            return method(*args, **kwargs)
        finally:
            end.record()
            events.append((phase, begin, end))

    before = engine.get_server_info()
    with wrap(spots, noted if on_stream else timed):
        start = time.perf_counter()
        yield cost
        cost.total, is_over = time.perf_counter() - start, True
        after = engine.get_server_info()
    synchronize()
    for phase, begin, end in events:
        cost.seconds[phase] += begin.elapsed_time(end) / 1e3
    cost.target_forwards, cost.draft_forwards = (
        after["forward_ct"][model] - before["forward_ct"][model] for model in ("target", "draft")
    )
    if counters and not hides:
        for phase in ("schedule", "process"):
            cost.seconds[phase] = after[f"{phase}_seconds"] - before[f"{phase}_seconds"]


def timed_run(
    engine: Any, waves: Sequence[list[list[int]]], new_tokens: int, ignore_eos: bool
) -> tuple[Run, list[dict[str, Any]]]:
    """Answer the prompts wave by wave, greedily, with nothing cached; each wave is sent at once."""
    scheduler, results = engine.scheduler, []
    engine.flush_cache()
    prefill_seconds, steps = 0.0, 0

    def step(phase: str, method: Callable[..., Any], *args: Any) -> Any:
        nonlocal prefill_seconds, steps
        is_prefill, start = prefill_watch(scheduler), time.perf_counter()
        result = method(*args)
        if is_prefill():
            prefill_seconds += time.perf_counter() - start
        elif result is not False:
            steps += 1
        return result

    with wrap({"step": steps_of(engine)}, step):
        start = time.perf_counter()
        for prompts in waves:
            results += generate(engine, prompts, new_tokens, ignore_eos=ignore_eos)
        seconds = time.perf_counter() - start
    return Run.of(results, seconds, prefill_seconds, steps), results


def synchronizer(engine: Any) -> Callable[[], None]:
    """A function that waits for the engine's device; nothing on a CPU."""
    if engine.get_server_info()["device"] != "cuda":
        return lambda: None
    import torch

    return torch.cuda.synchronize
