"""Records what an engine does, step by step, without a line of code in it.

The phases are methods that have upstream's names in every stage; they are wrapped. On a GPU an event is
recorded before and after each, so the device's time is known without waiting for it. A tree stands in buffers
that the next round overwrites: it is copied on the device, behind the end of its step, and read when all is
over. Nothing else is added to a step. An offline loop's steps are its prefill and its rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .measure import Spots, draft_worker, steps_of, synchronizer, wrap
from .trace_cache import cache_nodes
from .trace_format import FORMAT, VERSION, Trace
from .trace_trees import Growth, candidates_of

ON_DEVICE = ("prefill", "draft prefill", "forward", "draft", "verify", "draft extend")


def trace_phases(engine: Any) -> Spots:
    """Phase → the method that is it."""
    scheduler, draft = engine.scheduler, draft_worker(engine)
    if draft is None:
        return {"forward": [(scheduler.tp_worker, "forward_batch_generation")]}
    return {
        "prefill": [(draft, "forward_target_extend")],
        "draft prefill": [(draft, "forward_draft_extend")],
        "draft": [(draft, "draft"), (scheduler, "draft")],
        "verify": [(draft, "verify")],
        "draft extend": [(draft, "forward_draft_extend_after_decode")],
        "commit": [(draft, "commit"), (scheduler, "commit")],
    }


class Recorder:
    """Collects the steps of the requests whose ids are "0", "1" …; times in µs since the recording began."""

    def __init__(self, engine: Any, growth: Growth):
        self.scheduler, self.growth = engine.scheduler, growth
        self.is_speculative = draft_worker(engine) is not None
        self.synchronize = synchronizer(engine)
        self.is_cuda = engine.get_server_info()["device"] == "cuda"
        self.steps: list[dict[str, Any]] = []
        self.phases: list[dict[str, Any]] = []
        self.rounds: list[dict[str, Any]] = []
        self.tree: tuple[Any, Any] | None = None  # what `draft` returned, and S of each request then
        self.cache: list[dict[str, Any]] = []  # the prefix cache after the last step
        # Entries of rounds whose trees are still on the device, each with copies of what `_copy_tree` names.
        self.unread: list[tuple[list[dict[str, Any]], list[Any]]] = []

    @contextmanager
    def recording(self, engine: Any) -> Iterator[None]:
        """Record every step inside the block."""
        self.synchronize()
        self.start, self.base = time.perf_counter(), self._event()
        with wrap({"step": steps_of(engine)}, self._step), wrap(trace_phases(engine), self._phase):
            yield
        self.synchronize()
        for entries, copies in self.unread:
            for entry, *row in zip(entries, *(copy.tolist() for copy in copies), strict=True):
                [tokens, *links], entry["draft_slots"], *candidates = row
                parents = parents_of(*links) if links else list(range(-1, len(tokens) - 1))  # a chain
                entry.update(tree=tokens, parents=parents)
                if candidates:
                    entry["candidates"] = candidates_of(tokens, *candidates, self.scheduler.draft_worker.topk)
        for step in self.steps:
            for phase in step["phases"]:
                if events := phase["device_us"]:
                    phase["device_us"] = [round(self.base.elapsed_time(event) * 1e3, 1) for event in events]

    def _now(self) -> float:
        return round((time.perf_counter() - self.start) * 1e6, 1)

    def _event(self) -> Any:
        if not self.is_cuda:
            return None
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _step(self, phase: str, method: Callable[..., Any], *args: Any) -> Any:
        counters = self.scheduler.counters
        reqs, prefills = list(self.scheduler.live_reqs), counters.forward_ct_prefill
        before = [len(req.output_ids) for req in reqs]
        self.phases, self.rounds = [], []
        start = self._now()
        result = method(*args)
        if result is False:  # there was nothing to run
            return result
        step = {"kind": "decode", "start_us": start, "end_us": self._now(), "phases": self.phases}
        new = {req.rid: req.output_ids[count:] for req, count in zip(reqs, before, strict=True)}
        batch = self.scheduler.last_batch  # None in an offline loop
        if self.rounds:
            self._copy_tree()
        step["free"] = self.scheduler.token_to_kv_pool_allocator.available_size()
        if (cache := cache_nodes(self.scheduler.tree_cache)) != self.cache:
            step["cache"] = self.cache = cache
        if counters.forward_ct_prefill > prefills:
            step["kind"] = "prefill"
            rows = [(req, 0, len(req.origin_input_ids)) for req in reqs]  # of a loop, which shares nothing
            if batch is not None:
                rows = list(zip(batch.reqs, batch.prefix_lens, batch.seq_lens, strict=True))
            step["requests"] = [
                {"request": int(req.rid), "cached": int(prefix), "seq_len": int(end), "tokens": new[req.rid]}
                for req, prefix, end in rows
            ]
        elif self.is_speculative:
            step |= {"kind": "verify", "requests": self.rounds}
        else:
            step["requests"] = [
                {
                    "request": int(req.rid),
                    "seq_len": int(seq_len),
                    "slots": [int(slot)],
                    "tokens": new[req.rid],
                }
                for req, seq_len, slot in zip(batch.reqs, batch.prefix_lens, batch.out_cache_loc, strict=True)
            ]
        self.steps.append(step)
        return result

    def _phase(self, phase: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if phase == "draft":
            seq_lens = args[0].seq_lens.copy()
            self.growth.forget()
        elif phase == "commit":
            batch = args[0]
            slots = batch.out_cache_loc.reshape(len(batch.reqs), -1).copy()
            before = [len(req.output_ids) for req in batch.reqs]
        on_device = phase in ON_DEVICE and self.is_cuda
        start, begin = self._now(), self._event() if on_device else None
        result = method(*args, **kwargs)
        events = [begin, self._event()] if on_device else None
        self.phases.append({"name": phase, "start_us": start, "end_us": self._now(), "device_us": events})
        if phase == "draft":
            self.tree = result, seq_lens
        elif phase == "commit":
            self.rounds = self._rounds(batch, slots, before, result)
        return result

    def _rounds(self, batch: Any, slots: Any, before: list[int], result: Any) -> list[dict[str, Any]]:
        """What each request's round was, but for the tree; called when the step has read its result."""
        _, seq_lens = self.tree
        table = batch.req_to_token_pool.req_to_token_host
        found = []
        for i, req in enumerate(batch.reqs):
            tokens, start = req.output_ids[before[i] :], int(seq_lens[i])
            found.append(
                {
                    "request": int(req.rid),
                    "seq_len": start,
                    "draft_slots": [],
                    "tree": [],
                    "parents": [],
                    "slots": slots[i].tolist(),
                    "path": [int(node) for node in result.accept_index[i] if node >= 0],
                    "kept_slots": table[req.req_pool_idx, start : start + len(tokens)].tolist(),
                    "tokens": tokens,
                }
            )
        return found

    def _copy_tree(self) -> None:
        """Copy, on the device, what the next round overwrites: of each request its tree and candidates."""
        import torch

        verify_input, bs = self.tree[0], len(self.rounds)
        fields = ("draft_token", "retrieve_next_token", "retrieve_next_sibling")  # a chain has no links
        found = [getattr(verify_input, name)[:bs] for name in fields if hasattr(verify_input, name)]
        copies = [torch.stack(found, dim=1)]  # [bs, 3, n], [bs, 1, n] of a chain
        # A chain's drafts may write where it is verified, and take no slots of their own.
        scratch = getattr(verify_input.step, "draft_slots", verify_input.draft_token[:, :0])
        copies.append(scratch[:bs].clone())
        candidates = self.growth.of(verify_input.draft_token)
        copies += [rows[:bs].clone() for rows in candidates or ()]  # scores, tokens, parents of blocks
        self.unread.append((self.rounds, copies))


def parents_of(child: list[int], sibling: list[int]) -> list[int]:
    """Each node's parent from first children and next siblings (-1: none); -1 for the root."""
    parents = [-1] * len(child)
    for node, below in enumerate(child):
        while below >= 0:
            parents[below] = node
            below = sibling[below]
    return parents


def record(
    engine: Any,
    growth: Growth,
    prompts: list[list[int]],
    new_tokens: int,
    warm_up_tokens: int = 8,
    **params: Any,
) -> Trace:
    """Answer the prompts at once, greedily, and return the trace without its stage and provenance.

    The engine is warmed up on the same prompts first. `growth` has been watching since before the engine was
    opened. Raises BadInput for what the engine refuses.
    """
    from .stages_door import generate

    generate(engine, prompts, min(new_tokens, warm_up_tokens), **params)
    engine.flush_cache()
    recorder = Recorder(engine, growth)
    rids = [str(number) for number in range(len(prompts))]
    with recorder.recording(engine):
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
    return {
        "format": FORMAT,
        "version": VERSION,
        "clock": "device" if recorder.is_cuda else "host",
        "pieces": {str(token): engine.tokenizer.decode([token]) for token in sorted(used)},
        "requests": requests,
        "steps": recorder.steps,
    }
