"""What launches need: inputs whose rows are contiguous inside, and kernels that start before they may.

Kernels take the distance between rows as an argument, so that a view of a fused projection needs no copy.

Programmatic dependent launch (Hopper and newer): a kernel that calls `begin` lets the next one start while it
still runs, and must call `wait_for_inputs` before it touches anything but weights: until then nothing that
any earlier kernel of the chain writes may be there. What the next kernel does before that (being launched,
loading weights) costs nothing. Elsewhere both are nothing.

Whoever has waited for one kernel has waited for all before it, since that one waited too: of every kernel at
least one program has to, and those that have nothing to do may leave before. A kernel that begins only after
it has waited promises the next one more: what is older than itself may be read without waiting.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def _has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent(x: torch.Tensor) -> dict[str, bool]:
    """Launch options of a kernel that calls `begin(PDL)` and `wait_for_inputs(PDL)`."""
    return {"PDL": True, "launch_pdl": True} if _has_dependent_launch(x.device) else {"PDL": False}


@triton.jit
def begin(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


def row_strided(x: torch.Tensor) -> torch.Tensor:
    """x itself if everything behind its first dimension is contiguous, else a contiguous copy."""
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return x.contiguous()
        expected *= size
    return x
