"""Attention over the KV pool in Triton: one program per request, KV head, block of query rows and split.

A small batch has few such programs and a long context keeps each of them busy for long, so the prefix is then
split among several. Each split leaves its part of the softmax in scratch memory and draws a ticket; whoever
draws the last one combines the parts. Tickets go back to zero by themselves, so a CUDA graph can replay them.

Lengths, tables, masks and what lies in the prefix must be older than the launch right before this one, which
writes the queries and the rows' own keys and values: they are read before that one is waited for.

Restates upstream's layers/attention/triton_ops/{decode,extend}_attention.py with one kernel for decoding,
prefill and tree verification. The query heads of a group are folded into the rows of one tile, so keys and
values are read once per group and heads need not be a power of two.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from ..host_metadata import HostMetadata
from .launch import begin, dependent, row_strided, wait_for_inputs

# Split or not, and nothing in between: each number of splits is a kernel of its own to compile.
_SPLITS = 16
_AT_A_TIME = tl.constexpr(4)  # parts that are combined side by side, and not one behind the other
_SPLIT_GROUPS = 64  # with more groups of programs than this the GPU is busy without
_INTERPRETED_SPLIT_GROUPS = 0  # the interpreter runs programs one after another
# Warps of a program and columns of its tile, for up to so many groups: about one for each of an H200's 132
# multiprocessors, two, or more, which have to share its registers. Measured in bf16 with heads of 64; float32
# and tiles of many rows have their own, and wider heads the same columns always.
_PROGRAMS = ((128, (8, 128)), (256, (4, 128)), (math.inf, (4, 64)))
_LOG2_E = 1.4426950408889634


@triton.jit
def slots_at(table, position, inside, PAGE: tl.constexpr):
    """Slots of a request's positions; with pages, `table` is read only where a page begins."""
    if PAGE == 1:
        return tl.load(table + position, mask=inside, other=0).to(tl.int64)
    offset = position % PAGE
    return (tl.load(table + position - offset, mask=inside, other=0) + offset).to(tl.int64)


