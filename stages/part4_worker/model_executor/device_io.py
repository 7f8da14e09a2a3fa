"""The doors between host and device: one packed upload and one packed read for each step.

A step needs a dozen small index arrays on the device and a few small results back. Each transfer
costs tens of microseconds whatever its size, so arrays travel together: `upload` turns many numpy
arrays into views of one device buffer, `download` reads many tensors in one blocking copy. Nothing
else reads from the device but torch_native, the reference, so `counts` tells how often a step waits.
"""

from __future__ import annotations

import numpy as np
import torch

counts = {"uploads": 0, "downloads": 0}


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Copy integer arrays to `device` in one transfer; returns int64 tensors of the same shapes."""
    arrays = [np.ascontiguousarray(a, dtype=np.int64) for a in arrays]
    packed = send(torch.from_numpy(np.concatenate([a.reshape(-1) for a in arrays])), device)
    counts["uploads"] += 1
    flat = packed.split([a.size for a in arrays])
    return [t.view(a.shape) for t, a in zip(flat, arrays, strict=True)]


def send(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy one host tensor of any dtype to `device` without waiting for it; `counts` leaves it out."""
    if torch.device(device).type == "cuda":
        # Pinned memory is what makes the copy asynchronous; from pageable memory it would block.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def download(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Read tensors back in one blocking copy; returns numpy arrays of the same shapes and dtypes.

    bfloat16 has no numpy counterpart: convert to float32 before.
    """
    counts["downloads"] += 1
    packed = torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]).cpu()
    flat = packed.split([t.numel() * t.element_size() for t in tensors])
    # clone(): a view of the packed bytes need not be aligned for a wider dtype.
    return [f.clone().view(t.dtype).view(t.shape).numpy() for f, t in zip(flat, tensors, strict=True)]
