"""Linear layers with what stands around them, in plain PyTorch: norms before, residuals and gates after."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .layers import rms_norm, rotary_store, silu_and_mul
from .topk import topk_softmax


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x Wᵀ + bias + residual.

    Args:
        x: [rows, in].
        weight: [out, in].
        bias: [out] or None.
        residual: [rows, out] or None.
    """
    y = F.linear(x, weight, bias)
    return y if residual is None else y + residual


def norm_gate_up(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """silu(gate) · up of rms_norm(x), the first half of a gated MLP.

    Args:
        x: [rows, hidden].
        norm_weight: [hidden].
        eps: see rms_norm.
        weight: [2 · inner, hidden], the gate's rows first.
        bias: [2 · inner] or None.

    Returns [rows, inner].
    """
    return silu_and_mul(F.linear(rms_norm(x, norm_weight, eps), weight, bias))


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
    """Everything in a layer that comes before its attention.

    Args:
        x: [rows, hidden].
        norm_weight: [hidden], or None where the layer has no input norm.
        eps: see rms_norm.
        weight: [(q_heads + 2 · kv_heads) · D, hidden].
        bias: one value for each row of `weight`, or None.
        positions, cos_sin_cache, k_cache, v_cache, loc: see rotary_store.

    Returns the rotated queries, [rows, q_heads, D].
    """
    normed = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    return rotary_store(F.linear(normed, weight, bias), positions, cos_sin_cache, k_cache, v_cache, loc)


def linear_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x Wᵀ summed and returned in float32 [rows, out]: logits rounded to bf16 would tie far too often."""
    if x.dtype == torch.float32:
        return F.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def linear_topk(
    x: torch.Tensor,
    weight: torch.Tensor,
    k: int,
    probs: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    hot_token_id: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest tokens of each row, for whoever needs no logits.

    Args:
        x: [rows, hidden].
        weight: [V, hidden], the LM head.
        k: at most V.
        probs, ids: contiguous, of the types and shapes below, written; None: new ones.
        hot_token_id: int64 [V], ascending: the tokens that the rows of `weight` are for; None: their numbers.

    Returns:
        probs float32 [rows, k] descending, ids int64 [rows, k]. All of a row's probabilities are NaN if one
        of its logits is NaN or infinite.
    """
    logits = linear_float32(x, weight)
    likely, tokens = topk_softmax(logits, k)
    tokens = tokens if hot_token_id is None else hot_token_id[tokens]
    likely = torch.where(torch.isfinite(logits.sum(-1, keepdim=True)), likely, torch.nan)
    return (likely, tokens) if probs is None else (probs.copy_(likely), ids.copy_(tokens))
