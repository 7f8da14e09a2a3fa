"""Several tensors in one piece of memory, so that they can be read back in one copy."""

from __future__ import annotations

import math

import torch

_ALIGNMENT = 16  # bytes; Triton compiles a kernel apart for addresses that are no multiple of it


def empty_side_by_side(
    device: torch.device, *kinds: tuple[tuple[int, ...], torch.dtype]
) -> list[torch.Tensor]:
    """Uninitialised contiguous tensors of these shapes and types, one behind the other."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]
    room = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    flat = torch.empty(sum(room), dtype=torch.uint8, device=device).split(room)
    return [
        part[:size].view(dtype).view(shape)
        for part, size, (shape, dtype) in zip(flat, sizes, kinds, strict=True)
    ]
