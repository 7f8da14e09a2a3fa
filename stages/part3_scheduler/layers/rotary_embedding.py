"""Rotary position embedding with Llama 3's scaling. Restates sglang/srt/layers/rotary_embedding.py."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..configs.model_config import ModelConfig


class RotaryEmbedding(nn.Module):
    """The table of cosines and sines; the projection of queries and keys applies it (layers/linear.py)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        # Float64 until the table is made: at position 8,000 a float32 angle is off by 1e-3.
        inv_freq = config.rope_theta ** -(
            torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        )
        if config.rope_scaling:
            inv_freq = _llama3_scaled(inv_freq, config.rope_scaling)
        # At the context limit a tree's nodes, and rows that pad, stand up to 63 positions beyond it.
        angles = torch.outer(torch.arange(config.context_len + 64, dtype=torch.float64), inv_freq)
        self.register_buffer(
            "cos_sin_cache", torch.cat([angles.cos(), angles.sin()], -1).float(), persistent=False
        )


def _llama3_scaled(inv_freq: torch.Tensor, scaling: dict) -> torch.Tensor:
    """Divide low frequencies by `factor`, keep high ones, and blend between the two."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * (keep + (1 - keep) / scaling["factor"])
