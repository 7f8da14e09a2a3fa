"""The attention of one layer over cached slots. Restates sglang/srt/layers/radix_attention.py."""

from __future__ import annotations

import torch
from torch import nn

from ..model_executor.forward_batch_info import ForwardBatch


class RadixAttention(nn.Module):
    def __init__(self, head_dim: int, layer_id: int):
        super().__init__()
        self.layer_id = layer_id
        self.scaling = head_dim**-0.5

    def forward(self, q: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """Attend with q [rows, heads, head_dim] over cached slots, this forward's own among them."""
        if forward_batch.forward_mode.is_idle():
            return torch.zeros_like(q)
        return forward_batch.attn_backend.forward(q, self, forward_batch)
