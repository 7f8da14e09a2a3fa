"""Attention in plain PyTorch, the reference on any device. Restates torch_native_backend.py of upstream.

It loops over requests, so it plans from lengths on the host: on a GPU that is a read per forward, which
is why it is a reference there and not a way to be fast.
"""

from __future__ import annotations

from typing import Any

from ...kernels import HostMetadata
from ...model_executor.forward_batch_info import ForwardBatch
from .base_backend import AttentionBackend


class TorchNativeAttnBackend(AttentionBackend):
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        lengths = (forward_batch.seq_lens, forward_batch.prefix_lens, forward_batch.q_start_loc)
        forward_batch.attn_metadata = HostMetadata(*(t.tolist() for t in lengths))

    def planned(self, forward_batch: ForwardBatch) -> dict[str, Any]:
        return {"host": forward_batch.attn_metadata}
