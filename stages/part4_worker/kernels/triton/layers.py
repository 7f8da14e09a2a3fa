"""RMSNorm with residual, rotary embedding and SiLU-and-mul in Triton, one program per row.

A row of these models fits into registers, so each value is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import row_strided


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    y,
    summed,
    x_stride,
    residual_stride,
    eps,
    HIDDEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    value = tl.load(x + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0).to(tl.float32)
        rounded = value.to(summed.dtype.element_ty)
        tl.store(summed + row * HIDDEN + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    factor = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    tl.store(y + row * HIDDEN + column, (value * scale * factor).to(y.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None):
    """See the native twin."""
    rows, hidden = x.shape
    x = row_strided(x)
    y = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    summed = y if residual is None else torch.empty_like(y)
    second = x if residual is None else row_strided(residual)
    if rows:
        _rms_norm_kernel[(rows,)](
            x,
            second,
            weight,
            y,
            summed,
            x.stride(0),
            second.stride(0),
            eps,
            HIDDEN=hidden,
            HAS_RESIDUAL=residual is not None,
            BLOCK=triton.next_power_of_2(hidden),
            num_warps=4 if hidden <= 4096 else 8,
        )
    return y if residual is None else (y, summed)


@triton.jit
def _rotate_heads(
    x, out, row, stride, cos, sin, half, HEADS: tl.constexpr, D: tl.constexpr, H2: tl.constexpr
):
    """Rotate all heads of one row; cos and sin are [1, D / 2]."""
    head = tl.arange(0, H2)[:, None]
    inside = (head < HEADS) & (half < D // 2)
    source = x + row * stride + head * D + half
    first = tl.load(source, mask=inside, other=0).to(tl.float32)
    second = tl.load(source + D // 2, mask=inside, other=0).to(tl.float32)
    target = out + (row * HEADS + head) * D + half
    tl.store(target, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(target + D // 2, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotary_kernel(
    q,
    k,
    q_out,
    k_out,
    positions,
    cos_sin_cache,
    q_stride,
    k_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    D: tl.constexpr,
    Q2: tl.constexpr,
    K2: tl.constexpr,
    HALF2: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF2)[None, :]
    angles = cos_sin_cache + tl.load(positions + row) * D + half
    cos = tl.load(angles, mask=half < D // 2, other=0)
    sin = tl.load(angles + D // 2, mask=half < D // 2, other=0)
    _rotate_heads(q, q_out, row, q_stride, cos, sin, half, Q_HEADS, D, Q2)
    _rotate_heads(k, k_out, row, k_stride, cos, sin, half, K_HEADS, D, K2)


def apply_rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the native twin."""
    rows, q_heads, dim = q.shape
    k_heads = k.shape[1]
    q, k = row_strided(q), row_strided(k)
    q_out = torch.empty(rows, q_heads, dim, dtype=q.dtype, device=q.device)
    k_out = torch.empty(rows, k_heads, dim, dtype=k.dtype, device=k.device)
    if rows:
        _rotary_kernel[(rows,)](
            q,
            k,
            q_out,
            k_out,
            positions.contiguous(),
            cos_sin_cache,
            q.stride(0),
            k.stride(0),
            Q_HEADS=q_heads,
            K_HEADS=k_heads,
            D=dim,
            Q2=triton.next_power_of_2(q_heads),
            K2=triton.next_power_of_2(k_heads),
            HALF2=triton.next_power_of_2(dim // 2),
        )
    return q_out, k_out


@triton.jit
def _silu_and_mul_kernel(x, y, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
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
        _silu_and_mul_kernel[grid](x, y, x.stride(0), WIDTH=width, BLOCK=block)
    return y
