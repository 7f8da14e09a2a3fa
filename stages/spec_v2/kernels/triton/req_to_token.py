"""Writes to the request table, and reads from it, in Triton."""

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


@triton.jit
def _extend_kernel(
    req_to_token,
    req_pool_indices,
    start,
    slots,
    table_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = req_to_token + tl.load(req_pool_indices + row) * table_stride + tl.load(start + row)
    slot = tl.load(source + column, mask=inside, other=0)
    tl.store(slots + row * WIDTH + column, slot.to(tl.int64), mask=inside)


def assign_extend_cache_locs(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, start: torch.Tensor, width: int
) -> torch.Tensor:
    """See the native twin."""
    bs = len(start)
    slots = start.new_empty(bs, width)
    if bs and width:
        _extend_kernel[(bs,)](
            req_to_token,
            req_pool_indices.contiguous(),
            start.contiguous(),
            slots,
            req_to_token.stride(0),
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            num_warps=1 if width <= 128 else 4,
            **dependent(slots),
        )
    return slots


@triton.jit(do_not_specialize=["bs"])
def _draft_kernel(
    req_to_token,
    req_pool_indices,
    seq_lens,
    out_cache_loc,
    positions,
    kv_lens,
    table_stride,
    bs,
    TOPK: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    length = tl.load(seq_lens + row)
    source = req_to_token + tl.load(req_pool_indices + row) * table_stride + length
    slot = tl.load(source + column, mask=inside, other=0).to(tl.int64)
    level, beam = column // TOPK, column % TOPK
    place = (level * bs + row) * TOPK + beam
    tl.store(out_cache_loc + place, slot, mask=inside)
    tl.store(positions + place, length + level, mask=inside)
    tl.store(kv_lens + level * bs + row, length + (level + 1) * TOPK, mask=inside & (beam == 0))


def assign_draft_cache_locs(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    columns: int,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the native twin."""
    bs, levels = len(seq_lens), columns // topk
    out_cache_loc, positions = (seq_lens.new_empty(levels, bs * topk) for _ in range(2))
    kv_lens = seq_lens.new_empty(levels, bs)
    if bs and columns:
        _draft_kernel[(bs,)](
            req_to_token,
            req_pool_indices.contiguous(),
            seq_lens.contiguous(),
            out_cache_loc,
            positions,
            kv_lens,
            req_to_token.stride(0),
            bs,
            TOPK=topk,
            COLUMNS=columns,
            BLOCK=triton.next_power_of_2(columns),
            num_warps=1 if columns <= 128 else 4,
            **dependent(seq_lens),
        )
    return out_cache_loc, positions, kv_lens
