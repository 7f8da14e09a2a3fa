"""RMSNorm. Restates sglang/srt/layers/layernorm.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float, kernels: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden] → the same shape."""
        return self.kernels.rms_norm(x, self.weight, self.eps)


def norm_pair(
    input_ids: torch.Tensor,
    embed_tokens: torch.Tensor,
    embed_norm: RMSNorm,
    hidden_states: torch.Tensor,
    hidden_rows: torch.Tensor | None,
    hidden_norm: RMSNorm,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What EAGLE-3's layer reads: the embedding of a token and a hidden state, each normed by itself.

    input_ids [rows]; hidden_states [any, hidden], row hidden_rows[i] for token i. Returns the pairs
    [rows, 2 · hidden] and the states themselves [rows, hidden].
    """
    return embed_norm.kernels.norm_embed_with_hidden(
        input_ids,
        embed_tokens,
        embed_norm.weight,
        hidden_states,
        hidden_rows,
        hidden_norm.weight,
        embed_norm.eps,
    )
