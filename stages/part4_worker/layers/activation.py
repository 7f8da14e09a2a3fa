"""SwiGLU's gate. Restates SiluAndMul of sglang/srt/layers/activation.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class SiluAndMul(nn.Module):
    def __init__(self, kernels: Any):
        super().__init__()
        self.kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, 2m] → silu(first half) · second half, [rows, m]."""
        return self.kernels.silu_and_mul(x)
