"""The largest entries of a row, with ties going to the lowest index, in plain PyTorch.

torch.topk promises no order among equal values. Where that matters, value and index are packed into one
integer key and the keys, which are all different, are compared instead. Restates upstream's fast_topk
(speculative/eagle_utils.py, at v0.4.6 in utils.py).
"""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF


def _keys(x: torch.Tensor) -> torch.Tensor:
    """int64 keys that sort as (value, then lower index first) does. [rows, n] -> [rows, n]"""
    bits = (x.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    index = torch.arange(x.shape[-1], device=x.device)
    return (ordered.long() << 32) | (_LOW - index)


def top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest entries of each row, descending.

    Args:
        x: [rows, n], n >= k.

    Returns:
        values [rows, k] in x's type, indices int64 [rows, k].
    """
    values, indices = x.topk(k, dim=-1)  # [rows, k]
    if bool(((x >= values[:, -1:]).sum(-1) == k).all()):  # row by row: a row of NaN counts 0
        # No tie across the border, so this is the right set; a stable sort by value settles ties within it.
        indices = indices.sort(dim=-1).values
        values, order = x.gather(-1, indices).sort(dim=-1, descending=True, stable=True)
        return values, indices.gather(-1, order)
    keys = _keys(x).topk(k, dim=-1).values  # ten times slower on 49,152 entries
    indices = _LOW - (keys & _LOW)
    return x.gather(-1, indices), indices


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Lowest index of each row's largest entry. [rows, n] -> int64 [rows]"""
    return x.argmax(dim=-1)  # PyTorch promises the first of equal maxima


def topk_softmax(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest softmax probabilities of each row; what linear_topk makes of its logits.

    Args:
        logits: [rows, V].

    Returns:
        probs float32 [rows, k] descending, ids int64 [rows, k].
    """
    values, indices = top_k(logits, k)
    top = values[:, :1].float()
    total = (logits.float() - top).exp().sum(-1, keepdim=True)
    return (values.float() - top).exp() / total, indices
