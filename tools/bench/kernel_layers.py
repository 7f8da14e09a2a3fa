"""The layers of the embedded model as kernels alone, with random weights of its shapes, for one graph."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from .floor import Bench, layer_weights

MODEL = {
    "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3,
}  # fmt: skip
DTYPE = torch.bfloat16
STAGE = "stages.part4_worker"


class Layers:
    """Weights and buffers; `run` is one pass through all layers, whose attention gives back its queries."""

    def __init__(self, kernels: Any, rows: int, device: str):
        self.kernels = kernels
        self.weights = layer_weights(MODEL, DTYPE, device)
        self.norm = torch.ones(MODEL["hidden_size"], dtype=DTYPE, device=device)
        dim = MODEL["hidden_size"] // MODEL["num_attention_heads"]
        cache = (2, rows + 1, MODEL["num_key_value_heads"], dim)
        self.caches = [torch.empty(cache, dtype=DTYPE, device=device)] * len(self.weights)
        self.angles = torch.rand(rows + 1, dim, device=device)
        self.loc = self.positions = torch.arange(1, rows + 1, device=device)
        self.x = torch.randn(rows, MODEL["hidden_size"], dtype=DTYPE, device=device)

    def run(self) -> torch.Tensor:
        k, x = self.kernels, self.x
        for layer, (qkv, o, gate_up, down) in enumerate(self.weights):
            q = k.norm_qkv_rotary_store(
                x, self.norm, 1e-5, qkv, None, self.positions, self.angles, *self.caches[layer], self.loc
            )
            x = k.linear(self.attend(layer, q).flatten(1), o, None, x)
            x = k.linear(k.norm_gate_up(x, self.norm, 1e-5, gate_up, None), down, None, x)
        return x

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        return q


def microseconds(layers: Layers, bench: Bench) -> float:
    """Median time of one pass."""
    return statistics.median(bench.seconds(layers.run)) * 1e6
