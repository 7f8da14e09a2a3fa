"""What the kernels of a draft tree take and give, the same for both sets.

Candidates are numbered as speculative/build_eagle_tree.py says. Everything is int64 unless said otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Candidates(NamedTuple):
    """All that was proposed for a tree: room for every level, filled level by level."""

    scores: torch.Tensor  # float32 [bs, topk + topk² · (steps − 1)] product of probabilities from the root
    tokens: torch.Tensor  # the same shape
    # The candidate that each block of topk children hangs on, −1 for the root: [bs, 1 + topk · (steps − 1)]
    parents: torch.Tensor


class Beams(NamedTuple):
    """The beams of one level, with what their draft forward needs."""

    scores: torch.Tensor  # float32 [bs, topk]; NaN counts as 0
    input_ids: torch.Tensor  # [bs, topk]
    hidden_rows: torch.Tensor  # [bs, topk] row of the parent's hidden state, in what the forward before gave
    ancestors: torch.Tensor  # [bs, topk, words] bits: the beam's own column and those of its ancestors


class AcceptedPaths(NamedTuple):
    """The way down each tree: column j is its j-th node, the root first. Width is the longest way."""

    # What the host reads.
    tokens: torch.Tensor  # [bs, width] what the target says after the node, 0 behind the path
    nodes: torch.Tensor  # [bs, width] number of the node in its tree, −1 behind the path
    is_finite: torch.Tensor  # float32 [bs] 0, or NaN if a node's `checks` was not finite
    # What the draft extend runs over.
    rows: torch.Tensor  # [bs · width] row of the node in the flat batch, 0 behind the path
    slots: torch.Tensor  # [bs · width] slot of the node's KV, padding slot 0 behind the path
    positions: torch.Tensor  # [bs · width] S + j
    lens: torch.Tensor  # [bs] nodes of the path: accepted drafts and the root
    kv_lens: torch.Tensor  # [bs] S + lens
    last_rows: torch.Tensor  # [bs] where the path ends among bs · width rows
    verified_id: torch.Tensor  # [bs] its last token
