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
