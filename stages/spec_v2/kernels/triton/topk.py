"""The largest entries of a row in Triton, ties to the lowest index.

A long row is cut into blocks, so that a batch of one still keeps many programs busy: each block names its k
largest, and a second kernel chooses among those. Value and index are packed into one integer key, as in the
native twin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import begin, dependent, row_strided, wait_for_inputs

_BLOCK = 2048
NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def sort_keys(x, index, inside):
    """int64 keys that sort as (value, then lower index first) does."""
    value = tl.where(x == 0, 0.0, x)  # -0.0 is equal to 0.0
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - index.to(tl.int64))
    return tl.where(inside, key, NO_KEY)


@triton.jit
def index_of_key(key):
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def value_of_key(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _block_kernel(x, keys, stride, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    inside = index < N
    value = tl.load(x + row * stride + index, mask=inside, other=float("-inf")).to(tl.float32)
    cell = row * tl.num_programs(1) + block
    key = sort_keys(value, index, inside)
    for rank in range(K):
        best = tl.max(key, 0)
        tl.store(keys + cell * K + rank, best)
        key = tl.where(key == best, NO_KEY, key)


@triton.jit
def _select_kernel(
    x,
    keys,
    maxima,
    sums,
    values,
    indices,
    names,
    stride,
    COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    HAS_NAMES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS2: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose K of COUNT entries: of x itself if BLOCKS is 0, else of what the blocks have named."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < COUNT
    begin(PDL)
    wait_for_inputs(PDL)
    if BLOCKS == 0:
        x_value = tl.load(x + row * stride + index, mask=inside, other=float("-inf")).to(tl.float32)
        key = sort_keys(x_value, index, inside)
    else:
        key = tl.load(keys + row * COUNT + index, mask=inside, other=NO_KEY)
    if SOFTMAX:
        base = value_of_key(tl.max(key, 0))
        block = tl.arange(0, BLOCKS2)
        there = block < BLOCKS
        part = tl.load(sums + row * BLOCKS + block, mask=there, other=0)
        peak = tl.load(maxima + row * BLOCKS + block, mask=there, other=float("-inf"))
        total = tl.sum(part * tl.exp(peak - base), 0)
    for rank in range(K):
        best = tl.max(key, 0)
        value = value_of_key(best)
        if SOFTMAX:
            value = tl.exp(value - base) / total
        tl.store(values + row * K + rank, value.to(values.dtype.element_ty))
        found = index_of_key(best)
        if HAS_NAMES:
            found = tl.load(names + found)
        tl.store(indices + row * K + rank, found)
        key = tl.where(key == best, NO_KEY, key)


def select(
    x: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    blocks: int,
    softmax: tuple[torch.Tensor, torch.Tensor] | None = None,
    names: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill values and indices [rows, k] from keys [rows, blocks, k], or from x [rows, n] if blocks is 0.

    With `softmax`, the maximum and the sum of exponentials of each block [rows, blocks], values become
    probabilities. With `names` [n], `indices` gets the names of what is chosen.
    """
    rows, k = indices.shape
    count = blocks * k or x.shape[1]
    maxima, sums = softmax or (keys, keys)
    _select_kernel[(rows,)](
        x,
        keys,
        maxima,
        sums,
        values,
        indices,
        indices if names is None else names,
        x.stride(0),
        COUNT=count,
        BLOCKS=blocks,
        K=k,
        SOFTMAX=softmax is not None,
        HAS_NAMES=names is not None,
        BLOCK=triton.next_power_of_2(count),
        BLOCKS2=triton.next_power_of_2(max(blocks, 1)),
        num_warps=1 if count <= 64 else 4,
        **dependent(x),
    )
    return values, indices


def top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See the native twin."""
    rows, n = x.shape
    x = row_strided(x)
    values = torch.empty(rows, k, dtype=x.dtype, device=x.device)
    indices = torch.empty(rows, k, dtype=torch.int64, device=x.device)
    if rows == 0:
        return values, indices
    keys, blocks = indices, 0
    if n > _BLOCK:
        blocks = triton.cdiv(n, _BLOCK)
        keys = torch.empty(rows, blocks, k, dtype=torch.int64, device=x.device)
        _block_kernel[(rows, blocks)](x, keys, x.stride(0), N=n, K=k, BLOCK=_BLOCK, num_warps=8)
    return select(x, keys, values, indices, blocks)


def argmax(x: torch.Tensor) -> torch.Tensor:
    """See the native twin."""
    return top_k(x, 1)[1].squeeze(-1)
