"""The kernels behind `fused_linear`: what they multiply differs, what they do before and after is one.

A unit of work is one result, from one weight row or from two that are combined: gate and up, or the two
halves of a head that the rotary embedding turns into each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import begin, wait_for_inputs
from .layers import store_heads

PLAIN, GATE_UP, QKV = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _columns(unit, UNITS: tl.constexpr, HALF: tl.constexpr, MODE: tl.constexpr):
    """The weight rows behind a unit of work: its own, or the two that are combined into one result."""
    if MODE == GATE_UP:
        return unit, unit + UNITS
    elif MODE == QKV:
        first = unit // HALF * (2 * HALF) + unit % HALF
        return first, first + HALF
    else:
        return unit, unit


@triton.jit
def _companions(
    row,
    unit,
    inside,
    residual,
    positions,
    angles,
    loc,
    residual_stride,
    HALF: tl.constexpr,
    MODE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """What sums [rows, units] are finished with: cosines, sines and slots, or the residual.

    It is asked for before the sums are made, so that its way from memory is not one more wait behind them.
    """
    if MODE == QKV:
        rows_inside = tl.max(inside.to(tl.int32), 1) > 0
        slot = tl.load(loc + row, mask=rows_inside, other=0)
        angle = angles + tl.load(positions + row, mask=rows_inside, other=0)[:, None] * (2 * HALF)
        angle += (unit % HALF)[None, :]
        return tl.load(angle, mask=inside, other=0), tl.load(angle + HALF, mask=inside, other=0), slot
    elif HAS_RESIDUAL:
        value = tl.load(residual + row[:, None] * residual_stride + unit[None, :], mask=inside, other=0)
        return value, value, row
    else:
        return row, row, row


@triton.jit
def _finish(
    acc,
    acc2,
    row,
    unit,
    first,
    second,
    inside,
    companions,
    bias,
    out,
    k_cache,
    v_cache,
    cache_stride,
    UNITS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    MODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """What becomes of sums [rows, units]: `inside` says which of them are real."""
    if HAS_BIAS:
        acc += tl.load(bias + first, mask=unit < UNITS, other=0).to(tl.float32)[None, :]
        if MODE != PLAIN:
            acc2 += tl.load(bias + second, mask=unit < UNITS, other=0).to(tl.float32)[None, :]
    if MODE == QKV:
        head, half = (unit // HALF)[None, :], (unit % HALF)[None, :]
        cos, sin, slot = companions
        turns = head < Q_HEADS + KV_HEADS
        left = tl.where(turns, acc * cos - acc2 * sin, acc)
        right = tl.where(turns, acc2 * cos + acc * sin, acc2)
        queries = out + row[:, None] * (Q_HEADS * HALF * 2)
        slot = slot[:, None] * cache_stride
        D: tl.constexpr = HALF * 2
        store_heads(queries, head, half, left, right, inside, 0, Q_HEADS, D)
        store_heads(k_cache + slot, head, half, left, right, inside, Q_HEADS, KV_HEADS, D)
        store_heads(v_cache + slot, head, half, left, right, inside, Q_HEADS + KV_HEADS, KV_HEADS, D)
    else:
        if MODE == GATE_UP:
            acc = acc / (1.0 + tl.exp(-acc)) * acc2
        if HAS_RESIDUAL:
            acc += companions[0].to(tl.float32)
        tl.store(out + row[:, None] * UNITS + unit[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weights(weight, row, k, inside, K: tl.constexpr):
    return tl.load(weight + row[:, None] * K + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0)


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    positions,
    angles,
    k_cache,
    v_cache,
    loc,
    rows,
    x_stride,
    residual_stride,
    cache_stride,
    norm_weight,
    eps,
    K: tl.constexpr,
    UNITS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    MODE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Very few rows: the CUDA cores multiply, each warp with a weight row or two of its own."""
    if MODE != QKV:
        begin(PDL)
    unit = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    unit_inside = unit < UNITS
    first, second = _columns(unit, UNITS, HALF, MODE)
    column = tl.arange(0, BLOCK_K)
    w = _weights(weight, first, column, unit_inside, K)
    w2 = _weights(weight, second, column, unit_inside, K) if MODE != PLAIN else w
    if HAS_NORM:
        factor = tl.load(norm_weight + column, mask=column < K, other=0).to(tl.float32)
    wait_for_inputs(PDL)
    if MODE == QKV:  # the attention behind this relies on all before it being done
        begin(PDL)

    row = tl.arange(0, BLOCK_M)
    row_inside = row < rows
    inside = row_inside[:, None] & unit_inside[None, :]
    companions = _companions(
        row, unit, inside, residual, positions, angles, loc, residual_stride, HALF, MODE, HAS_RESIDUAL
    )
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    square = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        k = start + column
        if start > 0:
            w = _weights(weight, first, k, unit_inside, K)
            w2 = _weights(weight, second, k, unit_inside, K) if MODE != PLAIN else w
            if HAS_NORM:
                factor = tl.load(norm_weight + k, mask=k < K, other=0).to(tl.float32)
        for m in tl.static_range(BLOCK_M):
            here = row == m
            value = tl.load(x + m * x_stride + k, mask=(k < K) & (m < rows), other=0).to(tl.float32)
            if HAS_NORM:
                square += tl.where(here, tl.sum(value * value, 0), 0.0)
                value = value * factor
            total = tl.sum(w.to(tl.float32) * value[None, :], 1)
            acc += tl.where(here[:, None], total[None, :], 0.0)
            if MODE != PLAIN:
                total = tl.sum(w2.to(tl.float32) * value[None, :], 1)
                acc2 += tl.where(here[:, None], total[None, :], 0.0)
    if HAS_NORM:  # a row's scale is one number, so it may come last
        scale = tl.rsqrt(square / K + eps)[:, None]
        acc, acc2 = acc * scale, acc2 * scale
    _finish(
        acc, acc2, row, unit, first, second, inside, companions, bias, out, k_cache, v_cache, cache_stride,
        UNITS, Q_HEADS, KV_HEADS, HALF, MODE, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


@triton.jit
def _slices(weight, row, k, inside, K: tl.constexpr):
    """[slices, rows, columns of a slice] of a weight."""
    place = weight + row[None, :, None] * K + k[:, None, :]
    return tl.load(place, mask=inside[None, :, None] & (k < K)[:, None, :], other=0)


@triton.jit(do_not_specialize=["rows"])
def sliced_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    positions,
    angles,
    k_cache,
    v_cache,
    loc,
    rows,
    x_stride,
    residual_stride,
    cache_stride,
    norm_weight,
    eps,
    K: tl.constexpr,
    UNITS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    MODE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Few rows: the inner dimension is cut into slices, which warps multiply side by side on tensor cores.

    Weight rows take the long side of a tensor core's tile and the rows of x its short side, which is 8.
    """
    if MODE != QKV:
        begin(PDL)
    unit = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    unit_inside = unit < UNITS
    first, second = _columns(unit, UNITS, HALF, MODE)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_inside = row < rows
    column = tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    w = _slices(weight, first, column, unit_inside, K)
    w2 = _slices(weight, second, column, unit_inside, K) if MODE != PLAIN else w
    if HAS_NORM:
        factor = tl.load(norm_weight + column, mask=column < K, other=0)
    wait_for_inputs(PDL)
    if MODE == QKV:  # the attention behind this relies on all before it being done
        begin(PDL)

    inside = row_inside[:, None] & unit_inside[None, :]
    companions = _companions(
        row, unit, inside, residual, positions, angles, loc, residual_stride, HALF, MODE, HAS_RESIDUAL
    )
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    square = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.static_range(0, K, SLICES * BLOCK_K):
        k = start + column
        if start > 0:
            w = _slices(weight, first, k, unit_inside, K)
            w2 = _slices(weight, second, k, unit_inside, K) if MODE != PLAIN else w
            if HAS_NORM:
                factor = tl.load(norm_weight + k, mask=k < K, other=0)
        place = x + row[None, :, None] * x_stride + k[:, None, :]
        value = tl.load(place, mask=row_inside[None, :, None] & (k < K)[:, None, :], other=0)
        if HAS_NORM:
            wide = value.to(tl.float32)
            square += tl.sum(tl.sum(wide * wide, 2), 0)
            value = (wide * factor.to(tl.float32)[:, None, :]).to(value.dtype)
        value = tl.permute(value, (0, 2, 1))
        acc += tl.trans(tl.sum(tl.dot(w, value, input_precision=PRECISION), 0))
        if MODE != PLAIN:
            acc2 += tl.trans(tl.sum(tl.dot(w2, value, input_precision=PRECISION), 0))
    if HAS_NORM:  # a row's scale is one number, so it may come last
        scale = tl.rsqrt(square / K + eps)[:, None]
        acc, acc2 = acc * scale, acc2 * scale
    _finish(
        acc, acc2, row, unit, first, second, inside, companions, bias, out, k_cache, v_cache, cache_stride,
        UNITS, Q_HEADS, KV_HEADS, HALF, MODE, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def tile_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    positions,
    angles,
    k_cache,
    v_cache,
    loc,
    rows,
    x_stride,
    residual_stride,
    cache_stride,
    K: tl.constexpr,
    UNITS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    MODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """More rows: tiles on tensor cores, in a deeply pipelined loop over the inner dimension. No norm."""
    if MODE != QKV:
        begin(PDL)
    unit = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    unit_inside = unit < UNITS
    first, second = _columns(unit, UNITS, HALF, MODE)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_inside = row < rows
    column = tl.arange(0, BLOCK_K)
    wait_for_inputs(PDL)
    if MODE == QKV:  # the attention behind this relies on all before it being done
        begin(PDL)

    inside = row_inside[:, None] & unit_inside[None, :]
    companions = _companions(
        row, unit, inside, residual, positions, angles, loc, residual_stride, HALF, MODE, HAS_RESIDUAL
    )
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + column
        place = x + row[:, None] * x_stride + k[None, :]
        value = tl.load(place, mask=row_inside[:, None] & (k < K)[None, :], other=0)
        w = _weights(weight, first, k, unit_inside, K)
        acc = tl.dot(value, tl.trans(w), acc, input_precision=PRECISION)
        if MODE != PLAIN:
            w2 = _weights(weight, second, k, unit_inside, K)
            acc2 = tl.dot(value, tl.trans(w2), acc2, input_precision=PRECISION)
    _finish(
        acc, acc2, row, unit, first, second, inside, companions, bias, out, k_cache, v_cache, cache_stride,
        UNITS, Q_HEADS, KV_HEADS, HALF, MODE, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
