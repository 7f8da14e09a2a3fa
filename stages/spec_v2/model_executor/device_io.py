"""The doors between host and device: one packed upload and one packed read for each step.

A step needs a dozen small index arrays on the device and a few small results back. Each transfer
costs tens of microseconds whatever its size, so arrays travel together: `upload` turns many numpy
arrays into views of one device buffer, `Readback` brings many tensors back in one copy. Nothing else
reads from the device but torch_native, the reference, so `counts` tells how often a step waits.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch

counts = {"uploads": 0, "downloads": 0}

_MAX_GAP = 16  # bytes between two tensors that are copied as one stretch


def padded(count: int) -> int:
    """Room for `count` int64: kernels are compiled apart for addresses that are no multiple of 16 bytes."""
    return count + count % 2


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Copy integer arrays to `device` in one transfer; returns int64 tensors of the same shapes."""
    arrays = [np.asarray(a) for a in arrays]
    sizes = [padded(a.size) for a in arrays]
    packed, start = np.zeros(sum(sizes), dtype=np.int64), 0
    for array, size in zip(arrays, sizes, strict=True):
        packed[start : start + array.size] = array.reshape(-1)
        start += size
    counts["uploads"] += 1
    flat = send(torch.from_numpy(packed), device).split(sizes)
    return [t[: a.size].view(a.shape) for t, a in zip(flat, arrays, strict=True)]


def send(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy one host tensor of any dtype to `device` without waiting for it; `counts` leaves it out."""
    if torch.device(device).type == "cuda":
        # Pinned memory is what makes the copy asynchronous; from pageable memory it would block.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


class Readback:
    """Tensors on their way to the host in one copy, while the device goes on working.

    `copy` starts it and `wait` ends it. One object may be used again and again for the same shapes.
    """

    def __init__(self) -> None:
        self._like: list[_Part] = []
        self._host: torch.Tensor | None = None
        self._arrays: list[np.ndarray] = []  # what `_host` holds
        self._event: torch.cuda.Event | None = None  # None on a CPU, where a copy is done at once

    def copy(self, packed: Packed) -> None:
        """bfloat16 has no numpy counterpart: convert to float32 before."""
        memory, like = packed
        if like != self._like:
            self._make_room(memory, like)
        self._host.copy_(memory, non_blocking=True)
        self.launched()

    def _make_room(self, packed: torch.Tensor, like: list[_Part]) -> None:
        self._like = like
        self._host = torch.empty_like(packed, device="cpu", pin_memory=packed.is_cuda)
        self._event = torch.cuda.Event() if packed.is_cuda else None
        # Made here and not in `wait`, where a call of torch for each tensor would cost more than the copy.
        # numpy's views, unlike torch's, need not be aligned for a wider dtype.
        raw = self._host.numpy()
        self._arrays = [
            np.ndarray(part.shape, torch.empty(0, dtype=part.dtype).numpy().dtype, raw, part.start)
            for part in like
        ]

    def launched(self) -> None:
        """Mark where on the device's stream the copy is done."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> list[np.ndarray]:
        """The tensors as numpy arrays of the same shapes and dtypes; blocks until they are here."""
        counts["downloads"] += 1
        if self._event is not None:
            self._event.synchronize()
        return [array.copy() for array in self._arrays]  # the next `copy` overwrites what is there


class Packed(NamedTuple):
    """Tensors in one piece of memory."""

    memory: torch.Tensor  # uint8
    parts: list[_Part]


class _Part(NamedTuple):
    """A tensor in a copy of several: its first byte, and what it is."""

    start: int
    dtype: torch.dtype
    shape: torch.Size


def pack(*tensors: torch.Tensor) -> Packed:
    """All of `tensors` in one piece; may be recorded.

    Those that lie side by side in memory already (kernels/packed.py) are not gathered first.
    """
    return Packed(*(_stretch(tensors) or _gathered(tensors)))


def _gathered(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, list[_Part]]:
    """All bytes in a new tensor, and where in it each of `tensors` is."""
    packed = torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors])
    starts = itertools.accumulate((t.nbytes for t in tensors), initial=0)
    return packed, [_Part(start, t.dtype, t.shape) for start, t in zip(starts, tensors, strict=False)]


def _stretch(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, list[_Part]] | None:
    """The same without a kernel, if `tensors` lie in one piece of memory with hardly anything in between."""
    memory = tensors[0].untyped_storage()
    if any(t.untyped_storage().data_ptr() != memory.data_ptr() or not t.is_contiguous() for t in tensors):
        return None
    starts = [t.data_ptr() - memory.data_ptr() for t in tensors]
    first, last = min(starts), max(start + t.nbytes for start, t in zip(starts, tensors, strict=True))
    if last - first > sum(t.nbytes + _MAX_GAP for t in tensors):
        return None
    whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
    parts = [_Part(start - first, t.dtype, t.shape) for start, t in zip(starts, tensors, strict=True)]
    return whole[first:last], parts


def download(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Read tensors back in one blocking copy."""
    readback = Readback()
    readback.copy(pack(*tensors))
    return readback.wait()
