"""Writes to the request table, and reads from it, in plain PyTorch.

Restates upstream's kernels assign_req_to_token_pool, assign_extend_cache_locs and
assign_draft_cache_locs_page_size_1.
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


def assign_extend_cache_locs(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, start: torch.Tensor, width: int
) -> torch.Tensor:
    """Slots of positions start[b] … start[b] + width − 1 of each request, which were reserved before.

    Args:
        req_to_token: int32 [requests, context].
        req_pool_indices, start: int64 [bs].

    Returns int64 [bs, width].
    """
    columns = start.unsqueeze(1) + torch.arange(width, device=start.device)
    return req_to_token[req_pool_indices.unsqueeze(1), columns].long()


def assign_draft_cache_locs(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    columns: int,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Look up the slots of a whole draft in the table, and lay out what each of its forwards needs.

    Level i has columns i · topk to (i + 1) · topk − 1 behind a request's seq_len, one for each beam.

    Args:
        req_to_token: int32 [requests, context], with `columns` slots from seq_lens[b] on.
        req_pool_indices, seq_lens: int64 [bs].
        columns: levels · topk.
        topk: beams of a level.

    Returns, int64:
        out_cache_loc [levels, bs · topk], the slots by level.
        positions [levels, bs · topk], seq_len + level: beams of a level stand at the same place of the text.
        kv_lens [levels, bs], seq_len and the columns up to this level's.
    """
    slots = assign_extend_cache_locs(req_to_token, req_pool_indices, seq_lens, columns)
    bs, levels = len(slots), columns // topk
    level = torch.arange(levels, device=slots.device).unsqueeze(1)
    return (
        slots.view(bs, levels, topk).transpose(0, 1).reshape(levels, bs * topk),
        level + seq_lens.repeat_interleave(topk, output_size=bs * topk),
        seq_lens + (level + 1) * topk,
    )
