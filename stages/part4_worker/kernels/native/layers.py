"""Row-wise layer arithmetic in plain PyTorch: RMSNorm with residual, rotary embedding, SiLU-and-mul.

Restates what sgl-kernel's rmsnorm, fused_add_rmsnorm, apply_rope and silu_and_mul compute. Sums and products
are taken in float32 whatever the input type; nothing is modified in place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None):
    """RMSNorm over the last dimension, optionally after adding a residual.

    Args:
        x: [rows, hidden].
        weight: [hidden].
        eps: added to the mean square.
        residual: [rows, hidden] or None.

    Returns:
        y [rows, hidden], or (y, x + residual) where the sum is rounded to x's type before it is normed.
    """
    if residual is not None:
        x = (x.float() + residual.float()).to(x.dtype)
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)  # [rows, 1]
    y = (x32 * scale * weight.float()).to(x.dtype)
    return y if residual is None else (y, x)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def apply_rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding, half-split (neox) style.

    Args:
        q, k: [rows, q_heads, D] and [rows, kv_heads, D]; may be views of one fused projection.
        positions: [rows] int64.
        cos_sin_cache: float32 [max_position, D], cosines in the first half, sines in the second.

    Returns:
        Rotated q and k, new contiguous tensors.
    """
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)  # [rows, 1, D / 2]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half: [rows, 2 * m] -> [rows, m]."""
    gate, up = x.chunk(2, dim=-1)
    if x.dtype == torch.float32:
        return F.silu(gate) * up
    return (F.silu(gate.float()) * up.float()).to(x.dtype)
