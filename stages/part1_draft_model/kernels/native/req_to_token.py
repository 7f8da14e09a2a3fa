"""Writes to the request table in plain PyTorch.

Restates the kernel assign_req_to_token_pool of upstream's speculative/eagle_utils.py (v0.4.6).
"""

from __future__ import annotations

import torch


def assign_req_to_token(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    start: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor | None = None,
) -> None:
    """req_to_token[req_pool_indices[b], start[b] + j] = slots[b, j] for every j < lens[b], in place.

    Args:
        req_to_token: int32 [requests, context], written.
        req_pool_indices, start: int64 [bs].
        slots: int64 [bs, width].
        lens: int64 [bs], or None for all of `slots`.
    """
    columns = torch.arange(slots.shape[1], device=slots.device)  # [width]
    valid = columns < (slots.shape[1] if lens is None else lens.unsqueeze(1))
    valid = valid.expand(slots.shape)
    rows = req_pool_indices.unsqueeze(1).expand(slots.shape)[valid]
    req_to_token[rows, (start.unsqueeze(1) + columns)[valid]] = slots[valid].to(req_to_token.dtype)
