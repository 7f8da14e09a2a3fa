"""Growing a draft tree level by level, and turning its best candidates into a tree that can be verified.

Restates select_top_k_tokens of upstream's speculative/eagle_utils.py, and sgl-kernel's
build_tree_kernel_efficient with the choice of candidates before it, both of v0.4.6. Here the prefix is
implied and a row of the mask is one 64-bit word, so a mask does not grow with the context.
"""

from __future__ import annotations

import torch

from ..tree_types import Beams, Candidates
from .topk import top_k


def _record(
    candidates: Candidates,
    level: int,
    beams: Beams,
    topk_p: torch.Tensor | None,
    topk_index: torch.Tensor | None,
) -> None:
    """Write the children of `beams`, and the beams themselves where they are of level 1."""
    bs, topk = beams.scores.shape
    if level == 1:
        candidates.scores[:, :topk] = _without_nan(beams.scores)
        candidates.tokens[:, :topk] = beams.input_ids
        candidates.parents[:, : topk + 1] = torch.arange(-1, topk, device=beams.scores.device)
    if topk_p is not None:
        children = _children(level, topk)
        scores = beams.scores.unsqueeze(2) * topk_p.view(bs, topk, topk)
        candidates.scores[:, children] = _without_nan(scores).flatten(1)
        candidates.tokens[:, children] = topk_index.view(bs, topk * topk)


def _children(level: int, topk: int) -> slice:
    """The candidates that hang on the beams of a level."""
    first = topk + topk * topk * (level - 1)
    return slice(first, first + topk * topk)


def _without_nan(scores: torch.Tensor) -> torch.Tensor:
    """A draft that yields NaN proposes badly; it must not break the tree's order."""
    return torch.where(scores.isnan(), 0.0, scores)


def grow_tree(
    candidates: Candidates,
    level: int,
    beams: Beams,
    topk_p: torch.Tensor,
    topk_index: torch.Tensor,
    own_bits: torch.Tensor,
) -> Beams:
    """Record what the beams of a level propose, and choose the best topk of it as the beams of the next.

    Equal scores go to the lower number. A proposal whose score is NaN scores 0.

    Args:
        candidates: written.
        level: of `beams`, from 1 on. Those of level 1 are the root's children and are recorded too.
        topk_p: float32 [bs · topk, topk] probabilities of each beam's children.
        topk_index: int64 [bs · topk, topk] their tokens.
        own_bits: int64 [topk, words], the column of each beam of the next level.

    Returns the beams of level + 1; their hidden_rows are rows of the forward that these proposals are from.
    """
    bs, topk = beams.scores.shape
    _record(candidates, level, beams, topk_p, topk_index)
    children = _children(level, topk)
    scores, best = top_k(candidates.scores[:, children], topk)
    candidates.parents[:, 1 + topk * level : 1 + topk * (level + 1)] = best + children.start
    parent = best // topk  # [bs, topk]
    seen = beams.ancestors.gather(1, parent.unsqueeze(2).expand(-1, -1, beams.ancestors.shape[2]))
    first_rows = torch.arange(0, bs * topk, topk, device=best.device).unsqueeze(1)
    input_ids = candidates.tokens[:, children].gather(1, best)
    return Beams(scores, input_ids, first_rows + parent, seen | own_bits)


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
    """Record the last level and build the tree of each request from its best candidates.

    Row 0 is the root, rows 1 to n − 1 are the best candidates in order of their numbers. A child never
    scores above its parent, and equal scores go to the lower number, which is the parent's: so whatever is
    chosen has its ancestors chosen too. Where scores break that rule, a node whose parent is missing is left
    unlinked: no walk from the root reaches it.

    Args:
        candidates, level, beams: as for grow_tree.
        topk_p, topk_index: as for grow_tree, or None where the tree ends with `beams`.
        verified_id: int64 [bs], the root's token.
        seq_lens: int64 [bs], its position.
        num_draft_tokens: n, at most 64 and at most one more than there are candidates.

    Returns:
        draft_token: int64 [bs, n].
        tree_mask: int64 [bs, n, 1], bit c of row i set if c is i or an ancestor of i.
        positions: int64 [bs * n], seq_len + depth.
        retrieve_index: int64 [bs, n], global row number b * n + i.
        retrieve_next_token: int64 [bs, n], first child of a row, -1 if it has none.
        retrieve_next_sibling: int64 [bs, n], next child of the same parent, -1 if it is the last.
    """
    _record(candidates, level, beams, topk_p, topk_index)
    selected = top_k(candidates.scores, num_draft_tokens - 1)[1].sort(dim=-1).values
    draft_token = torch.cat([verified_id.unsqueeze(1), candidates.tokens.gather(1, selected)], dim=1)
    return draft_token, *_link(selected, candidates.parents, beams.scores.shape[1], seq_lens)


def _parents(selected: torch.Tensor, parent_list: torch.Tensor, topk: int) -> torch.Tensor:
    """Parent row of every row. The root, and a node whose parent is missing, is its own parent."""
    bs, width = selected.shape
    block = selected // topk  # [bs, n - 1], 0 = child of the root
    flat = parent_list.gather(1, block)  # flat candidate index of the parent
    match = (flat.unsqueeze(2) == selected.unsqueeze(1)) & (block > 0).unsqueeze(2)  # [bs, child, parent]
    own = torch.arange(1, width + 1, device=selected.device).expand(bs, -1)
    found = torch.where(match.any(-1), match.to(torch.uint8).argmax(-1) + 1, own)
    found = torch.where(block == 0, torch.zeros_like(found), found)
    return torch.cat((found.new_zeros(bs, 1), found), dim=1)  # [bs, n]


def _link(
    selected: torch.Tensor, parent_list: torch.Tensor, topk: int, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Mask, positions and links of the tree with rows `selected` [bs, n - 1], ascending, behind its root."""
    parent = _parents(selected, parent_list, topk)  # [bs, n]
    bs, n = parent.shape
    rows = torch.arange(n, device=selected.device)
    linked = parent != rows  # [bs, n]

    # Pointer doubling: after k rounds a row knows its ancestors nearer than 2**k and points 2**k rows up.
    mask = (torch.ones_like(rows) << rows).expand(bs, -1)
    depth = linked.long()
    up = parent
    for _ in range(max(n - 1, 1).bit_length()):
        mask = mask | mask.gather(1, up)
        depth = depth + depth.gather(1, up)
        up = up.gather(1, up)

    none = torch.full((), n, dtype=torch.int64, device=selected.device)
    child = (parent.unsqueeze(1) == rows.unsqueeze(1)) & linked.unsqueeze(1)  # [bs, parent, child]
    next_token = torch.where(child, rows, none).amin(-1)
    sibling = (parent.unsqueeze(2) == parent.unsqueeze(1)) & linked.unsqueeze(1) & linked.unsqueeze(2)
    sibling = sibling & (rows > rows.unsqueeze(1))  # [bs, i, later row]
    next_sibling = torch.where(sibling, rows, none).amin(-1)

    request = torch.arange(bs, device=selected.device).unsqueeze(1)
    return (
        mask.unsqueeze(-1),
        (seq_lens.unsqueeze(1) + depth).flatten(),
        request * n + rows,
        torch.where(next_token == n, -1, next_token),
        torch.where(next_sibling == n, -1, next_sibling),
    )
