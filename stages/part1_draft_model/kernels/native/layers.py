"""Row-wise layer arithmetic in plain PyTorch: RMSNorm, rotary embedding with the KV store, SiLU-and-mul.

Restates what sgl-kernel's rmsnorm, apply_rope and silu_and_mul compute, and set_kv_buffer of upstream's
mem_cache/memory_pool.py. Sums and products are taken in float32 whatever the input type.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension.

    Args:
        x: [rows, hidden].
        weight: [hidden].
        eps: added to the mean square.

    Returns [rows, hidden] in x's type.
    """
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)  # [rows, 1]
    return (x32 * scale * weight.float()).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotary_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    loc: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys, half-split (neox) style; write keys and values into the pool.

    Args:
        qkv: [rows, (q_heads + 2 · kv_heads) · D], queries first, then keys, then values.
        positions: [rows] int64.
        cos_sin_cache: float32 [max_position, D], cosines in the first half, sines in the second.
        k_cache, v_cache: [slots, kv_heads, D], written.
        loc: [rows] int64 slot of each row. Only the padding slot 0 may occur more than once.

    Returns the rotated queries, [rows, q_heads, D], a new tensor.
    """
    kv_heads, dim = k_cache.shape[1:]
    heads = qkv.view(len(qkv), qkv.shape[1] // dim, dim)  # -1 would be ambiguous without rows
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)  # [rows, 1, D / 2]
    k_cache.index_copy_(0, loc, _rotate(k, cos, sin).to(k_cache.dtype))
    v_cache.index_copy_(0, loc, v.to(v_cache.dtype))
    return _rotate(q, cos, sin)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half: [rows, 2 * m] -> [rows, m]."""
    gate, up = x.chunk(2, dim=-1)
    if x.dtype == torch.float32:
        return F.silu(gate) * up
    return (F.silu(gate.float()) * up.float()).to(x.dtype)
