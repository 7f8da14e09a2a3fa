"""A batch's slots laid out flat, as FlashInfer reads them, in plain PyTorch.

Restates create_flashinfer_kv_indices_triton of upstream's layers/attention/utils.py. Nothing is read back:
the lengths that FlashInfer has planned with are on the device too, as the differences of `kv_indptr`.
"""

from __future__ import annotations

import torch


def create_kv_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Write the slots of every request one behind the other, in place.

    A request may have been planned longer than it is. What is behind its last entry names that entry's slot
    again: no row sees it, but a slot that holds NaN would spoil the sum even with the weight 0.

    Args:
        req_to_token: int32 [requests, context]. With page_size > 1 only the columns at multiples of
            page_size are read: they hold the first slot of each page.
        req_pool_indices: int64 [bs].
        seq_lens: int64 [bs], entries that exist.
        kv_indptr: int32 [bs + 1], where each request's slots begin; the differences are at most the width
            of the table.
        kv_indices: int32 [kv_indptr[-1]] or longer, written.
        page_size: a power of two.
    """
    lens = kv_indptr.diff()
    request = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens)
    position = torch.arange(len(request), device=lens.device) - kv_indptr[request]
    position = position.minimum(seq_lens[request] - 1).clamp(min=0)
    offset = position % page_size
    slots = req_to_token[req_pool_indices[request], position - offset] + offset
    kv_indices[: len(slots)] = slots.to(kv_indices.dtype)
