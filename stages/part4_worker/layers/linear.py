"""Matrix products: several projections of one input as one product, and logits in float32.

Restates QKVParallelLinear and MergedColumnParallelLinear of sglang/srt/layers/linear.py for one rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class MergedLinear(nn.Module):
    """y = x Wᵀ + b where W stacks several checkpoint matrices, named by `parts`: {name: out_features}."""

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False):
        super().__init__()
        self.parts = parts
        out_features = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name → the rows of this layer's tensors that it fills."""
        views = {}
        for kind in ("weight", "bias"):
            if (tensor := getattr(self, kind)) is None:
                continue
            for name, rows in zip(self.parts, tensor.split(list(self.parts.values())), strict=True):
                views[f"{prefix}{name}.{kind}"] = rows
        return views


def linear_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x Wᵀ summed and returned in float32 [rows, out]: logits rounded to bf16 would tie far too often."""
    if x.dtype == torch.float32:
        return F.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
