"""Looks into an engine by upstream's names, changes nothing, and checks what must be true between two steps.

No engine code exists for these tests: everything is read from `engine.scheduler` and what hangs on it.
`watch` wraps the scheduler's `step`, the one place every iteration passes through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Probe:
    """A view on one engine."""

    def __init__(self, engine):
        self.engine = engine
        self.scheduler = engine.scheduler
        self.rows = self.scheduler.req_to_token_pool
        self.allocator = self.scheduler.token_to_kv_pool_allocator
        self.tree = self.scheduler.tree_cache
        self.draft_worker = getattr(self.scheduler, "draft_worker", None)

    # ---- parts ----

    @property
    def target_runner(self):
        return self.scheduler.tp_worker.model_runner

    @property
    def draft_runner(self):
        return self.draft_worker.draft_model_runner

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being prepared."""
        graphs = getattr(self.scheduler, "graphs", None)
        return graphs is not None and graphs.is_capturing

    def runners(self) -> list:
        """The target's model runner, and the draft's where there is one."""
        has_draft = hasattr(self.draft_worker, "draft_model_runner")
        return [self.target_runner, *([self.draft_runner] if has_draft else [])]

    @property
    def overlaps(self) -> bool:
        """Whether the scheduler is one step behind the device."""
        return getattr(self.scheduler, "enable_overlap", False)

    def kv(self, runner, slots: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `slots` in a runner's pool: [layers, n, Hk, D] each."""
        pool, index = runner.token_to_kv_pool, torch.from_numpy(np.asarray(slots, dtype=np.int64))
        return pool.k_buffer[:, index].float().cpu(), pool.v_buffer[:, index].float().cpu()

    def free_slots(self) -> np.ndarray:
        """Every slot on the free list."""
        return self._slots_of(self.allocator._stack[: self.allocator._top])

    def _slots_of(self, pages: np.ndarray) -> np.ndarray:
        page = self.allocator.page_size
        return (np.asarray(pages, dtype=np.int64)[:, None] * page + np.arange(page)).reshape(-1)

    def tree_nodes(self) -> Iterator:
        """All nodes of the prefix tree but its root."""
        stack = list(self.tree.root_node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def batches(self) -> list:
        """The running batch and, until the next step merges it, the last prefill."""
        batches = [self.scheduler.running_batch]
        last = self.scheduler.last_batch
        if last is not None and all(last is not batch for batch in batches) and last.forward_mode.is_extend():
            batches.append(last)
        return batches

    def rows_of(self, batch) -> list[tuple[int, Any]]:
        """(row, request) of a batch where the request goes on decoding."""
        chunked = self.scheduler.chunked_req
        return [(i, req) for i, req in enumerate(batch.reqs) if not req.finished() and req is not chunked]

    def running(self) -> list:
        """Requests that will decode in the next step, finished ones left out."""
        return [req for batch in self.batches() for _, req in self.rows_of(batch)]

    def holders(self) -> list:
        """Requests that hold a row of req_to_token: running ones, and one that is between two chunks."""
        chunked = self.scheduler.chunked_req
        return self.running() + ([chunked] if chunked is not None and not chunked.finished() else [])

    def slots_of(self, req) -> np.ndarray:
        """Slots of the KV entries that exist for a request, in order of position."""
        return self.rows.req_to_token_host[req.req_pool_idx, : req.kv_len].copy()

    def held_by(self, req) -> np.ndarray:
        """The same with what is reserved for steps to come, in stages that reserve."""
        held = getattr(req, "kv_allocated_len", req.kv_len)
        return self.rows.req_to_token_host[req.req_pool_idx, :held].copy()

    def settle(self) -> None:
        """Wait for a step in flight: the device is then one step ahead of what the host knows."""
        stream = getattr(self.scheduler, "forward_stream", None)
        if stream is not None:
            stream.synchronize()

    def draft_feature(self, batch, row: int) -> tuple[int, torch.Tensor]:
        """What a row's next round drafts from: how many tokens it has, and the draft's feature [hidden]."""
        req = batch.reqs[row]
        if (futures := getattr(self.scheduler, "future_map", None)) is None:
            return len(req.all_token_ids()), batch.spec_info.hidden_states[row]
        self.settle()
        count = int(futures.new_seq_lens_buf[req.req_pool_idx]) + 1
        return count, futures.draft_state["hidden_states"][req.req_pool_idx]

    # ---- invariants ----

    def check_owners(self) -> None:
        """INV-POOL: every page is in exactly one of free list, tree, request; the counters
        agree; rows too.
        """
        page = self.allocator.page_size
        owners: dict[int, str] = {}

        def claim(slots, who: str) -> None:
            for number in np.unique(np.asarray(slots, dtype=np.int64) // page).tolist():
                assert number > 0, f"{who} owns the padding page"
                assert number not in owners, f"page {number} belongs to {owners[number]} and to {who}"
                owners[number] = who

        claim(self.free_slots(), "the free list")
        cached = protected = 0
        for node in self.tree_nodes():
            claim(node.value, "the tree")
            cached += len(node.value)
            protected += len(node.value) if node.lock_ref > 0 else 0
            assert len(node.key) == len(node.value) and len(node.key) % page == 0
        in_tree = {n for n, who in owners.items() if who == "the tree"}
        for req in self.holders():
            slots = self.held_by(req)
            claim(slots[req.prefix_len :], f"request {req.rid}")
            shared = set((slots[: req.prefix_len] // page).tolist())
            assert shared <= in_tree, f"request {req.rid} uses slots that the tree does not have"
            on_device = self.rows.req_to_token[req.req_pool_idx, : len(slots)].cpu().numpy()
            assert np.array_equal(on_device, slots), (
                f"req_to_token of {req.rid} differs between host and device"
            )
        lost = set(range(1, self.allocator.size // page + 1)) - set(owners)
        assert not lost, f"pages without an owner: {sorted(lost)}"
        assert self.allocator.available_size() == len(self.free_slots())
        assert self.tree.protected_size() == protected
        assert self.tree.evictable_size() == cached - protected
        assert len(self.rows.free_slots) + len(self.holders()) == self.rows.size
        assert len(set(self.rows.free_slots)) == len(self.rows.free_slots)

    def check_idle(self) -> None:
        """At idle: free + cached == capacity, nothing locked, all rows free, no draft state left."""
        assert not self.running() and not self.scheduler.waiting_queue
        assert self.allocator.available_size() + self.tree.evictable_size() == self.allocator.size
        assert self.tree.protected_size() == 0
        assert len(self.rows.free_slots) == self.rows.size
        self.check_owners()

    def check_lengths(self) -> None:
        """S = prompt + output − 1 for every running request, host and batch agree, row i is request i."""
        if hasattr(self.scheduler, "future_map"):
            self.check_future()
            return
        for batch in self.batches():
            assert len(batch.seq_lens) == len(batch.req_pool_indices) == len(batch.reqs)
            info = getattr(batch, "spec_info", None) if self.draft_worker is not None else None
            if info is not None and batch.reqs:
                assert len(info.topk_index) == len(info.topk_p) == len(info.hidden_states) == len(batch.reqs)
            for i, req in self.rows_of(batch):
                want = len(req.origin_input_ids) + len(req.output_ids) - 1
                assert int(batch.seq_lens[i]) == want == req.kv_len, (
                    req.rid,
                    batch.seq_lens[i],
                    want,
                    req.kv_len,
                )
                assert int(batch.req_pool_indices[i]) == req.req_pool_idx
                if info is not None:
                    assert int(info.verified_id[i]) == req.output_ids[-1], (
                        f"row {i} is not the state of {req.rid}"
                    )

    def check_future(self) -> None:
        """The same where the device is ahead: the map has a row for each request, at S or behind it."""
        futures, overlaps = self.scheduler.future_map, self.scheduler.enable_overlap
        for batch in self.batches():
            assert len(batch.req_pool_indices) == len(batch.reqs)
            for i, req in self.rows_of(batch):
                row, want = req.req_pool_idx, len(req.origin_input_ids) + max(len(req.output_ids) - 1, 0)
                assert int(batch.req_pool_indices[i]) == row
                assert req.kv_len == want <= req.kv_allocated_len, (req.rid, req.kv_len, want)
                ahead = int(futures.new_seq_lens_buf[row]) - want
                assert 0 <= ahead <= self.scheduler.alloc_len_per_decode * overlaps, (req.rid, ahead)
                if not overlaps:
                    assert int(futures.output_tokens_buf[row]) == req.output_ids[-1]
        assert int(futures.new_seq_lens_buf[0]) == 0, "a padding row has a length"

    def check_target_kv(self, ref, tolerance: float = 2e-4) -> None:
        """Target KV of every request, in every layer, equals a fresh pass without a cache."""
        for req in self.holders():
            want = ref.run(req.all_token_ids()[: req.kv_len])
            k, v = self.kv(self.target_runner, self.slots_of(req))
            _close(k, want.k, tolerance, f"target K of {req.rid}")
            _close(v, want.v, tolerance, f"target V of {req.rid}")

    def check_draft_kv(self, ref_head, tolerance: float = 2e-4) -> None:
        """INV-DRAFTKV: position p holds what one teacher-forced pass over (token[p+1], hidden[p]) gives.

        A whole model as the draft gives it over token[p], in each of its layers. Where each step has a head,
        head i has read proposals in its last i rows: what they are is not settled yet.
        """
        for req in self.holders():
            tokens = req.all_token_ids()[: req.kv_len + 1]  # one less where a prompt's step is in flight
            if len(tokens) < 2:
                continue
            want_k, want_v, _ = ref_head.teacher_forced(tokens)
            k, v = self.kv(self.draft_runner, self.slots_of(req)[: len(tokens) - 1])
            assert want_k.shape[-3] in (req.kv_len, len(req.origin_input_ids) - 1)
            for i in range(1, len(getattr(ref_head, "heads", ()))):
                k[i, -i:], v[i, -i:] = want_k[i, -i:], want_v[i, -i:]
            _close(k.view(want_k.shape), want_k, tolerance, f"draft K of {req.rid}")
            _close(v.view(want_v.shape), want_v, tolerance, f"draft V of {req.rid}")

    def check_tree_kv(self, ref, ref_head=None, tolerance: float = 2e-4) -> None:
        """Every path of the prefix tree holds the KV of exactly its tokens, in both pools."""
        for node in self.tree_nodes():
            if node.children:
                continue
            keys, values, here = [], [], node
            while here is not self.tree.root_node:
                keys, values, here = [*here.key.tolist(), *keys], [here.value, *values], here.parent
            slots = np.concatenate(values)
            if hasattr(self.tree, "lookahead"):
                tokens, ahead = [key[0] for key in keys] + keys[-1][1:], self.tree.lookahead
            else:
                tokens, ahead = keys, int(self.tree.is_eagle)
                if ahead:
                    tokens = [key >> 32 for key in keys] + [keys[-1] & 0xFFFFFFFF]
            want = ref.run(tokens[: len(slots)])
            k, v = self.kv(self.target_runner, slots)
            _close(k, want.k, tolerance, "target K in the tree")
            _close(v, want.v, tolerance, "target V in the tree")
            if ref_head is not None:
                want = ref_head.teacher_forced(tokens if ahead else [*tokens, 0])[:2]
                want_k, want_v = (part[..., : len(slots), :, :] for part in want)
                k, v = self.kv(self.draft_runner, slots)
                _close(k.view(want_k.shape), want_k, tolerance, "draft K in the tree")
                _close(v.view(want_v.shape), want_v, tolerance, "draft V in the tree")

    # ---- disturbance ----

    @torch.inference_mode()
    def poison(self, value: float = float("nan")) -> None:
        """Overwrite the KV of every free slot, and of the padding page, in both models."""
        self.settle()
        padding = np.arange(self.allocator.page_size)
        index = torch.from_numpy(np.concatenate([padding, self.free_slots()]))
        for runner in self.runners():
            runner.token_to_kv_pool.k_buffer[:, index] = value
            runner.token_to_kv_pool.v_buffer[:, index] = value

    @contextlib.contextmanager
    def watch(self, after: Callable[[], None] | None = None, before: Callable[[], None] | None = None):
        """Call `before()` and `after()` around every step of the scheduler."""
        real = self.scheduler.step

        def step(*args, **kwargs):
            if before is not None:
                before()
            result = real(*args, **kwargs)
            if after is not None:
                after()
            return result

        with swapped(self.scheduler, "step", step):
            yield self

    @contextlib.contextmanager
    def spy(self, owner, name: str, see: Callable):
        """Call `see(args, kwargs, result)` after every call of `owner.name` on this instance.

        Calls that only prepare a CUDA graph belong to no step and are not shown.
        """
        real = getattr(owner, name)

        def call(*args, **kwargs):
            result = real(*args, **kwargs)
            if not self.is_capturing:
                see(args, kwargs, result)
            return result

        with swapped(owner, name, call):
            yield

    def check_all(self, ref=None, ref_head=None) -> None:
        """Every invariant that holds between steps."""
        self.settle()
        self.check_owners()
        self.check_lengths()
        if ref is not None:
            self.check_target_kv(ref)
        if ref_head is not None and self.draft_worker is not None:
            self.check_draft_kv(ref_head)


class Operations(TorchDispatchMode):
    """Operations of this thread that launch something: views and uninitialised memory do not."""

    def __init__(self, seen: list[str]):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in str(func):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def swapped(owner, name: str, new):
    """`owner.name` is `new` while open; what the instance had before comes back, in whatever order these
    nest.
    """
    own = vars(owner).get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _close(have: torch.Tensor, want: torch.Tensor, tolerance: float, what: str) -> None:
    """Equal within `tolerance` of the largest value. The message shows the worst element and its indices."""
    __tracebackhide__ = True  # the tensors are not for reading
    assert (what, have.shape) == (what, want.shape)
    off = (have - want).abs().nan_to_num(nan=float("inf"))
    if off.numel() and float(off.max()) > tolerance * max(1.0, float(want.abs().max())):
        at = tuple(map(int, np.unravel_index(int(off.argmax()), off.shape)))
        assert (what, at, round(float(have[at]), 5)) == (what, at, round(float(want[at]), 5))
