"""A batch's slots and tree masks laid out flat, as FlashInfer reads them, in plain PyTorch.

Restates create_flashinfer_kv_indices_triton of upstream's layers/attention/utils.py, and the flat mask that
sgl-kernel's build_tree_kernel_efficient makes at v0.4.6. Nothing is read back: the lengths that FlashInfer
has planned with are on the device too, as the differences of `kv_indptr`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


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


def create_custom_mask(
    tree_mask: torch.Tensor,
    prefix_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    custom_mask: torch.Tensor,
    max_kv_len: int,
) -> None:
    """Write which row sees which entry, one bit each, in place.

    Row i of request b sees entry p if p < prefix_lens[b] or bit p − prefix_lens[b] of tree_mask[b, i] is
    set. That is bit i · kv_len + p of the request, lowest bits of a byte first. Request b begins at byte
    q · kv_indptr[b], eight times as far as it must: that is where FlashInfer's plan() looks for the bits of
    a packed mask.

    Args:
        tree_mask: int64 [bs, q, words]; columns beyond 64 · words are hidden.
        prefix_lens: int64 [bs].
        kv_indptr: int32 [bs + 1], as for create_kv_indices.
        custom_mask: uint8 [q · kv_indptr[-1]] or longer, written.
        max_kv_len: at least the largest difference of kv_indptr (used by the Triton twin).
    """
    bs, q_len, words = tree_mask.shape
    begins = kv_indptr.tolist()
    for b, prefix in enumerate(prefix_lens.tolist()):
        kv_len = begins[b + 1] - begins[b]
        visible = torch.arange(kv_len, device=tree_mask.device).expand(q_len, -1) < prefix
        bit = torch.arange(max(min(kv_len - prefix, 64 * words), 0), device=tree_mask.device)
        visible[:, prefix : prefix + len(bit)] = ((tree_mask[b][:, bit // 64] >> (bit % 64)) & 1).bool()
        bits = F.pad(visible.flatten().long(), (0, -visible.numel() % 8)).view(-1, 8)
        packed = (bits << torch.arange(8, device=bits.device)).sum(-1)
        custom_mask[q_len * begins[b] :][: len(packed)] = packed.to(custom_mask.dtype)
