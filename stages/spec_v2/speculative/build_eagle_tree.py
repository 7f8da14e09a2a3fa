"""Growing the draft tree and choosing what of it to verify.

Restates the Python side of build_eagle_tree.py and select_top_k_tokens of eagle_utils.py, both of v0.4.6.

A tree grows by levels. Each level keeps `topk` beams, and every beam proposes `topk` children. All
children are remembered as candidates with the product of probabilities along their path; from all levels
together the best n − 1 are verified. Candidates are numbered flat: level 1 has 0 … topk − 1, level i + 1 the
topk² from topk + topk² · (i − 1) on, child c of beam b being number b · topk + c of its level.

A beam attends to its own ancestors. Its KV stays where it was written when the tree grows on from another
beam, so who sees what must follow the tree. (Upstream lets a beam see whatever stood in its column.)
"""

from __future__ import annotations

from typing import Any

import torch

from ..kernels.tree_types import Beams, Candidates
from ..layers.logits_processor import LogitsProcessorOutput


class DraftTree:
    """A batch's trees while they grow: `beams` are what the next draft forward runs.

    Args:
        topk_p, topk_index: [bs, topk] children of the root.
        hidden_rows: [bs · topk] row of each one's hidden state: its request's.
        column_bits: what `column_bits` gives for all beams that are run, [topk · (steps − 1), words].
        kernels: what load_kernels returned.
    """

    def __init__(
        self,
        topk_p: torch.Tensor,
        topk_index: torch.Tensor,
        hidden_rows: torch.Tensor,
        column_bits: torch.Tensor,
        kernels: Any,
    ):
        (bs, topk), forwards = topk_p.shape, len(column_bits) // topk_p.shape[1]
        count = topk + topk * topk * forwards
        self.candidates = Candidates(
            scores=topk_p.new_empty(bs, count),
            tokens=topk_index.new_empty(bs, count),
            parents=topk_index.new_empty(bs, 1 + topk * max(forwards, 1)),
        )
        self.level, self.kernels = 1, kernels
        self.own_bits = column_bits.split(topk)
        ancestors = column_bits[:topk].expand(bs, -1, -1)
        self.beams = Beams(topk_p, topk_index, hidden_rows.view(bs, topk), ancestors)

    def grow(self, proposals: LogitsProcessorOutput) -> None:
        """Go on to the best topk of what the beams propose, topk for each of bs · topk rows."""
        self.beams = self.kernels.grow_tree(
            self.candidates,
            self.level,
            self.beams,
            proposals.topk_p,
            proposals.topk_index,
            self.own_bits[self.level],
        )
        self.level += 1

    def build(
        self,
        proposals: LogitsProcessorOutput | None,
        verified_id: torch.Tensor,
        seq_lens: torch.Tensor,
        num_draft_tokens: int,
    ) -> tuple[torch.Tensor, ...]:
        """The trees to verify, once nothing grows any more: fields of EagleVerifyInput.

        `proposals` are those of the last beams, or None where there was no forward; verified_id, seq_lens
        [bs] are the roots.
        """
        last = (None, None) if proposals is None else (proposals.topk_p, proposals.topk_index)
        return self.kernels.build_tree(
            self.candidates, self.level, self.beams, *last, verified_id, seq_lens, num_draft_tokens
        )


def chain_links(requests: int, nodes: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Trees in which each node hangs on the one before: the nodes' depths [requests, nodes], and their mask
    and links as EagleVerifyInput has them.
    """
    row = torch.arange(requests * nodes, device=device).view(requests, nodes)
    depth = (row % nodes).contiguous()
    below = torch.where(depth < nodes - 1, depth + 1, -1)
    # Of 64 nodes the last sees all: in two's complement that is −1, which is what the shift gives.
    return depth, ((2 << depth) - 1).unsqueeze(2), row, below, torch.full_like(row, -1)


def column_bits(columns: int, device: torch.device) -> torch.Tensor:
    """Mask words with only bit c set, for each column c: int64 [columns, ceil(columns / 64)]."""
    column = torch.arange(columns, device=device)
    word = torch.arange(-(-columns // 64), device=device)
    return torch.where(column[:, None] // 64 == word, 1 << column[:, None] % 64, 0)
