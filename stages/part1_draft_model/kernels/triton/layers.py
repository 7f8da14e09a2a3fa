"""RMSNorm, rotary embedding with the KV store and SiLU-and-mul in Triton, one program per row.

A row of these models fits into registers, so each value is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import begin, dependent, row_strided, wait_for_inputs


@triton.jit
def _rms_norm_kernel(
    x, weight, y, x_stride, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    wait_for_inputs(PDL)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    factor = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    tl.store(y + row * HIDDEN + column, (value * scale * factor).to(y.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See the native twin."""
    rows, hidden = x.shape
    x = row_strided(x)
    y = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    if rows:
        _rms_norm_kernel[(rows,)](
            x,
            weight,
            y,
            x.stride(0),
            eps,
            HIDDEN=hidden,
            BLOCK=triton.next_power_of_2(hidden),
            num_warps=4 if hidden <= 4096 else 8,
            **dependent(x),
        )
    return y


@triton.jit
def _rotary_store_kernel(
    qkv,
    q_out,
    k_cache,
    v_cache,
    positions,
    cos_sin_cache,
    loc,
    qkv_stride,
    cache_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HEADS2: tl.constexpr,
    HALF2: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    begin(PDL)  # only now: the attention behind this relies on all before it being done
    row = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF2)[None, :]
    head = tl.arange(0, HEADS2)[:, None]
    inside = (head < Q_HEADS + 2 * KV_HEADS) & (half < D // 2)
    angles = cos_sin_cache + tl.load(positions + row) * D + half
    cos = tl.load(angles, mask=half < D // 2, other=0)
    sin = tl.load(angles + D // 2, mask=half < D // 2, other=0)
    slot = tl.load(loc + row)
    source = qkv + row * qkv_stride + head * D + half
    first = tl.load(source, mask=inside, other=0).to(tl.float32)
    second = tl.load(source + D // 2, mask=inside, other=0).to(tl.float32)
    turns = head < Q_HEADS + KV_HEADS  # values are stored as they are
    left = tl.where(turns, first * cos - second * sin, first)
    right = tl.where(turns, second * cos + first * sin, second)
    store_heads(q_out + row * Q_HEADS * D, head, half, left, right, inside, 0, Q_HEADS, D)
    row_of_cache = slot * cache_stride
    store_heads(k_cache + row_of_cache, head, half, left, right, inside, Q_HEADS, KV_HEADS, D)
    store_heads(v_cache + row_of_cache, head, half, left, right, inside, Q_HEADS + KV_HEADS, KV_HEADS, D)


@triton.jit
def store_heads(target, head, half, left, right, inside, first_head, HEADS: tl.constexpr, D: tl.constexpr):
    """Store the two halves of those heads that belong to `target`: HEADS of them, from first_head on."""
    mine = inside & (head >= first_head) & (head < first_head + HEADS)
    place = target + (head - first_head) * D + half
    tl.store(place, left.to(target.dtype.element_ty), mask=mine)
    tl.store(place + D // 2, right.to(target.dtype.element_ty), mask=mine)


def rotary_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    loc: torch.Tensor,
) -> torch.Tensor:
    """See the native twin."""
    rows = len(qkv)
    kv_heads, dim = k_cache.shape[1:]
    q_heads = qkv.shape[1] // dim - 2 * kv_heads
    qkv = row_strided(qkv)
    q = torch.empty(rows, q_heads, dim, dtype=qkv.dtype, device=qkv.device)
    if rows:
        _rotary_store_kernel[(rows,)](
            qkv,
            q,
            k_cache,
            v_cache,
            positions.contiguous(),
            cos_sin_cache,
            loc.contiguous(),
            qkv.stride(0),
            k_cache.stride(0),
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            D=dim,
            HEADS2=triton.next_power_of_2(q_heads + 2 * kv_heads),
            HALF2=triton.next_power_of_2(dim // 2),
            **dependent(qkv),
        )
    return q


@triton.jit
def _silu_and_mul_kernel(x, y, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(x + row * stride + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(x + row * stride + WIDTH + column, mask=inside, other=0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + row * WIDTH + column, result.to(y.dtype.element_ty), mask=inside)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See the native twin."""
    rows, width = x.shape[0], x.shape[1] // 2
    x = row_strided(x)
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        grid = (rows, triton.cdiv(width, block))
        _silu_and_mul_kernel[grid](x, y, x.stride(0), WIDTH=width, BLOCK=block, **dependent(x))
    return y
