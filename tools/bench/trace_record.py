"""Records what an engine does, step by step, without a line of code in it.

The phases are methods that have upstream's names in every stage; they are wrapped. On a GPU events are
recorded around each, on the stream that it launches on, so the device's time is known without waiting for it.
A tree stands in buffers that the next round overwrites: it is copied on the device, behind the end of its
step, and read when all is over. Nothing else is added to a step.

There are two kinds of engines. In one a step ends with its result (here; an offline loop's steps are its
prefill and its rounds). In the other the scheduler launches a step and processes its result later, perhaps
after the next launch: trace_launches.py.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .measure import Around, Spots, draft_worker, processes_later, steps_of, synchronizer, wrap
from .stages_door import BadInput, generate
from .trace_cache import cache_nodes
from .trace_format import FORMAT, VERSION, Trace
from .trace_idle import ON_DEVICE, idle_summary
from .trace_trees import Growth, candidates_of, parents_of


def trace_phases(engine: Any) -> Spots:
    """Phase → the method that is it."""
    scheduler, draft = engine.scheduler, draft_worker(engine)
    if draft is None:
        return {"forward": [(scheduler.tp_worker, "forward_batch_generation")]}
    prefill, drafter = (draft, "forward_target_extend"), draft
    if processes_later(engine):  # the worker is composed of two; the draft's is None where nothing is loaded
        prefill, drafter = (draft.target_worker, "forward_and_sample"), draft.draft_worker
    return {
        "prefill": [prefill],
        "draft prefill": [(drafter, "forward_draft_extend")],
        "draft": [(draft, "draft"), (scheduler, "draft")],
        "verify": [(draft, "verify"), (draft, "target_forward")],  # a method may take the second alone
        "draft extend": [(draft, "forward_draft_extend_after_decode")],
        "commit": [(draft, "commit"), (scheduler, "commit")],
    }


@dataclass
class Recorded:
    """A step while it is recorded; `step` is what the trace will say, without what is read at the end.

    `columns` are fields of the entries of `reqs`, a value for each. `rows` are theirs in the batch, and so in
    `tree`, which holds copies on the device. `written` is where in a request's output its tokens stand.
    """

    step: dict[str, Any]
    rows: Sequence[int] = ()
    reqs: Sequence[Any] = ()
    written: list[tuple[int, int]] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    tree: list[Any] = field(default_factory=list)

    def take(self, rows: Sequence[int], reqs: Sequence[Any], before: list[int], **columns: Any) -> None:
        """Note what the step gave to requests that had `before` output tokens."""
        self.rows, self.reqs, self.columns = rows, reqs, columns
        self.written = [(start, len(req.output_ids)) for start, req in zip(before, reqs, strict=True)]

    def entries(self, topk: int | None) -> list[dict[str, Any]]:
        """The step's `requests`, once the device has done all."""
        found = []
        for i, (req, (start, end)) in enumerate(zip(self.reqs, self.written, strict=True)):
            entry = {"request": int(req.rid)}
            entry |= {name: np.asarray(column[i]).tolist() for name, column in self.columns.items()}
            entry["tokens"] = req.output_ids[start:end]
            if "path" in entry:
                entry["path"] = [node for node in entry["path"] if node >= 0]
            if "kept_slots" in entry:
                entry["kept_slots"] = entry["kept_slots"][: end - start]
            found.append(entry)
        if self.tree:
            read = list(zip(*(copy.tolist() for copy in self.tree), strict=False))
            for entry, row in zip(found, self.rows, strict=True):
                entry.update(_tree_fields(*read[row], topk=topk))
        return found


def _tree_fields(
    nodes: list[list[int]], slots: list[int], scratch: list[int], *candidates: list, topk: int | None
) -> dict[str, Any]:
    tokens, *links = nodes
    parents = parents_of(*links) if links else list(range(-1, len(tokens) - 1))  # a chain
    size = 1 + next((node for node, parent in enumerate(parents[1:]) if parent < 0), len(parents))
    # Behind the nodes that hang on the root a tree that was looked up is filled with what nobody sees.
    fields = {"draft_slots": scratch, "tree": tokens[:size], "parents": parents[:size]}
    if slots:
        fields["slots"] = slots[:size]
    if candidates:
        fields["candidates"] = candidates_of(tokens, *candidates, topk)
    return fields


