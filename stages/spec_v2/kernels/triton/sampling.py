"""Inverse-CDF sampling in Triton: one program per row, sums in float64 as in the native twin.

One pass adds up blocks of the vocabulary; the block where the drawn number falls is then read again. A draw
may leave out the tokens of a list of tree rows, which is how sampling verification draws its last token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import row_strided
from .random import USE_SAMPLE, uniform

BLOCK = 2048


@triton.jit
def _weights(probs, token, V: tl.constexpr, candidates, siblings, first, N: tl.constexpr):
    """float64 probabilities of a block of tokens; those of `first` and its later siblings are zero."""
    weight = tl.load(probs + token, mask=token < V, other=0)
    child = first
    left = N - 1
    while (child >= 0) & (left > 0):
        weight = tl.where(token == tl.load(candidates + child), 0.0, weight)
        child = tl.load(siblings + child)
        left -= 1
    return weight.to(tl.float64)


@triton.jit
def _block_sums(
    probs,
    candidates,
    siblings,
    first,
    V: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS2: tl.constexpr,
):
    number = tl.arange(0, BLOCKS2)
    sums = tl.zeros([BLOCKS2], tl.float64)
    for block in range(tl.cdiv(V, BLOCK)):
        token = block * BLOCK + tl.arange(0, BLOCK)
        part = tl.sum(_weights(probs, token, V, candidates, siblings, first, N), 0)
        sums = tl.where(number == block, part, sums)
    return sums


@triton.jit
def _first_above(cdf, weight, target, LENGTH: tl.constexpr):
    """First index of weight > 0 whose cdf exceeds the target, or the last of weight > 0, or 0."""
    number = tl.arange(0, LENGTH)
    hit = tl.min(tl.where((cdf > target) & (weight > 0), number, LENGTH), 0)
    last = tl.max(tl.where(weight > 0, number, 0), 0)
    return tl.where(hit < LENGTH, hit, last)


@triton.jit
def draw(
    probs,
    u,
    candidates,
    siblings,
    first,
    V: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS2: tl.constexpr,
):
    """A token from one row of probabilities. Never one of weight zero, whatever rounding does."""
    sums = _block_sums(probs, candidates, siblings, first, V, N, BLOCK, BLOCKS2)
    if (first >= 0) & (tl.sum(sums, 0) <= 0):
        # Rounding left nothing though the coin said no; then any possible token will do.
        first = first * 0 - 1
        sums = _block_sums(probs, candidates, siblings, first, V, N, BLOCK, BLOCKS2)
    target = u.to(tl.float64) * tl.sum(sums, 0)
    block = _first_above(tl.cumsum(sums, 0), sums, target, BLOCKS2)
    before = tl.sum(tl.where(tl.arange(0, BLOCKS2) < block, sums, 0.0), 0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    weight = _weights(probs, token, V, candidates, siblings, first, N)
    return (block * BLOCK + _first_above(before + tl.cumsum(weight, 0), weight, target, BLOCK)).to(tl.int64)


@triton.jit
def _sample_kernel(
    probs,
    seeds,
    positions,
    out,
    stride,
    V: tl.constexpr,
    USE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS2: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    u = uniform(tl.load(seeds + row), tl.load(positions + row), USE)
    nobody = row * 0 - 1
    tl.store(out + row, draw(probs + row * stride, u, seeds, seeds, nobody, V, 1, BLOCK, BLOCKS2))


def sample_from_probs(
    probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, use: int = USE_SAMPLE
) -> torch.Tensor:
    """See the native twin."""
    rows, vocab = probs.shape
    probs = row_strided(probs)
    out = torch.empty(rows, dtype=torch.int64, device=probs.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocab))
        _sample_kernel[(rows,)](
            probs,
            seeds.contiguous(),
            positions.contiguous(),
            out,
            probs.stride(0),
            V=vocab,
            USE=use,
            BLOCK=block,
            BLOCKS2=triton.next_power_of_2(triton.cdiv(vocab, block)),
            num_warps=8,
        )
    return out
