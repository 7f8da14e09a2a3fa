"""Linear layers for few rows, with all that stands around them in the same kernel.

With few rows a layer's matrix product is latency and not bytes, and norms, rotary embedding, residual and
gate would cost a launch each on top. Here a layer is four kernels beside its attention, or six where the
norms stay apart.

There are three ways to multiply. Very few rows use the CUDA cores: one warp holds a weight row or two, so
that no sum crosses a warp and nothing is synchronised. A few more use the tensor cores, with the inner
dimension cut into slices that warps multiply side by side. Both load weights before they wait for the kernel
before them, so that one kernel's memory latency hides behind another's, and both see whole rows, so that they
take the norm along. Still more rows go through a pipelined loop of tiles, behind a norm by itself. `PLANS`
says which way is used up to how many rows, and where the library's matrix product takes over.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton

from ..native.fused_linear import linear_float32
from .fused_linear_kernels import GATE_UP, PLAIN, QKV, few_rows_kernel, sliced_kernel, tile_kernel
from .launch import dependent, row_strided
from .layers import rms_norm, rotary_store, silu_and_mul

__all__ = ["linear", "linear_float32", "norm_gate_up", "norm_qkv_rotary_store"]

_MOST_COLUMNS = 2048  # that a program holds at a time
_INTERPRETED_BLOCK_N = 64  # the interpreter runs programs one after another, so there few do more each


class Plan(NamedTuple):
    """How one kernel is laid out: `block_m` rows and `block_n` columns per program."""

    way: Literal["few_rows", "sliced", "tiles"]
    block_m: int
    block_n: int
    warps: int
    block_k: int = _MOST_COLUMNS  # columns of a weight row, of a slice or of a tile
    stages: int = 1  # of the loop over tiles

    @property
    def takes_norm(self) -> bool:
        return self.way != "tiles"


# Up to how many rows which plan serves, measured on an H200 with tools/bench/kernels.py; beyond: the library.
PLANS: list[tuple[int, Plan]] = [
    (1, Plan("few_rows", 1, 2, 1)),
    (2, Plan("few_rows", 2, 2, 1)),
    (4, Plan("few_rows", 4, 1, 1)),
    (8, Plan("sliced", 8, 16, 4, 256)),
    (16, Plan("tiles", 16, 32, 4, 64, 8)),
    (64, Plan("tiles", 64, 16, 4, 128, 5)),
    (256, Plan("tiles", 64, 32, 4, 64, 8)),
    (512, Plan("tiles", 64, 64, 4, 64, 8)),
]


def plan_for(rows: int, dtype: torch.dtype) -> Plan | None:
    """The plan for so many rows; None where norm, library product and the rest run one after the other."""
    for most, plan in PLANS:
        if rows <= most:
            # float32 has no fast tensor cores; what needs it is a test, and the library is right too.
            return None if dtype == torch.float32 and plan.way != "few_rows" else plan
    return None


_KERNELS = {"few_rows": few_rows_kernel, "sliced": sliced_kernel, "tiles": tile_kernel}


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
    """Fill `out`: a unit is a result of its own, or in modes other than PLAIN two weight rows made one."""
    rows, width = x.shape
    norm_weight, eps = norm
    if norm_weight is not None and not plan.takes_norm:
        # Norming inside the loop would take each tile out of the pipeline to registers and back.
        x, norm_weight = rms_norm(x, norm_weight, eps), None
    block_k = min(triton.next_power_of_2(width), plan.block_k)
    own: dict[str, Any] = {"BLOCK_K": block_k}
    if plan.takes_norm:
        has_norm = norm_weight is not None
        own |= {"norm_weight": norm_weight if has_norm else x, "eps": eps, "HAS_NORM": has_norm}
    if plan.way == "sliced":
        own["SLICES"] = triton.next_power_of_2(triton.cdiv(min(width, _MOST_COLUMNS), block_k))
    if plan.way == "tiles":
        own["STAGES"] = plan.stages
    if plan.way != "few_rows":
        own["PRECISION"] = "ieee" if x.dtype == torch.float32 else "tf32"
    positions, angles, k_cache, v_cache, loc = rotary or (x,) * 5
    kv_heads, dim = k_cache.shape[1:] if rotary else (0, 2)
    units = len(weight) if mode == PLAIN.value else len(weight) // 2
    x = row_strided(x)
    residual = None if residual is None else row_strided(residual)
    block_n = plan.block_n if x.is_cuda else max(plan.block_n, _INTERPRETED_BLOCK_N)
    _KERNELS[plan.way][(triton.cdiv(units, block_n), triton.cdiv(rows, plan.block_m))](
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
    return _launch(plan, PLAIN.value, x, weight, bias, out, residual=residual) if len(x) else out


def norm_gate_up(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """See the native twin."""
    plan = plan_for(len(x), x.dtype)
    if plan is None:
        return silu_and_mul(F.linear(rms_norm(x, norm_weight, eps), weight, bias))
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    return _launch(plan, GATE_UP.value, x, weight, bias, out, (norm_weight, eps)) if len(x) else out


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
    return _launch(plan, QKV.value, x, weight, bias, q, (norm_weight, eps), rotary=rotary)
