"""The inputs of a CUDA graph: integer arrays that stay where they are, on the host and on the device."""

from __future__ import annotations

import math

import numpy as np
import torch

from .device_io import counts, padded


class PackedBuffer:
    """Integer arrays at fixed addresses on the host and the device: what a CUDA graph reads its inputs from.

    Write to `host`, call `send`, read `device`; both are lists in the order of `shapes`. `send` may be
    recorded in the graph itself: it then reads what the host holds when the graph is replayed.
    """

    def __init__(self, device: torch.device, shapes: list[tuple[int, ...]]):
        sizes = [padded(math.prod(shape)) for shape in shapes]
        self._source = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._target = torch.zeros(sum(sizes), dtype=torch.int64, device=device)

        def parts(packed: torch.Tensor) -> list[torch.Tensor]:
            flat = zip(packed.split(sizes), shapes, strict=True)
            return [t[: math.prod(shape)].view(shape) for t, shape in flat]

        self.host = [t.numpy() for t in parts(self._source)]
        self.device = parts(self._target)

    def fill(self, *arrays: np.ndarray) -> None:
        """Write arrays that may have fewer rows than there is room for; the rest becomes zero."""
        counts["uploads"] += 1
        for place, array in zip(self.host, arrays, strict=True):
            place[: len(array)] = array
            if len(array) < len(place):
                place[len(array) :] = 0

    def no_rows(self) -> list[np.ndarray]:
        """Arrays for `fill` that leave nothing but padding."""
        return [place[:0] for place in self.host]

    def send(self) -> None:
        self._target.copy_(self._source, non_blocking=True)
