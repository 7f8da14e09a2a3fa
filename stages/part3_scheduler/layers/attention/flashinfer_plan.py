"""Planning with FlashInfer: who works on which piece of which request, decided on the host from its lengths.

A wrapper is planned once per forward and then run by every layer. What is copied to the device lies in pinned
memory, so a plan waits for nothing; and the wrapper is only ever shown host arrays where it looks into them,
so it reads nothing back. Restates the indices updaters of upstream's flashinfer_backend.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# Three kernels: `decode` runs one row per request without tensor cores, the others any number of rows.
DECODE, CAUSAL, MASKED = "decode", "causal", "masked"
PAGE = 1  # slots are addressed one by one, whatever the engine's page size
INT_WORKSPACE = 1 << 20  # of a graph, in bytes: a few words for each piece of work and each row
TALLEST_TILE = 128


def load_flashinfer() -> Any:
    """The library.

    Raises:
        ValueError: it, or something it imports, is not installed.
    """
    try:
        import flashinfer
    except ModuleNotFoundError as error:
        raise ValueError(
            f"attention_backend='flashinfer' needs the package {error.name}, which is not installed; "
            "pip install '.[gpu]' brings it, or use 'triton'."
        ) from error
    return flashinfer


@dataclass
class Plan:
    """What the layers of a forward share. Lengths are those it was planned with."""

    kind: str
    wrapper: Any
    kv_indptr: torch.Tensor  # int32 [bs + 1] on the device
    kv_indices: torch.Tensor  # int32, slots one request behind the other
    custom_mask: torch.Tensor | None  # uint8, see create_custom_mask
    max_kv_len: int


@dataclass
class GraphPlan(Plan):
    """The plan of one graph, made anew in place before each replay."""

    q_len: int
    splits: bool  # requests may be cut into pieces
    qo_indptr: torch.Tensor  # int32 [bs + 1] on the host; a graph's rows never change
    host: torch.Tensor  # int32 [2, bs + 1] pinned: kv_indptr, and where each request's mask begins
    device: torch.Tensor  # its copy, which the wrapper reads
    copied: torch.cuda.Event | None = None


class GraphBuffers:
    """Device memory that all graphs of a backend share: each forward in a graph fills it anew."""

    def __init__(self, planner: Planner, max_bs: int, max_q_len: int, max_kv_len: int):
        device, longest = planner.device, max_bs * max_kv_len
        self.max_kv_len = max_kv_len
        self.workspace = planner.make_workspace(max_bs, max_q_len)
        self.kv_indices = torch.zeros(longest, dtype=torch.int32, device=device)
        self.custom_mask = torch.zeros(
            longest * max_q_len if max_q_len > 1 else 0, dtype=torch.uint8, device=device
        )
        # One graph of a kind is planned and replayed at a time.
        self.int_workspace = {
            kind: torch.zeros(INT_WORKSPACE, dtype=torch.uint8, device=device)
            for kind in (DECODE, CAUSAL, MASKED)
        }


class Planner:
    """Makes and plans the wrappers of one model."""

    def __init__(self, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.flashinfer = load_flashinfer()
        self.q_heads, self.kv_heads, self.head_dim = q_heads, kv_heads, head_dim
        self.dtype, self.device = dtype, device
        self.on_gpu = device.type == "cuda"
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if self.on_gpu else 1
        self.workspace = self.make_workspace(0, 0)
        self._eager: dict[str, Any] = {}
        self._copied: dict[str, torch.cuda.Event | None] = {}

    def eager(self, kind: str, q_lens: np.ndarray, kv_lens: np.ndarray) -> Plan:
        """Plan for one forward; [bs] rows and KV entries of each request."""
        qo_indptr, kv_indptr = self._host(indptr(q_lens)), self._host(indptr(kv_lens))
        rows, total = int(q_lens.sum()), int(kv_lens.sum())
        kv_indices = torch.empty(total, dtype=torch.int32, device=self.device)
        custom_mask = None
        if kind == MASKED:
            mask_bytes = rows // len(q_lens) * total  # with a mask all requests have the same rows
            custom_mask = torch.empty(mask_bytes, dtype=torch.uint8, device=self.device)
        if kind not in self._eager:
            self._eager[kind] = self._make_wrapper(kind, self.workspace)
        # The wrapper writes its plan into pinned memory, from where the last one may still be on its way.
        _wait(self._copied.get(kind))
        self._plan(kind, self._eager[kind], qo_indptr, kv_indptr, kv_indices, custom_mask)
        self._copied[kind] = self._record()
        on_device = kv_indptr.to(self.device, non_blocking=True)
        return Plan(kind, self._eager[kind], on_device, kv_indices, custom_mask, int(kv_lens.max()))

    def graph(self, kind: str, bs: int, q_len: int, buffers: GraphBuffers) -> GraphPlan:
        """A plan for graphs over `bs` requests of `q_len` rows each, first for requests without entries.

        Any lengths do: what a graph remembers of a plan follows from its rows and its batch size.
        """
        host = torch.zeros(2, bs + 1, dtype=torch.int32, pin_memory=self.on_gpu)
        device = torch.zeros(2, bs + 1, dtype=torch.int32, device=self.device)
        last_page_len = torch.ones(bs, dtype=torch.int32, device=self.device)
        mask = buffers.custom_mask if kind == MASKED else None
        if kind == DECODE:
            own = {
                "paged_kv_indptr_buffer": device[0],
                "paged_kv_indices_buffer": buffers.kv_indices,
                "paged_kv_last_page_len_buffer": last_page_len,
            }
        else:
            own = {
                "qo_indptr_buf": torch.zeros(bs + 1, dtype=torch.int32, device=self.device),
                "paged_kv_indptr_buf": device[0],
                "paged_kv_indices_buf": buffers.kv_indices,
                "paged_kv_last_page_len_buf": last_page_len,
                "custom_mask_buf": mask,
                "mask_indptr_buf": None if mask is None else device[1],
            }
        wrapper = self._make_wrapper(kind, buffers.workspace, use_cuda_graph=True, **own)
        wrapper.reset_workspace_buffer(buffers.workspace, buffers.int_workspace[kind])
        qo_indptr = self._host(indptr(np.full(bs, q_len)))
        # It has its buffers: of the arrays it would copy there it is given none.
        nothing = None if mask is None else mask[:0]
        self._plan(kind, wrapper, qo_indptr, host[0], buffers.kv_indices[:0], nothing)
        splits = bs * self.kv_heads < self.processors
        plan = GraphPlan(
            kind, wrapper, device[0], buffers.kv_indices, mask, buffers.max_kv_len, q_len, splits, qo_indptr,
            host, device, self._record(),
        )  # fmt: skip
        self.replan(plan, np.zeros(0))
        return plan

    def replan(self, plan: GraphPlan, kv_lens: np.ndarray) -> None:
        """Plan for the lengths kv_lens, in place; requests that it has none for are padding and get none.

        wrapper.plan() would do. But it finds maxima with Python's max over the elements of a tensor, which
        takes many times as long as planning: upstream goes past it as well (fast_decode_plan). And in a graph
        it takes tiles for one request with nearly all rows, since rows might move from one to another. Here
        they do not: a batch that fills the GPU without cutting requests into pieces always has the same
        pieces, so it is planned as outside of a graph, with tiles that fit.
        """
        _wait(plan.copied)
        host, real = plan.host.numpy(), len(kv_lens)
        np.cumsum(kv_lens, out=host[0, 1 : real + 1])
        host[0, real + 1 :] = host[0, real]
        np.multiply(host[0], plan.q_len, out=host[1])
        plan.device.copy_(plan.host, non_blocking=True)
        wrapper, bs, kv_indptr = plan.wrapper, len(host[0]) - 1, plan.host[0]
        memory = (
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
        )
        heads, dims = (bs, self.q_heads, self.kv_heads, PAGE), (self.head_dim, self.head_dim)
        if plan.kind == DECODE:
            like = torch.empty(0, dtype=self.dtype)
            arguments = (kv_indptr, *heads, True, -1, 0.0, *dims, like, like)
        else:
            lengths = (plan.qo_indptr, kv_indptr, kv_indptr, bs * plan.q_len)
            options = (plan.kind == CAUSAL, -1, -1, not plan.splits, 0)
            arguments = (*lengths, *heads, plan.splits, *dims, *options)
        wrapper._plan_info = wrapper._cached_module.plan(*memory, *arguments)
        plan.copied = self._record(plan.copied)

    def make_workspace(self, max_bs: int, max_q_len: int) -> torch.Tensor:
        """Memory for partial results where a request is split: tile rows × heads × (head_dim + 1) float32.

        In a graph every request may have a tile of its own that is filled in part; without one, work is only
        split while all pieces fit on the GPU at once (two per multiprocessor).
        """
        in_graph = max_bs * (max_q_len * self.q_heads // self.kv_heads + TALLEST_TILE)
        tile_rows = max(in_graph, 2 * self.processors // self.kv_heads * TALLEST_TILE)
        size = tile_rows * self.q_heads * (self.head_dim + 1) * 4 + 256
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def _make_wrapper(self, kind: str, workspace: torch.Tensor, **buffers: Any) -> Any:
        if kind == DECODE:
            return self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", **buffers)
        # fa2 is the one that knows masks; fa3 for the rest would be one more to compile.
        make = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper
        return make(workspace, "NHD", backend="fa2", **buffers)

    def _plan(
        self,
        kind: str,
        wrapper: Any,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        custom_mask: torch.Tensor | None,
    ) -> None:
        last_page_len = self._host(np.ones(len(kv_indptr) - 1))
        shape = (self.q_heads, self.kv_heads, self.head_dim, PAGE)
        more: dict[str, Any] = {"q_data_type": self.dtype, "kv_data_type": self.dtype}
        if kind == DECODE:
            wrapper.plan(kv_indptr, kv_indices, last_page_len, *shape, **more)
        else:
            more |= {"causal": kind == CAUSAL, "packed_custom_mask": custom_mask}
            wrapper.plan(qo_indptr, kv_indptr, kv_indices, last_page_len, *shape, **more)

    def _host(self, values: np.ndarray) -> torch.Tensor:
        """int32, in pinned memory where there is a GPU: from other memory a copy to it would block."""
        tensor = torch.from_numpy(values.astype(np.int32))
        return tensor.pin_memory() if self.on_gpu else tensor

    def _record(self, event: torch.cuda.Event | None = None) -> torch.cuda.Event | None:
        """An event behind the copies made so far."""
        if not self.on_gpu:
            return None
        event = event or torch.cuda.Event()
        event.record()
        return event


def indptr(lens: np.ndarray) -> np.ndarray:
    """Where each of `lens` begins if they are laid one behind the other, and where the last ends."""
    return np.concatenate([[0], np.cumsum(lens)])


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
