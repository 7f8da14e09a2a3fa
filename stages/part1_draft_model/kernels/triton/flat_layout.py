"""A batch's slots laid out flat, as FlashInfer reads them, in Triton.

The grid depends on the widest table row and never on a length, so nothing has to be read back for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention import slots_at

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
