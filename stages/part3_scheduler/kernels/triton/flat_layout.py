"""A batch's slots and tree masks laid out flat, as FlashInfer reads them, in Triton.

The grids depend on the widest table row and never on a length, so that a CUDA graph fits every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention import slots_at
from .launch import row_strided

_BLOCK = 512


@triton.jit
def _kv_indices_kernel(
    req_to_token,
    req_pool_indices,
    seq_lens,
    kv_indptr,
    kv_indices,
    table_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    begin = tl.load(kv_indptr + request)
    kv_len = tl.load(kv_indptr + request + 1) - begin
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = position < kv_len
    last = tl.load(seq_lens + request).to(tl.int32) - 1
    table = req_to_token + tl.load(req_pool_indices + request) * table_stride
    slot = slots_at(table, tl.maximum(tl.minimum(position, last), 0), inside, PAGE)
    tl.store(kv_indices + begin + position, slot.to(tl.int32), mask=inside)


def create_kv_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    page_size: int,
) -> None:
    """See the native twin."""
    bs = seq_lens.shape[0]
    if bs:
        _kv_indices_kernel[(bs, triton.cdiv(req_to_token.shape[1], _BLOCK))](
            req_to_token,
            req_pool_indices.contiguous(),
            seq_lens.contiguous(),
            kv_indptr,
            kv_indices,
            req_to_token.stride(0),
            PAGE=page_size,
            BLOCK=_BLOCK,
        )


@triton.jit
def _custom_mask_kernel(
    tree_mask,
    prefix_lens,
    kv_indptr,
    custom_mask,
    mask_stride_b,
    mask_stride_q,
    Q: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    begin = tl.load(kv_indptr + request)
    kv_len = tl.load(kv_indptr + request + 1) - begin
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) * BLOCK * 8 >= Q * kv_len:
        return
    flat = byte[:, None] * 8 + tl.arange(0, 8)[None, :]  # [BLOCK, 8] bits of this request
    row = flat // kv_len
    column = flat % kv_len - tl.load(prefix_lens + request).to(tl.int32)
    inside = row < Q
    behind = inside & (column >= 0) & (column < 64 * WORDS)
    word = tl.load(
        tree_mask + request * mask_stride_b + row * mask_stride_q + column // 64, mask=behind, other=0
    )
    visible = (inside & (column < 0)) | (((word >> (column % 64).to(tl.int64)) & 1) != 0)
    packed = tl.sum(visible.to(tl.int32) << tl.arange(0, 8)[None, :], 1)
    target = custom_mask + begin.to(tl.int64) * Q + byte
    tl.store(target, packed.to(tl.uint8), mask=byte * 8 < Q * kv_len)


def create_custom_mask(
    tree_mask: torch.Tensor,
    prefix_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    custom_mask: torch.Tensor,
    max_kv_len: int,
) -> None:
    """See the native twin."""
    bs, q_len, words = tree_mask.shape
    tree_mask = row_strided(tree_mask)
    if bs and max_kv_len:
        _custom_mask_kernel[(bs, triton.cdiv(q_len * max_kv_len, 8 * _BLOCK))](
            tree_mask,
            prefix_lens.contiguous(),
            kv_indptr,
            custom_mask,
            tree_mask.stride(0),
            tree_mask.stride(1),
            Q=q_len,
            WORDS=words,
            BLOCK=_BLOCK,
        )
