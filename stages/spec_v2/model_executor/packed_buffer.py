"""The inputs of a CUDA graph: integer arrays that stay where they are on the device."""

from __future__ import annotations

import math

import numpy as np
import torch

from .device_io import counts, padded


class PackedBuffer:
    """Integer arrays at fixed addresses on the device: what a CUDA graph reads its inputs from.

    `device` is a list in the order of `shapes`, and `host` what was sent there last. On the host two copies
    take turns: a step is launched while the one before may not have read its own yet, but the one before that
    has, for its result has been waited for.
    """

    def __init__(self, device: torch.device, shapes: list[tuple[int, ...]]):
        sizes = [padded(math.prod(shape)) for shape in shapes]
        pins = device.type == "cuda"
        self._sources = [torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=pins) for _ in range(2)]
        self._target = torch.zeros(sum(sizes), dtype=torch.int64, device=device)

        def parts(packed: torch.Tensor) -> list[torch.Tensor]:
            flat = zip(packed.split(sizes), shapes, strict=True)
            return [t[: math.prod(shape)].view(shape) for t, shape in flat]

        self._hosts = [[t.numpy() for t in parts(source)] for source in self._sources]
        self.host = self._hosts[0]
        self.device = parts(self._target)

    def send(self, *arrays: np.ndarray) -> None:
        """Write arrays that may have fewer rows than there is room for; the rest becomes zero."""
        counts["uploads"] += 1
        self._sources.reverse()
        self._hosts.reverse()
        self.host = self._hosts[0]
        for place, array in zip(self.host, arrays, strict=True):
            place[: len(array)] = array
            if len(array) < len(place):
                place[len(array) :] = 0
        self._target.copy_(self._sources[0], non_blocking=True)

    def no_rows(self) -> list[np.ndarray]:
        """Arrays for `send` that leave nothing but padding."""
        return [place[:0] for place in self.host]
