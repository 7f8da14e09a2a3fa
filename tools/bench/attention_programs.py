"""Which programs of attention are fastest for how many requests: the evidence behind `_PROGRAMS`.

All layers run as one graph: how much of a program the launch before it hides, and how many programs fit
beside one another, shows in no kernel alone.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from .floor import Bench
from .kernel_layers import DTYPE, MODEL, STAGE, Layers, microseconds

REQUESTS, ROWS_EACH, CONTEXT = (1, 8, 32, 64, 128), (1, 8), 200
PROGRAMS = ((8, 128), (4, 128), (8, 64), (4, 64))  # warps, columns of a tile


class Decoding(Layers):
    """The same for `requests` with CONTEXT tokens in the cache and `rows_each` new ones, a chain, each."""

    def __init__(self, kernels: Any, requests: int, rows_each: int, device: str):
        super().__init__(kernels, requests * rows_each, device)
        length = CONTEXT + rows_each
        slots = 1 + torch.randperm(requests * length, device=device)
        self.table = slots.view(requests, length).int()
        self.loc = self.table[:, CONTEXT:].flatten().long()
        self.positions = torch.arange(CONTEXT, length, device=device).repeat(requests)
        self.angles = torch.rand(length, self.angles.shape[1], device=device)
        shape = (2, len(slots) + 1, *self.caches[0].shape[2:])  # each layer's own: no cache holds them all
        self.caches = [torch.randn(shape, dtype=DTYPE, device=device) for _ in self.weights]
        self.request = torch.arange(requests, device=device)
        self.prefix, self.lens = (torch.full((requests,), n, device=device) for n in (CONTEXT, length))
        self.starts = torch.arange(requests + 1, device=device) * rows_each
        self.rows_each, seen = rows_each, 2 ** torch.arange(1, rows_each + 1, device=device) - 1
        self.mask = seen[:, None].repeat(requests, 1, 1) if rows_each > 1 else None

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        return self.kernels.attention(
            q, *self.caches[layer], self.table, self.request, self.prefix, self.lens, self.starts,
            self.rows_each, q.shape[-1] ** -0.5, 1, self.mask,
        )  # fmt: skip


def measure_attention() -> Iterator[dict[str, Any]]:
    """A result for each batch: the program in use, and the time of a pass with every program, best first."""
    attention = importlib.import_module(f"{STAGE}.kernels.triton.attention")
    kernels = importlib.import_module(f"{STAGE}.kernels").load_kernels("triton")
    bench, in_use = Bench("cuda"), attention._PROGRAMS
    for rows_each in ROWS_EACH:
        for requests in REQUESTS:
            groups = requests * MODEL["num_key_value_heads"]
            used = next(program for most, program in in_use if groups <= most)
            layers, timed = Decoding(kernels, requests, rows_each, "cuda"), {}
            for program in dict.fromkeys((*PROGRAMS, used)):
                attention._PROGRAMS = ((math.inf, program),)
                try:
                    timed[program] = microseconds(layers, bench)
                finally:
                    attention._PROGRAMS = in_use
            yield {
                "requests": requests,
                "rows_each": rows_each,
                "context": CONTEXT,
                "in_use": used,
                "programs_us": sorted((time, program) for program, time in timed.items()),
            }
