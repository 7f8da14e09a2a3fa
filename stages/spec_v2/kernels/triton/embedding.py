"""What enters a draft model, in Triton: one program makes one half of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import begin, dependent, row_strided, wait_for_inputs


@triton.jit
def _embed_with_hidden_kernel(
    input_ids,
    embed_tokens,
    hidden_states,
    hidden_rows,
    out,
    hidden_stride,
    HIDDEN: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    if tl.program_id(1) == 0:
        value = tl.load(embed_tokens + tl.load(input_ids + row) * HIDDEN + column, mask=inside, other=0)
    else:
        source = tl.load(hidden_rows + row) if HAS_ROWS else row
        value = tl.load(hidden_states + source * hidden_stride + column, mask=inside, other=0)
    tl.store(out + (row * 2 + tl.program_id(1)) * HIDDEN + column, value, mask=inside)


def embed_with_hidden(
    input_ids: torch.Tensor,
    embed_tokens: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the native twin."""
    rows, hidden = len(input_ids), embed_tokens.shape[1]
    hidden_states = row_strided(hidden_states)
    out = torch.empty(rows, 2 * hidden, dtype=embed_tokens.dtype, device=embed_tokens.device)
    if rows:
        _embed_with_hidden_kernel[(rows, 2)](
            input_ids.contiguous(),
            embed_tokens,
            hidden_states,
            input_ids if hidden_rows is None else hidden_rows.contiguous(),
            out,
            hidden_states.stride(0),
            HIDDEN=hidden,
            HAS_ROWS=hidden_rows is not None,
            BLOCK=triton.next_power_of_2(hidden),
            **dependent(out),
        )
    return out


@triton.jit
def _norm_embed_with_hidden_kernel(
    input_ids,
    embed_tokens,
    embed_norm,
    hidden_states,
    hidden_rows,
    hidden_norm,
    out,
    residual,
    hidden_stride,
    eps,
    HIDDEN: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    is_hidden = tl.program_id(1) == 1
    if is_hidden:
        factor = tl.load(hidden_norm + column, mask=inside, other=0)
    else:
        factor = tl.load(embed_norm + column, mask=inside, other=0)
    wait_for_inputs(PDL)
    if is_hidden:
        source = tl.load(hidden_rows + row) if HAS_ROWS else row
        value = tl.load(hidden_states + source * hidden_stride + column, mask=inside, other=0)
        if HAS_ROWS:
            tl.store(residual + row * HIDDEN + column, value, mask=inside)
    else:
        value = tl.load(embed_tokens + tl.load(input_ids + row) * HIDDEN + column, mask=inside, other=0)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    value = (value * scale * factor.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + (row * 2 + tl.program_id(1)) * HIDDEN + column, value, mask=inside)


def norm_embed_with_hidden(
    input_ids: torch.Tensor,
    embed_tokens: torch.Tensor,
    embed_norm: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_rows: torch.Tensor | None,
    hidden_norm: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the native twin."""
    rows, hidden = len(input_ids), embed_tokens.shape[1]
    hidden_states = row_strided(hidden_states)
    out = torch.empty(rows, 2 * hidden, dtype=embed_tokens.dtype, device=embed_tokens.device)
    has_rows = hidden_rows is not None
    residual = torch.empty_like(out[:, :hidden]) if has_rows else hidden_states
    if rows:
        _norm_embed_with_hidden_kernel[(rows, 2)](
            input_ids.contiguous(),
            embed_tokens,
            embed_norm,
            hidden_states,
            hidden_rows.contiguous() if has_rows else input_ids,
            hidden_norm,
            out,
            residual,
            hidden_states.stride(0),
            eps,
            HIDDEN=hidden,
            HAS_ROWS=has_rows,
            BLOCK=triton.next_power_of_2(hidden),
            **dependent(out),
        )
    return out, residual
