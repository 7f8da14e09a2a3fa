"""Unrolled training passes: the head drafts from its own outputs at every position at once.

Drafting k tokens from position t feeds the head its own hidden state k-1 times. Pass k does that for all t:
it reads the embedding of token t+k and what pass k-1 gave at t, sits at position t+k-1, and attends to what a
drafting engine would hold there: the first pass's keys up to t, and its own later passes at t. (SpecForge
calls it training-time test.) A loop that drafts position by position gives the same numbers; a test compares
the two.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .head_model import Head

ALIGN = 8  # score rows stay a multiple of this long, or the matrix products fall back to slow kernels


def _shifted(embeds: Tensor, by: int) -> Tensor:
    return F.pad(embeds[:, by:], (0, 0, 0, by))


def unrolled_passes(
    head: Head, w: dict[str, Tensor], embeds: Tensor, hidden: Tensor, table: Tensor, passes: int
) -> list[Tensor]:
    """The outputs of passes 1..passes, each `[B, T, h]`; pass k at index t predicts the state at position
    t+k.

    Args: w `head.weights(dtype)`; embeds `[B, T, h]` of the tokens; hidden `[B, T, h]`, the target's; table
    `[2, >= T + passes, D]` from `rotary_table`, in the same dtype.
    """
    bs, length, _ = embeds.shape
    x = head.fuse(w, _shifted(embeds, 1), hidden)
    q, k_first, v_first = head.qkv(w, x, table[:, :length])
    kv_heads, group, dim = q.shape[1], q.shape[2], q.shape[4]
    attended = F.scaled_dot_product_attention(
        q.flatten(1, 2), k_first, v_first, is_causal=True, enable_gqa=True
    )
    outputs = [head.finish(w, x, attended.view_as(q))]
    if passes == 1:
        return outputs

    scale = dim**-0.5
    flat = (bs * kv_heads, group * length, dim)
    k_rows, v_rows = k_first.reshape(bs * kv_heads, length, dim), v_first.reshape(bs * kv_heads, length, dim)
    causal = torch.full((length, length), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
    causal = causal.repeat(group, 1)[None].expand(bs * kv_heads, -1, -1)  # [B·Hk, G·T, T]
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    for number in range(2, passes + 1):
        x = head.fuse(w, _shifted(embeds, number), outputs[-1])
        q, k, v = head.qkv(w, x, table[:, number - 1 : number - 1 + length])
        own_keys.append(k[:, :, None])
        own_values.append(v[:, :, None])
        scores = torch.baddbmm(causal, q.reshape(flat), k_rows.mT, alpha=scale)
        own = torch.stack([(q * key).sum(-1) for key in own_keys], dim=-1) * scale  # [B, Hk, G, T, number-1]
        own = F.pad(own.reshape(*flat[:2], number - 1), (0, -(number - 1) % ALIGN), value=float("-inf"))
        probs = torch.cat([scores, own], dim=-1).softmax(dim=-1)  # [B·Hk, G·T, T + ALIGN]
        attended = torch.bmm(probs[..., :length], v_rows).view_as(q)
        for i, value in enumerate(own_values):
            attended = attended + probs[..., length + i].reshape(*q.shape[:4], 1) * value
        outputs.append(head.finish(w, x, attended))
    return outputs
