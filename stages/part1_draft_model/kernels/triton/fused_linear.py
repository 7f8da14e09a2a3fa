"""Linear layers for few rows, with all that stands around them in the same kernel.

With few rows a layer's matrix product is latency and not bytes, and norms, rotary embedding, residual and
gate would cost a launch each on top. Here a layer is four kernels beside its attention, six with its norms.

Two shapes of kernel. Very few rows multiply on the CUDA cores: one warp holds a weight row or two, so that no
sum crosses a warp and nothing is synchronised. It loads them before it waits for the kernel before it, and so
one kernel's memory latency hides behind another's. More rows use the tensor cores in a deeply pipelined loop
over the inner dimension, behind a norm by itself. `PLANS` says which is used up to how many rows, and where
the library's matrix product takes over.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ..native.fused_linear import linear_float32
from .launch import begin, dependent, row_strided, wait_for_inputs
from .layers import rms_norm, rotary_store, silu_and_mul, store_heads

__all__ = ["linear", "linear_float32", "norm_gate_up", "norm_qkv_rotary_store"]

_PLAIN, _GATE_UP, _QKV = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_MAX_BLOCK_K = 2048
_INTERPRETED_BLOCK_N = 64  # the interpreter runs programs one after another, so there few do more each


class Plan(NamedTuple):
    """How one kernel is laid out: `block_m` rows and `block_n` columns per program."""

    block_m: int
    block_n: int
    block_k: int | None  # None: whole weight rows, on the CUDA cores
    warps: int
    stages: int = 1


# Up to how many rows which plan serves, measured on an H200 with tools/bench/kernels.py; beyond: the library.
PLANS: list[tuple[int, Plan]] = [
    (1, Plan(1, 1, None, 1)),
    (2, Plan(2, 2, None, 1)),
    (4, Plan(4, 2, None, 1)),
    (16, Plan(16, 32, 128, 4, 8)),
    (64, Plan(64, 16, 128, 4, 8)),
    (256, Plan(64, 32, 128, 4, 5)),
]


def plan_for(rows: int, dtype: torch.dtype) -> Plan | None:
    """The plan for so many rows; None where norm, library product and the rest run one after the other."""
    for most, plan in PLANS:
        if rows <= most:
            # float32 has no fast tensor cores; what needs it is a test, and the library is right too.
            return None if dtype == torch.float32 and plan.block_k is not None else plan
    return None


@triton.jit
def _columns(unit, UNITS: tl.constexpr, HALF: tl.constexpr, MODE: tl.constexpr):
    """The weight rows behind a unit of work: its own, or the two that are combined into one result."""
    if MODE == _GATE_UP:
        return unit, unit + UNITS
    elif MODE == _QKV:
        first = unit // HALF * (2 * HALF) + unit % HALF
        return first, first + HALF
    else:
        return unit, unit


@triton.jit
def _finish(
    acc,
    acc2,
    row,
    unit,
    first,
    second,
    inside,
    bias,
    residual,
    out,
    positions,
    angles,
    k_cache,
    v_cache,
    loc,
    residual_stride,
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
        if MODE != _PLAIN:
            acc2 += tl.load(bias + second, mask=unit < UNITS, other=0).to(tl.float32)[None, :]
    if MODE == _QKV:
        head, half = (unit // HALF)[None, :], (unit % HALF)[None, :]
        rows_inside = tl.max(inside.to(tl.int32), 1) > 0
        angle = angles + tl.load(positions + row, mask=rows_inside, other=0)[:, None] * (2 * HALF) + half
        cos = tl.load(angle, mask=inside, other=0)
        sin = tl.load(angle + HALF, mask=inside, other=0)
        turns = head < Q_HEADS + KV_HEADS
        left = tl.where(turns, acc * cos - acc2 * sin, acc)
        right = tl.where(turns, acc2 * cos + acc * sin, acc2)
        queries = out + row[:, None] * (Q_HEADS * HALF * 2)
        slot = tl.load(loc + row, mask=rows_inside, other=0)[:, None] * cache_stride
        D: tl.constexpr = HALF * 2
        store_heads(queries, head, half, left, right, inside, 0, Q_HEADS, D)
        store_heads(k_cache + slot, head, half, left, right, inside, Q_HEADS, KV_HEADS, D)
        store_heads(v_cache + slot, head, half, left, right, inside, Q_HEADS + KV_HEADS, KV_HEADS, D)
    else:
        if MODE == _GATE_UP:
            acc = acc / (1.0 + tl.exp(-acc)) * acc2
        if HAS_RESIDUAL:
            place = residual + row[:, None] * residual_stride + unit[None, :]
            acc += tl.load(place, mask=inside, other=0).to(tl.float32)
        tl.store(out + row[:, None] * UNITS + unit[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weights(weight, row, k, inside, K: tl.constexpr):
    return tl.load(weight + row[:, None] * K + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0)


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
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
    if MODE != _QKV:
        begin(PDL)
    unit = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    unit_inside = unit < UNITS
    first, second = _columns(unit, UNITS, HALF, MODE)
    column = tl.arange(0, BLOCK_K)
    w = _weights(weight, first, column, unit_inside, K)
    w2 = _weights(weight, second, column, unit_inside, K) if MODE != _PLAIN else w
    if HAS_NORM:
        factor = tl.load(norm_weight + column, mask=column < K, other=0).to(tl.float32)
    wait_for_inputs(PDL)
    if MODE == _QKV:  # the attention behind this relies on all before it being done
        begin(PDL)

    row = tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    square = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        k = start + column
        if start > 0:
            w = _weights(weight, first, k, unit_inside, K)
            w2 = _weights(weight, second, k, unit_inside, K) if MODE != _PLAIN else w
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
            if MODE != _PLAIN:
                total = tl.sum(w2.to(tl.float32) * value[None, :], 1)
                acc2 += tl.where(here[:, None], total[None, :], 0.0)
    if HAS_NORM:  # a row's scale is one number, so it may come last
        scale = tl.rsqrt(square / K + eps)[:, None]
        acc, acc2 = acc * scale, acc2 * scale
    row_inside = row < rows
    _finish(
        acc, acc2, row, unit, first, second, row_inside[:, None] & unit_inside[None, :], bias, residual, out,
        positions, angles, k_cache, v_cache, loc, residual_stride, cache_stride, UNITS, Q_HEADS, KV_HEADS,
        HALF, MODE, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _tile_kernel(
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
    if MODE != _QKV:
        begin(PDL)
    unit = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    unit_inside = unit < UNITS
    first, second = _columns(unit, UNITS, HALF, MODE)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_inside = row < rows
    column = tl.arange(0, BLOCK_K)
    wait_for_inputs(PDL)
    if MODE == _QKV:  # the attention behind this relies on all before it being done
        begin(PDL)

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + column
        place = x + row[:, None] * x_stride + k[None, :]
        value = tl.load(place, mask=row_inside[:, None] & (k < K)[None, :], other=0)
        w = _weights(weight, first, k, unit_inside, K)
        acc = tl.dot(value, tl.trans(w), acc, input_precision=PRECISION)
        if MODE != _PLAIN:
            w2 = _weights(weight, second, k, unit_inside, K)
            acc2 = tl.dot(value, tl.trans(w2), acc2, input_precision=PRECISION)
    _finish(
        acc, acc2, row, unit, first, second, row_inside[:, None] & unit_inside[None, :], bias, residual, out,
        positions, angles, k_cache, v_cache, loc, residual_stride, cache_stride, UNITS, Q_HEADS, KV_HEADS,
        HALF, MODE, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


def _launch(
    plan: Plan,
    mode: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    norm: tuple[torch.Tensor | None, float] = (None, 0.0),
    residual: torch.Tensor | None = None,
    rotary: tuple[torch.Tensor, ...] | None = None,
) -> torch.Tensor:
    """Fill `out`: a unit is a result of its own, or in modes other than _PLAIN two weight rows made one."""
    rows, width = x.shape
    norm_weight, eps = norm
    if plan.block_k is None:
        kernel, block_k = _few_rows_kernel, min(triton.next_power_of_2(width), _MAX_BLOCK_K)
        has_norm = norm_weight is not None
        own = {"norm_weight": norm_weight if has_norm else x, "eps": eps, "HAS_NORM": has_norm}
    else:
        kernel, block_k = _tile_kernel, plan.block_k
        if norm_weight is not None:
            # Norming inside the loop would take each tile out of the pipeline to registers and back.
            x = rms_norm(x, norm_weight, eps)
        own = {"STAGES": plan.stages, "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32"}
    positions, angles, k_cache, v_cache, loc = rotary or (x,) * 5
    kv_heads, dim = k_cache.shape[1:] if rotary else (0, 2)
    units = len(weight) if mode == _PLAIN.value else len(weight) // 2
    x = row_strided(x)
    residual = None if residual is None else row_strided(residual)
    block_n = plan.block_n if x.is_cuda else max(plan.block_n, _INTERPRETED_BLOCK_N)
    kernel[(triton.cdiv(units, block_n), triton.cdiv(rows, plan.block_m))](
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        positions,
        angles,
        k_cache,
        v_cache,
        loc,
        rows,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        k_cache.stride(0),
        K=width,
        UNITS=units,
        Q_HEADS=len(weight) // dim - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        MODE=mode,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCK_M=plan.block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=plan.warps,
        **own,
        **dependent(x),
    )
    return out


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the native twin."""
    plan = plan_for(len(x), x.dtype)
    if plan is None:
        if residual is None:
            return F.linear(x, weight, bias)
        return torch.addmm(residual if bias is None else residual + bias, x, weight.t())
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    return _launch(plan, _PLAIN.value, x, weight, bias, out, residual=residual) if len(x) else out


def norm_gate_up(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """See the native twin."""
    plan = plan_for(len(x), x.dtype)
    if plan is None:
        return silu_and_mul(F.linear(rms_norm(x, norm_weight, eps), weight, bias))
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    return _launch(plan, _GATE_UP.value, x, weight, bias, out, (norm_weight, eps)) if len(x) else out


def norm_qkv_rotary_store(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    loc: torch.Tensor,
) -> torch.Tensor:
    """See the native twin."""
    rotary = (positions.contiguous(), cos_sin_cache, k_cache, v_cache, loc.contiguous())
    plan = plan_for(len(x), x.dtype)
    if plan is None:
        normed = x if norm_weight is None else rms_norm(x, norm_weight, eps)
        return rotary_store(F.linear(normed, weight, bias), *rotary)
    kv_heads, dim = k_cache.shape[1:]
    q = torch.empty(len(x), len(weight) // dim - 2 * kv_heads, dim, dtype=x.dtype, device=x.device)
    if not len(x):
        return q
    return _launch(plan, _QKV.value, x, weight, bias, q, (norm_weight, eps), rotary=rotary)
