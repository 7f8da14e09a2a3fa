"""Linear layers, each with what is computed together with it.

Restates QKVParallelLinear and MergedColumnParallelLinear of sglang/srt/layers/linear.py. Norms, rotary
embedding, gate and residual are arguments of the layer beside them, because a kernel that does all of it at
once is what makes a step with few rows fast; the kernel set decides when.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .layernorm import RMSNorm
from .rotary_embedding import RotaryEmbedding


class MergedLinear(nn.Module):
    """y = x Wᵀ + b where W stacks several checkpoint matrices, named by `parts`: {name: out_features}."""

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool, kernels: Any):
        super().__init__()
        self.kernels = kernels
        self.parts = parts
        out_features = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, in] → [rows, out], plus `residual` of that shape."""
        return self.kernels.linear(x, self.weight, self.bias, residual)

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name → the rows of this layer's tensors that it fills."""
        views = {}
        for kind in ("weight", "bias"):
            if (tensor := getattr(self, kind)) is None:
                continue
            for name, rows in zip(self.parts, tensor.split(list(self.parts.values())), strict=True):
                views[f"{prefix}{name}.{kind}"] = rows
        return views


class GateUpLinear(MergedLinear):
    """silu(gate) · up of the normed input."""

    def forward(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """x [rows, hidden] → [rows, inner]."""
        return self.kernels.norm_gate_up(x, norm.weight, norm.eps, self.weight, self.bias)


class QKVLinear(MergedLinear):
    """Queries, keys and values of the normed input, rotated; keys and values go to the KV pool."""

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None,
        rotary_emb: RotaryEmbedding,
        positions: torch.Tensor,
        kv_buffer: tuple[torch.Tensor, torch.Tensor],
        out_cache_loc: torch.Tensor,
    ) -> torch.Tensor:
        """x [rows, hidden] → queries [rows, heads, D]; kv_buffer is K and V [slots, kv_heads, D]."""
        return self.kernels.norm_qkv_rotary_store(
            x,
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            self.weight,
            self.bias,
            positions,
            rotary_emb.cos_sin_cache,
            *kv_buffer,
            out_cache_loc,
        )


class FusedInputLinear(MergedLinear):
    """W [embedding of a token, a hidden state]: the two things an EAGLE head reads, made one."""

    def forward(
        self,
        input_ids: torch.Tensor,
        embed_tokens: torch.Tensor,
        hidden_states: torch.Tensor,
        hidden_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """input_ids [rows] → [rows, hidden]; hidden_states [any, hidden], row hidden_rows[i] for token i."""
        fused = self.kernels.embed_with_hidden(input_ids, embed_tokens, hidden_states, hidden_rows)
        return super().forward(fused)
