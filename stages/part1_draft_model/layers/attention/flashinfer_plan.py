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

# Two kernels: `decode` runs one row per request without tensor cores, the other any number of rows.
DECODE, CAUSAL = "decode", "causal"
PAGE = 1  # slots are addressed one by one, whatever the engine's page size
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


class Planner:
    """Makes and plans the wrappers of one model."""

    def __init__(self, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.flashinfer = load_flashinfer()
        self.q_heads, self.kv_heads, self.head_dim = q_heads, kv_heads, head_dim
        self.dtype, self.device = dtype, device
        self.on_gpu = device.type == "cuda"
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if self.on_gpu else 1
        self.workspace = self.make_workspace()
        self._eager: dict[str, Any] = {}
        self._copied: dict[str, torch.cuda.Event | None] = {}

    def eager(self, kind: str, q_lens: np.ndarray, kv_lens: np.ndarray) -> Plan:
        """Plan for one forward; [bs] rows and KV entries of each request."""
        qo_indptr, kv_indptr = self._host(indptr(q_lens)), self._host(indptr(kv_lens))
        kv_indices = torch.empty(int(kv_lens.sum()), dtype=torch.int32, device=self.device)
        if kind not in self._eager:
            self._eager[kind] = self._make_wrapper(kind, self.workspace)
        # The wrapper writes its plan into pinned memory, from where the last one may still be on its way.
        _wait(self._copied.get(kind))
        self._plan(kind, self._eager[kind], qo_indptr, kv_indptr, kv_indices)
        self._copied[kind] = self._record()
        on_device = kv_indptr.to(self.device, non_blocking=True)
        return Plan(kind, self._eager[kind], on_device, kv_indices)

    def make_workspace(self) -> torch.Tensor:
        """Memory for partial results where a request is split: tile rows × heads × (head_dim + 1) float32.

        Work is only split while all pieces fit on the GPU at once (two per multiprocessor).
        """
        tile_rows = 2 * self.processors // self.kv_heads * TALLEST_TILE
        size = tile_rows * self.q_heads * (self.head_dim + 1) * 4 + 256
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def _make_wrapper(self, kind: str, workspace: torch.Tensor) -> Any:
        if kind == DECODE:
            return self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        make = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper
        return make(workspace, "NHD", backend="fa2")

    def _plan(
        self,
        kind: str,
        wrapper: Any,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
    ) -> None:
        last_page_len = self._host(np.ones(len(kv_indptr) - 1))
        shape = (self.q_heads, self.kv_heads, self.head_dim, PAGE)
        more: dict[str, Any] = {"q_data_type": self.dtype, "kv_data_type": self.dtype}
        if kind == DECODE:
            wrapper.plan(kv_indptr, kv_indices, last_page_len, *shape, **more)
        else:
            wrapper.plan(qo_indptr, kv_indptr, kv_indices, last_page_len, *shape, causal=True, **more)

    def _host(self, values: np.ndarray) -> torch.Tensor:
        """int32, in pinned memory where there is a GPU: from other memory a copy to it would block."""
        tensor = torch.from_numpy(values.astype(np.int32))
        return tensor.pin_memory() if self.on_gpu else tensor

    def _record(self) -> torch.cuda.Event | None:
        """An event behind the copies made so far."""
        if not self.on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event


def indptr(lens: np.ndarray) -> np.ndarray:
    """Where each of `lens` begins if they are laid one behind the other, and where the last ends."""
    return np.concatenate([[0], np.cumsum(lens)])


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