class Recorder(ABC):
    """Collects the steps of the requests whose ids are "0", "1" …; times in µs since the recording began.

    Args:
        engine: of any stage.
        growth: watches its trees since before it was opened.
        has_trees: record trees, slots and the prefix cache too, and not only times and tokens.
    """

    def __init__(self, engine: Any, growth: Growth, has_trees: bool = True):
        self.engine, self.scheduler, self.growth, self.has_trees = engine, engine.scheduler, growth, has_trees
        self.is_speculative = draft_worker(engine) is not None
        self.synchronize = synchronizer(engine)
        self.is_cuda = engine.get_server_info()["device"] == "cuda"
        self.found: list[Recorded] = []
        self.current: Recorded | None = None  # whose phases run now
        self.verify_input: Any = None  # its tree
        self.is_inside = False  # a phase, as whose part others count
        self.span: list[Any] = []  # events at the beginning of the phase that runs
        self.cache: list[dict[str, Any]] = []  # the prefix cache after the last step

    @abstractmethod
    def wraps(self) -> Iterator[tuple[Spots, Around]]:
        """What is wrapped beside the phases; what comes later stands around what came before."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record every step inside the block; `steps` are there behind it."""
        self.synchronize()
        self.start, self.base = time.perf_counter(), self._event()
        with ExitStack() as stack:
            stack.enter_context(wrap(trace_phases(self.engine), self._phase))
            for spots, around in (*self._graphs(), *self.wraps()):
                stack.enter_context(wrap(spots, around))
            yield
            # Requests that have ended take part in one step more, whose result nobody waits for.
            while getattr(self.scheduler, "result_queue", ()):
                self.scheduler.step()
        self.synchronize()
        worker = draft_worker(self.engine)
        topk = getattr(getattr(worker, "draft_worker", None) or worker, "topk", None)
        for found in self.found:
            found.step["requests"] = found.entries(topk)
            found.step["phases"].sort(key=lambda phase: phase["start_us"])
            for phase in found.step["phases"]:
                if events := phase["device_us"]:
                    phase["device_us"] = [round(self.base.elapsed_time(event) * 1e3, 1) for event in events]
        self.steps = [found.step for found in self.found]

    # ---- for both kinds ----

    def _now(self) -> float:
        return round((time.perf_counter() - self.start) * 1e6, 1)

    def _event(self) -> Any:
        """On the current stream, which is the one that the work is launched on."""
        if not self.is_cuda:
            return None
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _graphs(self) -> Iterator[tuple[Spots, Around]]:
        if self.is_cuda:
            import torch

            yield {"replay": [(torch.cuda.CUDAGraph, "replay")]}, self._replay

    def _replay(self, _: str, method: Callable[..., Any], *args: Any) -> Any:
        """On the device a phase begins with its graph: while the host prepares that, the device may idle."""
        if len(self.span) == 1:
            self.span.append(self._event())
        return method(*args)

    def _phase(self, phase: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.is_inside:
            return method(*args, **kwargs)
        if phase == "draft":
            self.growth.forget()
        self.is_inside = True
        on_device = phase in ON_DEVICE and self.is_cuda
        start, self.span = self._now(), [self._event()] if on_device else []
        try:
            result = method(*args, **kwargs)
        finally:
            self.is_inside = False
        events, self.span = [self.span[-1], self._event()] if on_device else None, []
        self._add(self.current, phase, start, self._now(), events)
        if phase == "draft":
            self.verify_input = result
        return result

    def _add(self, found: Recorded, phase: str, start: float, end: float, events: Any = None) -> None:
        found.step["phases"].append({"name": phase, "start_us": start, "end_us": end, "device_us": events})

    def _state(self, step: dict[str, Any]) -> None:
        """What the scheduler holds now that the step's result is in."""
        step["free"] = self.scheduler.token_to_kv_pool_allocator.available_size()
        if self.has_trees and (cache := cache_nodes(self.scheduler.tree_cache)) != self.cache:
            step["cache"] = self.cache = cache

    def _copy_tree(self, found: Recorded) -> None:
        """Copy, on the device, what the next round overwrites: of each request its tree and candidates."""
        import torch

        tree = self.verify_input
        if not hasattr(tree, "draft_token"):
            worker = type(draft_worker(self.engine)).__name__
            raise BadInput(
                f"{worker} shows no tree, which `draft` would return: --batch records times and tokens alone."
            )
        fields = ("draft_token", "retrieve_next_token", "retrieve_next_sibling")  # a chain has no links
        nodes = [getattr(tree, name) for name in fields if hasattr(tree, name)]
        nothing = tree.draft_token[:, :0]
        # Where slots are reserved the device alone knows which ones a round takes, and drafts write to them
        # too. A chain's drafts may write where it is verified as well, and take no slots of their own.
        slots = getattr(tree, "verify_slots", nothing)
        scratch = getattr(tree.step, "draft_slots", nothing)
        candidates = self.growth.of(tree.draft_token) or ()  # scores, tokens, parents of blocks
        # Rows behind the batch's are padding, where there are some.
        found.tree = [torch.stack(nodes, dim=1)]  # [bs, 3 or 1, n]
        found.tree += [tensor.clone() for tensor in (slots, scratch, *candidates)]


class StepRecorder(Recorder):
    """Of an engine whose step ends with its result."""

    def wraps(self) -> Iterator[tuple[Spots, Around]]:
        yield {"step": steps_of(self.engine)}, self._step

    def _step(self, _: str, method: Callable[..., Any], *args: Any) -> Any:
        scheduler = self.scheduler
        reqs, prefills = list(scheduler.live_reqs), scheduler.counters.forward_ct_prefill
        before = {req.rid: len(req.output_ids) for req in reqs}
        found = self.current = Recorded({"kind": "decode", "start_us": self._now(), "phases": []})
        result = method(*args)
        if result is False:  # there was nothing to run
            return result
        found.step["end_us"] = self._now()
        batch = scheduler.last_batch  # None in an offline loop
        self._state(found.step)
        if scheduler.counters.forward_ct_prefill > prefills:
            found.step["kind"] = "prefill"
            # Prompts of a loop share nothing.
            cached, ends = [0] * len(reqs), [len(req.origin_input_ids) for req in reqs]
            if batch is not None:
                reqs, cached, ends = batch.reqs, batch.prefix_lens, batch.seq_lens
            starts = [before[req.rid] for req in reqs]
            found.take(range(len(reqs)), reqs, starts, cached=cached, seq_len=ends)
        elif self.is_speculative:
            found.step["kind"] = "verify"
            if self.has_trees:
                self._copy_tree(found)
        else:
            starts = [before[req.rid] for req in batch.reqs]
            columns = {"seq_len": batch.prefix_lens}
            if self.has_trees:
                columns["slots"] = batch.out_cache_loc.reshape(-1, 1)
            found.take(range(len(batch.reqs)), batch.reqs, starts, **columns)
        self.found.append(found)
        return result

    def _phase(self, phase: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if phase != "commit":
            return super()._phase(phase, method, *args, **kwargs)
        batch = args[0]
        reqs, starts = list(batch.reqs), batch.seq_lens.copy()
        before = [len(req.output_ids) for req in reqs]
        table, rows = batch.req_to_token_pool.req_to_token_host, batch.req_pool_indices
        slots = batch.out_cache_loc.reshape(len(reqs), -1).copy()
        result = super()._phase(phase, method, *args, **kwargs)
        columns = {"seq_len": starts, "path": result.accept_index}
        if self.has_trees:
            columns |= {"slots": slots, "kept_slots": slots_from(table, rows, starts, slots.shape[1])}
        self.current.take(range(len(reqs)), reqs, before, **columns)
        return result


def slots_from(table: np.ndarray, rows: np.ndarray, starts: np.ndarray, width: int) -> np.ndarray:
    """Slots of `width` positions from `starts` [bs] on, [bs, width]; behind a row's end its last one."""
    places = np.minimum(starts[:, None] + np.arange(width), table.shape[1] - 1)
    return table[rows[:, None], places]


def record(
    engine: Any,
    growth: Growth,
    prompts: list[list[int]],
    new_tokens: int,
    warm_up_tokens: int = 8,
    has_trees: bool = True,
    **params: Any,
) -> Trace:
    """Answer the prompts at once, greedily, and return the trace without its stage and provenance.

    The engine is warmed up on the same prompts first. `growth` has been watching since before the engine was
    opened. Raises BadInput for what the engine refuses.
    """
    from .trace_launches import LaunchRecorder

    generate(engine, prompts, min(new_tokens, warm_up_tokens), **params)
    engine.flush_cache()
    recorder = (LaunchRecorder if processes_later(engine) else StepRecorder)(engine, growth, has_trees)
    rids = [str(number) for number in range(len(prompts))]
    with recorder.recording():
        results = generate(engine, prompts, new_tokens, rid=rids, **params)
    meta = ("finish_reason", "tokens_per_round", "spec_correct_drafts_histogram")
    requests = [
        {"prompt_ids": prompt, "output_ids": result["output_ids"], "text": result["text"]}
        | {name: result["meta_info"][name] for name in meta if name in result["meta_info"]}
        for prompt, result in zip(prompts, results, strict=True)
    ]
    used = {token for request in requests for token in request["prompt_ids"] + request["output_ids"]}
    rounds = [entry for step in recorder.steps for entry in step["requests"] if "tree" in entry]
    used |= {t for entry in rounds for t in entry["tree"] + entry.get("candidates", {}).get("tokens", [])}
    clock = "device" if recorder.is_cuda else "host"
    return {
        "format": FORMAT,
        "version": VERSION,
        "clock": clock,
        "summary": idle_summary(recorder.steps),
        "pieces": {str(token): engine.tokenizer.decode([token]) for token in sorted(used)},
        "requests": requests,
        "steps": recorder.steps,
    }
