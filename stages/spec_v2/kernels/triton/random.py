"""Philox4x32-10 in Triton, bit for bit the numbers of the native twin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..native.random import USE_ACCEPT, USE_DRAFT, USE_SAMPLE

__all__ = ["USE_ACCEPT", "USE_DRAFT", "USE_SAMPLE", "philox_uniform", "uniform"]


@triton.jit
def uniform(seed, position, USE: tl.constexpr):
    """float32 in [0, 1) from an int64 seed and an int64 output position, scalars or blocks."""
    low: tl.constexpr = 0xFFFFFFFF
    c0 = (position & low).to(tl.uint64)
    c1 = ((position >> 32) & low).to(tl.uint64)
    c2 = tl.zeros_like(c0) + USE
    c3 = tl.zeros_like(c0)
    k0 = (seed & low).to(tl.uint64)
    k1 = ((seed >> 32) & low).to(tl.uint64)
    for _ in tl.static_range(10):
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0 = (p1 >> 32) ^ c1 ^ k0
        c1 = p1 & low
        c2 = (p0 >> 32) ^ c3 ^ k1
        c3 = p0 & low
        k0 = (k0 + 0x9E3779B9) & low
        k1 = (k1 + 0xBB67AE85) & low
    return (c0 >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24


@triton.jit(do_not_specialize=["count"])
def _philox_kernel(seeds, positions, out, count, USE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    seed = tl.load(seeds + row, mask=inside, other=0)
    position = tl.load(positions + row, mask=inside, other=0)
    tl.store(out + row, uniform(seed, position, USE), mask=inside)


def philox_uniform(seeds: torch.Tensor, positions: torch.Tensor, use: int) -> torch.Tensor:
    """See the native twin."""
    seeds, positions = torch.broadcast_tensors(seeds, positions)
    seeds, positions = seeds.contiguous(), positions.contiguous()
    out = torch.empty(seeds.shape, dtype=torch.float32, device=seeds.device)
    count = seeds.numel()
    if count:
        _philox_kernel[(triton.cdiv(count, 128),)](seeds, positions, out, count, USE=use, BLOCK=128)
    return out
