"""Where tokens live: a table of slots per request, and the KV tensors that slots name.

`ReqToTokenPool` maps (request row, position) to a slot; the draft model shares the target's table.
`MHATokenToKVPool` holds the K and V of one model; slot s names a row in the target's pool and in the
draft's alike. Restates sglang/srt/mem_cache/memory_pool.py.
"""

from __future__ import annotations

import numpy as np
import torch

PADDING_SLOT = 0  # rows that pad a batch write their KV here; it is never handed out


class ReqToTokenPool:
    """Slots of every running request: `req_to_token` [rows, width] int32, on the device and mirrored here.

    The host mirror is what frees, caches and retracts work from, so none of them reads the device.
    Row 0 belongs to padded rows of a batch.
    """

    def __init__(self, size: int, width: int, device: torch.device):
        self.size = size
        self.req_to_token = torch.zeros((size + 1, width), dtype=torch.int32, device=device)
        self.req_to_token_host = np.zeros((size + 1, width), dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        self.free_slots = list(range(self.size, 0, -1))

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, need: int) -> list[int] | None:
        if need > len(self.free_slots):
            return None
        return [self.free_slots.pop() for _ in range(need)]

    def free(self, index: int) -> None:
        if index in self.free_slots:
            raise RuntimeError(f"request row {index} is freed twice")
        self.free_slots.append(index)


class MHATokenToKVPool:
    """K and V of one model: `k_buffer` and `v_buffer` [layers, slots, kv_heads, head_dim]."""

    def __init__(
        self,
        slots: int,
        layer_num: int,
        head_num: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = (layer_num, slots, head_num, head_dim)
        # Empty, not zero: nothing may depend on what an unwritten slot holds.
        self.k_buffer = torch.empty(shape, dtype=dtype, device=device)
        self.v_buffer = torch.empty(shape, dtype=dtype, device=device)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k_buffer[layer_id], self.v_buffer[layer_id]

    @staticmethod
    def bytes_per_token(layer_num: int, head_num: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * layer_num * head_num * head_dim * dtype.itemsize
