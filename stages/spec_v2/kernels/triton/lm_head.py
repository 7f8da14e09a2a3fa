"""The LM head with its top-k: logits stay in registers, and only each block's best leave the kernel.

Writing 49,152 logits per row and reading them again to find a few costs more than a decoder layer does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..packed import empty_side_by_side
from .launch import begin, dependent, row_strided, wait_for_inputs
from .topk import NO_KEY, select, sort_keys

_BLOCK_N = 128
_BLOCK_K = 64


@triton.jit(do_not_specialize=["rows"])
def _lm_head_topk_kernel(
    x,
    weight,
    keys,
    maxima,
    sums,
    rows,
    x_stride,
    V: tl.constexpr,
    K: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_inside, row_inside = token < V, row < rows
    column = tl.arange(0, BLOCK_K)
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + column
        place = x + row[:, None] * x_stride + k[None, :]
        value = tl.load(place, mask=row_inside[:, None] & (k < K)[None, :], other=0)
        place = weight + token[:, None].to(tl.int64) * K + k[None, :]
        w = tl.load(place, mask=token_inside[:, None] & (k < K)[None, :], other=0)
        acc = tl.dot(value, tl.trans(w), acc, input_precision=PRECISION)

    logit = tl.where(token_inside[None, :], acc, float("-inf"))
    base = tl.max(logit, 1)
    total = tl.sum(tl.where(token_inside[None, :], tl.exp(logit - base[:, None]), 0.0), 1)
    total += tl.sum(acc * 0.0, 1)  # NaN if any logit is NaN or infinite
    cell = row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(maxima + cell, base, mask=row_inside)
    tl.store(sums + cell, total, mask=row_inside)
    key = sort_keys(logit, token[None, :], token_inside[None, :])
    for rank in tl.static_range(TOPK):
        best = tl.max(key, 1)
        tl.store(keys + cell * TOPK + rank, best, mask=row_inside)
        key = tl.where(key == best[:, None], NO_KEY, key)


def linear_topk(
    x: torch.Tensor,
    weight: torch.Tensor,
    k: int,
    probs: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    hot_token_id: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the native twin."""
    rows, width = x.shape
    vocab = len(weight)
    if probs is None:  # side by side: in greedy decoding they are what the host reads
        ids, probs = empty_side_by_side(x.device, ((rows, k), torch.int64), ((rows, k), torch.float32))
    if rows == 0:
        return probs, ids
    x = row_strided(x)
    exact = x.dtype == torch.float32
    block_m = next((size for size in (16, 32) if rows <= size), 32 if exact else 64)
    block_n = min(_BLOCK_N, max(16, triton.next_power_of_2(vocab)))
    blocks = triton.cdiv(vocab, block_n)
    keys = torch.empty(rows, blocks, k, dtype=torch.int64, device=x.device)
    maxima, sums = torch.empty(2, rows, blocks, dtype=torch.float32, device=x.device)
    _lm_head_topk_kernel[(blocks, triton.cdiv(rows, block_m))](
        x,
        weight,
        keys,
        maxima,
        sums,
        rows,
        x.stride(0),
        V=vocab,
        K=width,
        TOPK=k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=_BLOCK_K,
        STAGES=1 if exact else 4,
        PRECISION="ieee" if exact else "tf32",
        num_warps=4,
        **dependent(x),
    )
    return select(x, keys, probs, ids, blocks, (maxima, sums), hot_token_id)