@triton.jit
def _keys_and_values(
    k_head, v_head, slot, wanted, key, value, slot_stride, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """[BLOCK_N, BLOCK_D] each. Columns that are not wanted stay what they are in `key` and `value`."""
    dim = tl.arange(0, BLOCK_D)
    offset = slot[:, None] * slot_stride + dim[None, :]
    loaded = wanted[:, None] & (dim[None, :] < D)
    return tl.load(k_head + offset, mask=loaded, other=key), tl.load(
        v_head + offset, mask=loaded, other=value
    )


@triton.jit
def _accumulate(
    q,
    acc,
    top,
    total,
    key,
    value,
    visible,
    factor,
    PRECISION: tl.constexpr,
):
    """One tile of online softmax."""
    score = tl.dot(q, tl.trans(key), input_precision=PRECISION) * factor  # [BLOCK_M, BLOCK_N]
    score = tl.where(visible, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
    weight = tl.exp2(score - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weight, 1)
    acc = acc * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def _attention_kernel(
    q,
    k_cache,
    v_cache,
    out,
    req_to_token,
    req_pool_indices,
    prefix_lens,
    kv_lens,
    q_start_loc,
    tree_mask,
    parts,
    tickets,
    factor,
    q_stride,
    k_stride,
    table_stride,
    mask_stride_b,
    mask_stride_q,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WORDS: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    first_row = tl.program_id(2) // SPLITS * BLOCK_M
    part = tl.program_id(2) % SPLITS
    begin_row = tl.load(q_start_loc + request)
    q_len = (tl.load(q_start_loc + request + 1) - begin_row).to(tl.int32)
    if first_row >= q_len * GROUP:
        return
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    kv_len = tl.load(kv_lens + request).to(tl.int32)
    table = req_to_token + tl.load(req_pool_indices + request) * table_stride
    k_head = k_cache + kv_head * D
    v_head = v_cache + kv_head * D

    # With a mask any row may see what lies behind the prefix, without one only what is not behind itself.
    stop = kv_len
    if not HAS_MASK:
        last_token = tl.minimum((first_row + BLOCK_M - 1) // GROUP, q_len - 1)
        stop = tl.minimum(prefix + last_token + 1, kv_len)
    tiles = tl.cdiv(stop, BLOCK_N)
    share = tl.maximum(tl.cdiv(tiles, SPLITS), 1)
    parts_used = tl.maximum(tl.cdiv(tiles, share), 1)
    if part >= parts_used:
        return
    # The columns of this program's share, a tile at a time.
    stop = tl.minimum(stop, (part + 1) * share * BLOCK_N)
    column = part * share * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = slots_at(table, column, column < stop, PAGE)
    # Row m of the tile is query token m // GROUP, head m % GROUP of this group.
    m = first_row + tl.arange(0, BLOCK_M)
    token = m // GROUP
    row_inside = token < q_len
    if HAS_MASK:
        words = tree_mask + request * mask_stride_b + token * mask_stride_q
        first_bits = tl.load(words, mask=row_inside & (WORDS > 0), other=0)
    # What the first tile has of the prefix.
    key = tl.zeros([BLOCK_N, BLOCK_D], k_cache.dtype.element_ty)
    value = tl.zeros([BLOCK_N, BLOCK_D], v_cache.dtype.element_ty)
    known = tl.minimum(prefix, stop)
    key, value = _keys_and_values(k_head, v_head, slot, column < known, key, value, k_stride, D, BLOCK_D)
    wait_for_inputs(PDL)

    dim = tl.arange(0, BLOCK_D)
    io_mask = row_inside[:, None] & (dim[None, :] < D)
    head = kv_head * GROUP + m % GROUP
    row_of_query = (begin_row + token)[:, None] * q_stride + (head * D)[:, None]
    query = tl.load(q + row_of_query + dim[None, :], mask=io_mask, other=0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for _ in range(part * share, tl.minimum(tiles, (part + 1) * share)):
        here, inside = column, column < stop
        column += BLOCK_N
        new = inside & (here >= known)
        key, value = _keys_and_values(k_head, v_head, slot, new, key, value, k_stride, D, BLOCK_D)
        known = 0
        slot = slots_at(table, column, column < stop, PAGE)  # the next tile's
        if HAS_MASK:
            behind = here - prefix
            bits = tl.broadcast_to(first_bits[:, None], [BLOCK_M, BLOCK_N])
            if WORDS > 1:
                later = row_inside[:, None] & ((behind >= 64) & (behind < 64 * WORDS))[None, :]
                bits = tl.load(words[:, None] + (behind // 64)[None, :], mask=later, other=bits)
            seen = ((bits >> (behind & 63).to(tl.int64)[None, :]) & 1) != 0
            visible = (behind < 0)[None, :] | seen & (behind < 64 * WORDS)[None, :]
        else:
            visible = here[None, :] <= prefix + token[:, None]
        visible &= inside[None, :]
        acc, top, total = _accumulate(query, acc, top, total, key, value, visible, factor, PRECISION)

    if SPLITS > 1:
        if parts_used > 1:
            # Rows of scratch: a part's sums, then its largest scores, then its totals.
            group = (request * KV_HEADS + kv_head) * (tl.num_programs(2) // SPLITS)
            group += tl.program_id(2) // SPLITS
            line = tl.arange(0, BLOCK_M)
            cell = line[:, None] * BLOCK_D + dim[None, :]
            SIZE: tl.constexpr = BLOCK_M * (BLOCK_D + 2)
            mine = parts + (group * SPLITS + part) * SIZE
            tl.store(mine + cell, acc, mask=row_inside[:, None])
            tl.store(mine + BLOCK_M * BLOCK_D + line, top)
            tl.store(mine + BLOCK_M * (BLOCK_D + 1) + line, total)
            tl.debug_barrier()  # all of this program's stores come before its ticket
            ticket = tl.atomic_add(tickets + group, 1, sem="acq_rel")
            if ticket < parts_used - 1:
                return
            tl.debug_barrier()
            tl.store(tickets + group, 0)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            for first_part in range(0, parts_used, _AT_A_TIME):
                for ahead in tl.static_range(_AT_A_TIME):
                    theirs = parts + (group * SPLITS + first_part + ahead) * SIZE
                    there = first_part + ahead < parts_used
                    peaks = theirs + BLOCK_M * BLOCK_D + line
                    # Past the first-level cache, which may hold what stood here before.
                    sums = tl.load(
                        theirs + cell, mask=row_inside[:, None] & there, other=0, cache_modifier=".cg"
                    )
                    peak = tl.load(peaks, mask=there, other=float("-inf"), cache_modifier=".cg")
                    count = tl.load(peaks + BLOCK_M, mask=there, other=0, cache_modifier=".cg")
                    new_top = tl.maximum(top, peak)
                    base = tl.where(new_top == float("-inf"), 0.0, new_top)
                    decay, weight = tl.exp2(top - base), tl.exp2(peak - base)
                    total = total * decay + count * weight
                    acc = acc * decay[:, None] + sums * weight[:, None]
                    top = new_top
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    target = ((begin_row + token) * (KV_HEADS * GROUP) + head) * D
    tl.store(out + target[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=io_mask)


@functools.cache
def _tickets(device: torch.device) -> torch.Tensor:
    """One counter for each group of splits; zero between launches. A capture's warm-up makes them."""
    return torch.zeros(_SPLIT_GROUPS, dtype=torch.int32, device=device)


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    q_start_loc: torch.Tensor,
    max_q_len: int,
    scale: float,
    page_size: int,
    tree_mask: torch.Tensor | None = None,
    host: HostMetadata | None = None,
) -> torch.Tensor:
    """See the native twin. `host` is not used: the kernel reads the lengths where they are."""
    q_heads, dim = q.shape[1:]
    kv_heads = k_cache.shape[1]
    group = q_heads // kv_heads
    q = row_strided(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    bs = kv_lens.shape[0]
    if bs == 0 or q.shape[0] == 0:
        return out
    # A few tile heights, chosen by what kind of step this is and never by the batch.
    tile_rows = max_q_len * group
    # float32 runs without tensor cores, for tests: there a tall tile only spills registers.
    exact = q.dtype == torch.float32
    block_m = next((size for size in (16, 32, 64) if tile_rows <= size), 128)
    block_m = min(block_m, 32) if exact else block_m
    mask = req_pool_indices if tree_mask is None else row_strided(tree_mask)
    blocks = triton.cdiv(tile_rows, block_m)
    groups = bs * kv_heads * blocks
    splits = _SPLITS if groups <= (_SPLIT_GROUPS if q.is_cuda else _INTERPRETED_SPLIT_GROUPS) else 1
    tickets = _tickets(q.device)
    parts, block_d = tickets, max(16, triton.next_power_of_2(dim))
    if exact or block_m > 32:
        warps, columns = 8 if block_m > 16 else 4, 64 if exact else 128
    else:
        warps, columns = next(program for most, program in _PROGRAMS if groups <= most)
    if splits > 1:
        parts = torch.empty(groups * splits * block_m * (block_d + 2), dtype=torch.float32, device=q.device)
    _attention_kernel[(bs, kv_heads, blocks * splits)](
        q,
        k_cache,
        v_cache,
        out,
        req_to_token,
        *(t.contiguous() for t in (req_pool_indices, prefix_lens, kv_lens, q_start_loc)),
        mask,
        parts,
        tickets,
        scale * _LOG2_E,
        q.stride(0),
        k_cache.stride(0),
        req_to_token.stride(0),
        0 if tree_mask is None else mask.stride(0),
        0 if tree_mask is None else mask.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        D=dim,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        BLOCK_N=columns if block_d <= 64 else 64,
        PAGE=page_size,
        HAS_MASK=tree_mask is not None,
        WORDS=0 if tree_mask is None else mask.shape[2],
        PRECISION="ieee" if exact else "tf32",
        SPLITS=splits,
        num_warps=warps,
        num_stages=1,
        **dependent(q),
    )
    return out
