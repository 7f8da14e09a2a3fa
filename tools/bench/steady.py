"""The time of one step or round in the middle of a batch: on the clock, on the device, and so on the host.

A round is timed while every request of the batch still runs and nothing is wrapped but `Scheduler.step`.
Then one more round runs with its CUDA graphs noted, and those graphs are replayed alone, many times, back to
back: what they take is the device's time, free of launching. What a round on the clock has more is the
host's. Texts grow meanwhile, and a forward takes a step up where their keys fill one more tile of attention:
so only the last rounds are held against the replays. Where a forward is in no graph there is no such number
on a GPU; on a CPU the models' forwards stand for the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from .measure import (
    model_forwards,
    most_tokens,
    overlaps,
    prefill_watch,
    step_phases,
    steps_of,
    wait_for_forwards,
    wrap,
)

ROUNDS = 40  # at most; the first quarter is left out
LAST = 4  # one in so many of the rounds, those next to the replays, make the host's time
SAMPLES, REPLAYS = 5, 20

Samples = list[float]  # of the same thing, in seconds
# What the parts of a round took, in order (a phase may come twice), and all of them together.
Parts = tuple[list[tuple[str, Samples]], Samples]


@dataclass
class Steady:
    """Seconds at one batch size; lists hold every sample.

    `phases` are the graphs of one round by phase, each replayed alone; `device` is all of them in order. On a
    CPU they are the time inside each model's forwards. `context` is the longest request's tokens then.
    """

    batch: int
    context: int = 0
    rounds: Samples = field(default_factory=list)
    phases: dict[str, Samples] = field(default_factory=dict)
    device: Samples = field(default_factory=list)

    @property
    def host(self) -> Samples:
        """Seconds that each of the last rounds took beyond `device`; none where that is not known.

        Two clocks and two measurements: where the device is never idle a difference may be below nothing.
        """
        if not self.device:
            return []
        last = self.rounds[-max(1, len(self.rounds) // LAST) :]
        return [seconds - statistics.median(self.device) for seconds in last]


def steady(engine: Any, prompts: list[list[int]], new_tokens: int) -> Steady:
    """Decode all prompts at once, greedily, as far as the measurement needs; the engine is idle afterwards.

    `new_tokens` is the length of an answer, which limits the number of rounds.
    """
    scheduler = engine.scheduler
    most = most_tokens(engine) * (1 + overlaps(engine))  # a step may be in flight
    measure_parts = _replays if engine.get_server_info()["device"] == "cuda" else _forwards
    found, ids = Steady(len(prompts)), [str(number) for number in range(len(prompts))]
    parts: Callable[[], Parts] | None = None
    left = time.perf_counter()

    with ExitStack() as recording:

        def step(phase: str, method: Callable[..., Any], *args: Any) -> Any:
            nonlocal parts, left
            is_prefill, start = prefill_watch(scheduler), time.perf_counter()
            result = method(*args)
            # The way from one step to the next belongs to a round, what stands below does not.
            seconds = time.perf_counter() - start + (start - left)
            is_decode = not is_prefill()
            batch = args[0] if args and is_decode else scheduler.running_batch  # a loop hands on its own
            running = [req for req in batch.reqs if not req.finished()]
            # An offline loop goes on to the end, though all that is wanted of it is known.
            if is_decode and len(running) == len(prompts) and not found.context:
                if parts is None:
                    found.rounds.append(seconds)
                    room = min(new_tokens - len(req.output_ids) for req in running)
                    if len(found.rounds) == ROUNDS or room <= 2 * most:
                        wait_for_forwards(engine)  # whole rounds, where they are launched ahead
                        parts = recording.enter_context(measure_parts(engine))
                else:
                    wait_for_forwards(engine)
                    found.context = max(len(req.origin_input_ids) + len(req.output_ids) for req in running)
                    _fill(found, parts())
                    for rid in ids:
                        engine.abort_request(rid)
            left = time.perf_counter()
            return result

        with wrap({"step": steps_of(engine)}, step):
            wanted = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
            engine.generate(input_ids=prompts, sampling_params=wanted, rid=ids)
    found.rounds = found.rounds[len(found.rounds) // 4 :]
    engine.flush_cache()
    return found


def _fill(found: Steady, measured: Parts) -> None:
    parts, found.device = measured
    for phase, samples in parts:
        before = found.phases.get(phase, [0.0] * len(samples))
        found.phases[phase] = [a + b for a, b in zip(before, samples, strict=True)]


@contextmanager
def _forwards(engine: Any) -> Iterator[Callable[[], Parts]]:
    """On a CPU: seconds inside the forwards of each model, from here until the result is asked for."""
    seconds: dict[str, float] = {}

    def timed(phase: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start

    with wrap(model_forwards(engine), timed):
        yield lambda: ([(phase, [value]) for phase, value in seconds.items()], [sum(seconds.values())])


@contextmanager
def _replays(engine: Any) -> Iterator[Callable[[], Parts]]:
    """On a GPU: the graphs replayed from here on, and a function that times each of them alone."""
    import torch

    graphs: list[tuple[str, tuple[Any, Any]]] = []  # phase, graph and its stream
    phases, eager = ["other"], []
    replay = torch.cuda.CUDAGraph.replay

    def note(graph: Any) -> None:
        graphs.append((phases[-1], (graph, torch.cuda.current_stream())))
        replay(graph)

    def parts() -> Parts:
        alone = [(phase, _replay_seconds(replay, [graph])) for phase, graph in graphs]
        is_whole = graphs and not eager
        return alone, _replay_seconds(replay, [graph for _, graph in graphs]) if is_whole else []

    def inside(phase: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        phases.append(phase)
        try:
            return method(*args, **kwargs)
        finally:
            phases.pop()

    def outside(phase: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        eager.append(phase)
        return method(*args, **kwargs)

    torch.cuda.CUDAGraph.replay = note
    try:
        with wrap(step_phases(engine), inside), wrap(model_forwards(engine), outside):
            yield parts
    finally:
        torch.cuda.CUDAGraph.replay = replay


def _replay_seconds(replay: Callable[[Any], None], graphs: list[tuple[Any, Any]]) -> Samples:
    """Seconds of one pass over `graphs`, as the device sees it: means of REPLAYS passes, SAMPLES of them."""
    import torch

    found = []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for number in range(REPLAYS + 1):  # the first pass is launched onto an idle device: left out
            if number == 1:
                start.record(graphs[0][1])
            for graph, stream in graphs:
                with torch.cuda.stream(stream):
                    replay(graph)
        end.record(graphs[-1][1])
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / REPLAYS)
    return found
