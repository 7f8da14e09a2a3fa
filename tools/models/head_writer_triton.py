"""Decode attention of the text writer: one query per slot over that slot's own stretch of a contiguous
cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _decode_kernel(
    q, k_cache, v_cache, out, lengths, scale, slot_stride, token_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    heads = tl.num_programs(1) * GROUP
    length = tl.load(lengths + slot)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    at = (slot * heads + kv_head * GROUP + rows)[:, None] * D + dims[None, :]
    queries = tl.load(q + at, mask=(rows < GROUP)[:, None], other=0.0)
    cells = tl.arange(0, BLOCK)
    base = slot * slot_stride + kv_head * D
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, length, BLOCK):
        inside = start + cells < length
        place = base + (start + cells)[:, None] * token_stride + dims[None, :]
        keys = tl.load(k_cache + place, mask=inside[:, None], other=0.0)
        values = tl.load(v_cache + place, mask=inside[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, -float("inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        fade = tl.exp(best - new)
        probs = tl.exp(scores - new[:, None])
        total = total * fade + tl.sum(probs, 1)
        gathered = gathered * fade[:, None] + tl.dot(probs.to(values.dtype), values, input_precision="ieee")
        best = new
    result = (gathered / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at, result, mask=(rows < GROUP)[:, None])


def decode_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> Tensor:
    """q `[slots, H, D]`, caches `[slots, length, Hk, D]`, lengths `[slots]` ≥ 1 → `[slots, H, D]`. D a power
    of two."""
    slots, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    out = torch.empty_like(q)
    _decode_kernel[(slots, kv_heads)](
        q, k_cache, v_cache, out, lengths, dim**-0.5, k_cache.stride(0), k_cache.stride(1),
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), D=dim, BLOCK=64, num_warps=4,
    )  # fmt: skip
    return out
