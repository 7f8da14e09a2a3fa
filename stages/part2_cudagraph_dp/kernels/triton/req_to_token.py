"""Writes to the request table in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import begin, dependent, row_strided, wait_for_inputs


@triton.jit(do_not_specialize=["slots_stride", "width"])
def _assign_kernel(
    req_to_token,
    req_pool_indices,
    start,
    slots,
    lens,
    table_stride,
    slots_stride,
    width,
    HAS_LENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if HAS_LENS:
        inside &= column < tl.load(lens + row)
    slot = tl.load(slots + row * slots_stride + column, mask=inside, other=0)
    target = req_to_token + tl.load(req_pool_indices + row) * table_stride + tl.load(start + row)
    tl.store(target + column, slot.to(req_to_token.dtype.element_ty), mask=inside)


def assign_req_to_token(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    start: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor | None = None,
) -> None:
    """See the native twin."""
    bs, width = slots.shape
    slots = row_strided(slots)
    if bs and width:
        _assign_kernel[(bs, triton.cdiv(width, 128))](
            req_to_token,
            req_pool_indices.contiguous(),
            start.contiguous(),
            slots,
            start if lens is None else lens.contiguous(),
            req_to_token.stride(0),
            slots.stride(0),
            width,
            HAS_LENS=lens is not None,
            BLOCK=128,
            **dependent(slots),
        )
