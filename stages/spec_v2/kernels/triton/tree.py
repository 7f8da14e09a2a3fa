"""Growing a draft tree and building the tree to verify in Triton: one program per request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..tree_types import Beams, Candidates
from .launch import begin, dependent, row_strided, wait_for_inputs
from .topk import NO_KEY, index_of_key, sort_keys, value_of_key


@triton.jit
def _record(
    scores,
    tokens,
    parents,
    beam_scores,
    beam_ids,
    topk_p,
    topk_index,
    request,
    first_child,
    CANDIDATES: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOPK: tl.constexpr,
    FIRST: tl.constexpr,
    CHILDREN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write what the native twin of this name writes; returns the scores of the children, if any."""
    child = tl.arange(0, BLOCK)
    scores += request * CANDIDATES
    tokens += request * CANDIDATES
    parents += request * BLOCKS
    beam_scores += request * TOPK
    score = tl.zeros([BLOCK], tl.float32)
    if FIRST:
        own = child < TOPK
        beam_score = tl.load(beam_scores + child, mask=own, other=0)
        tl.store(scores + child, tl.where(beam_score == beam_score, beam_score, 0.0), mask=own)
        tl.store(tokens + child, tl.load(beam_ids + request * TOPK + child, mask=own, other=0), mask=own)
        tl.store(parents + 1 + child, child.to(tl.int64), mask=own)
        tl.store(parents, request * 0 - 1)
    if CHILDREN:
        inside = child < TOPK * TOPK
        place = request * (TOPK * TOPK) + child
        score = tl.load(beam_scores + child // TOPK, mask=inside, other=0)
        score *= tl.load(topk_p + place, mask=inside, other=0)
        score = tl.where(score == score, score, 0.0)
        tl.store(scores + first_child + child, score, mask=inside)
        tl.store(tokens + first_child + child, tl.load(topk_index + place, mask=inside, other=0), mask=inside)
    return score


@triton.jit(do_not_specialize=["first_child", "first_block", "ancestors_stride"])
def _grow_tree_kernel(
    scores,
    tokens,
    parents,
    beam_scores,
    beam_ids,
    ancestors,
    topk_p,
    topk_index,
    own_bits,
    next_scores,
    next_ids,
    next_rows,
    next_ancestors,
    first_child,
    first_block,
    ancestors_stride,
    CANDIDATES: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOPK: tl.constexpr,
    WORDS: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    TOPK2: tl.constexpr,
    WORDS2: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait_for_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    score = _record(
        scores, tokens, parents, beam_scores, beam_ids, topk_p, topk_index, request, first_child,
        CANDIDATES, BLOCKS, TOPK, FIRST, True, BLOCK,
    )  # fmt: skip
    child = tl.arange(0, BLOCK)
    key = sort_keys(score, child, child < TOPK * TOPK)
    beam = tl.arange(0, TOPK2)
    best_key = tl.full([TOPK2], NO_KEY, tl.int64)
    for rank in range(TOPK):
        best = tl.max(key, 0)
        best_key = tl.where(beam == rank, best, best_key)
        key = tl.where(key == best, NO_KEY, key)

    inside = beam < TOPK
    chosen = tl.where(inside, index_of_key(best_key), 0)
    parent = chosen // TOPK
    token = tl.load(topk_index + request * (TOPK * TOPK) + chosen, mask=inside, other=0)
    target = request * TOPK + beam
    tl.store(next_scores + target, value_of_key(best_key), mask=inside)
    tl.store(next_ids + target, token, mask=inside)
    tl.store(next_rows + target, request * TOPK + parent, mask=inside)
    tl.store(parents + request * BLOCKS + first_block + beam, chosen + first_child, mask=inside)
    word = tl.arange(0, WORDS2)[None, :]
    both = inside[:, None] & (word < WORDS)
    seen = tl.load(
        ancestors + request * ancestors_stride + parent[:, None] * WORDS + word, mask=both, other=0
    )
    own = tl.load(own_bits + beam[:, None] * WORDS + word, mask=both, other=0)
    tl.store(next_ancestors + target[:, None] * WORDS + word, seen | own, mask=both)


def _shapes(candidates: Candidates, level: int, beams: Beams) -> dict[str, int | bool]:
    """Launch arguments that both kernels share."""
    topk = beams.scores.shape[1]
    return {
        "first_child": topk + topk * topk * (level - 1),
        "CANDIDATES": candidates.scores.shape[1],
        "BLOCKS": candidates.parents.shape[1],
        "TOPK": topk,
        "FIRST": level == 1,
        "BLOCK": triton.next_power_of_2(topk * topk),
    }


def grow_tree(
    candidates: Candidates,
    level: int,
    beams: Beams,
    topk_p: torch.Tensor,
    topk_index: torch.Tensor,
    own_bits: torch.Tensor,
) -> Beams:
    """See the native twin."""
    bs, topk = beams.scores.shape
    words = own_bits.shape[1]
    ancestors = row_strided(beams.ancestors)
    beams = beams._replace(scores=beams.scores.contiguous(), input_ids=beams.input_ids.contiguous())
    following = Beams(
        torch.empty_like(beams.scores),
        torch.empty_like(beams.input_ids),
        torch.empty_like(beams.input_ids),
        own_bits.new_empty(bs, topk, words),
    )
    if bs:
        _grow_tree_kernel[(bs,)](
            *candidates,
            beams.scores,
            beams.input_ids,
            ancestors,
            topk_p.contiguous(),
            topk_index.contiguous(),
            own_bits.contiguous(),
            *following,
            first_block=1 + topk * level,
            ancestors_stride=ancestors.stride(0),
            **_shapes(candidates, level, beams),
            WORDS=words,
            TOPK2=triton.next_power_of_2(topk),
            WORDS2=triton.next_power_of_2(words),
            num_warps=1 if topk <= 8 else 4,
            **dependent(topk_p),
        )
    return following


@triton.jit
def _select(scores, row, CANDIDATES: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr):
    """Numbers of the best N - 1 candidates for rows 1 to N - 1, ascending; -1 for every other row."""
    number = tl.arange(0, ALL)
    inside = number < CANDIDATES
    # Some of them were written just now by other threads: past the first-level cache.
    key = sort_keys(tl.load(scores + number, mask=inside, other=0, cache_modifier=".cg"), number, inside)
    drafted = (row > 0) & (row < N)
    chosen = tl.full([BLOCK], CANDIDATES, tl.int64)
    for rank in range(1, N):
        best = tl.max(key, 0)
        chosen = tl.where(row == rank, index_of_key(best), chosen)
        key = tl.where(key == best, NO_KEY, key)
    # A candidate's row is one more than the number of chosen ones that come before it.
    before = (chosen[None, :] < chosen[:, None]) & drafted[None, :]
    place = tl.where(drafted, 1 + tl.sum(before.to(tl.int32), 1), BLOCK)
    selected = tl.sum(tl.where(place[:, None] == row[None, :], chosen[:, None], 0), 0)
    return tl.where(drafted, selected, -1)


@triton.jit(do_not_specialize=["first_child"])
def _build_tree_kernel(
    scores,
    tokens,
    parents,
    beam_scores,
    beam_ids,
    topk_p,
    topk_index,
    verified_id,
    seq_lens,
    draft_token,
    tree_mask,
    positions,
    retrieve_index,
    next_token,
    next_sibling,
    first_child,
    CANDIDATES: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOPK: tl.constexpr,
    N: tl.constexpr,
    ROUNDS: tl.constexpr,
    FIRST: tl.constexpr,
    CHILDREN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS2: tl.constexpr,
    ALL: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait_for_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    _record(
        scores, tokens, parents, beam_scores, beam_ids, topk_p, topk_index, request, first_child,
        CANDIDATES, BLOCKS, TOPK, FIRST, CHILDREN, BLOCK,
    )  # fmt: skip
    tl.debug_barrier()  # what is recorded is there for all threads

    row = tl.arange(0, ROWS2)
    drafted = (row > 0) & (row < N)
    candidate = _select(scores + request * CANDIDATES, row, CANDIDATES, N, ROWS2, ALL)
    place = tokens + request * CANDIDATES + candidate
    token = tl.load(place, mask=drafted, other=0, cache_modifier=".cg")
    token = tl.where(row == 0, tl.load(verified_id + request), token)
    block = candidate // TOPK
    known = drafted & (block > 0)
    flat = tl.load(parents + request * BLOCKS + block, mask=known, other=-1, cache_modifier=".cg")

    # Search the parent's flat index among the selected ones. [child, parent]
    match = (flat[:, None] == candidate[None, :]) & known[:, None] & drafted[None, :]
    found = tl.min(tl.where(match, row[None, :], ROWS2), 1)
    parent = tl.where(found < ROWS2, found, row)
    parent = tl.where(drafted & (block == 0), 0, parent)
    linked = drafted & (parent != row)

    # Pointer doubling, as in the native twin.
    mask = tl.full([ROWS2], 1, tl.int64) << row.to(tl.int64)
    depth = linked.to(tl.int64)
    up = parent
    for _ in tl.static_range(ROUNDS):
        mask |= tl.gather(mask, up, 0)
        depth += tl.gather(depth, up, 0)
        up = tl.gather(up, up, 0)

    # A row that is not linked gets a parent no row has, so that it is nobody's child and nobody's sibling.
    owner = tl.where(linked, parent, -1)
    child = tl.min(tl.where(owner[None, :] == row[:, None], row[None, :], ROWS2), 1)
    later = (owner[None, :] == owner[:, None]) & linked[:, None] & (row[None, :] > row[:, None])
    sibling = tl.min(tl.where(later, row[None, :], ROWS2), 1)

    target = request * N + row
    inside = row < N
    tl.store(draft_token + target, token, mask=inside)
    tl.store(tree_mask + target, mask, mask=inside)
    tl.store(positions + target, tl.load(seq_lens + request) + depth, mask=inside)
    tl.store(retrieve_index + target, target, mask=inside)
    tl.store(next_token + target, tl.where(child < ROWS2, child, -1).to(tl.int64), mask=inside)
    tl.store(next_sibling + target, tl.where(sibling < ROWS2, sibling, -1).to(tl.int64), mask=inside)


def build_tree(
    candidates: Candidates,
    level: int,
    beams: Beams,
    topk_p: torch.Tensor | None,
    topk_index: torch.Tensor | None,
    verified_id: torch.Tensor,
    seq_lens: torch.Tensor,
    num_draft_tokens: int,
) -> tuple[torch.Tensor, ...]:
    """See the native twin."""
    bs, n = len(verified_id), num_draft_tokens
    beams = beams._replace(scores=beams.scores.contiguous(), input_ids=beams.input_ids.contiguous())
    draft_token, retrieve_index, next_token, next_sibling = (verified_id.new_empty(bs, n) for _ in range(4))
    tree_mask, positions = verified_id.new_empty(bs, n, 1), verified_id.new_empty(bs * n)
    built = (draft_token, tree_mask, positions, retrieve_index, next_token, next_sibling)
    count = candidates.scores.shape[1]
    if bs:
        _build_tree_kernel[(bs,)](
            *candidates,
            beams.scores,
            beams.input_ids,
            beams.scores if topk_p is None else topk_p.contiguous(),
            beams.input_ids if topk_p is None else topk_index.contiguous(),
            verified_id.contiguous(),
            seq_lens.contiguous(),
            *built,
            **_shapes(candidates, level, beams),
            N=n,
            ROUNDS=max(n - 1, 1).bit_length(),
            CHILDREN=topk_p is not None,
            ROWS2=triton.next_power_of_2(n),
            ALL=triton.next_power_of_2(count),
            num_warps=1 if n <= 16 and count <= 128 else 4,
            **dependent(verified_id),
        )
    return built
