"""Growing the draft tree and choosing what of it to verify.

Restates the Python side of build_eagle_tree.py and select_top_k_tokens of eagle_utils.py, both of v0.4.6.

A tree grows by levels. Each level keeps `topk` beams, and every beam proposes `topk` children. All
children are remembered as candidates with the product of probabilities along their path; from all levels
together the best n − 1 are verified. Candidates are numbered flat: level 1 has 0 … topk − 1, level i + 1 the
topk² from topk + topk² · (i − 1) on, child c of beam b being number b · topk + c of its level.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Beams:
    """The beams of one level, with what the next draft forward needs."""

    scores: torch.Tensor  # [bs, topk] product of probabilities from the root
    input_ids: torch.Tensor  # [bs, topk]
    hidden_states: torch.Tensor  # [bs, topk, hidden] of the parent
    parent_beam: torch.Tensor | None  # [bs, topk] beam of the level before; None at level 1


@dataclass
class DraftTree:
    """Candidates of all levels so far."""

    topk: int
    score_list: list[torch.Tensor] = field(default_factory=list)  # [bs, topk], then [bs, topk²] each
    token_list: list[torch.Tensor] = field(default_factory=list)  # the same shapes
    # Candidate that each block of topk children hangs on: [bs, topk + 1], then [bs, topk] each.
    parents_list: list[torch.Tensor] = field(default_factory=list)

    def first_level(
        self, topk_p: torch.Tensor, topk_index: torch.Tensor, hidden_states: torch.Tensor
    ) -> Beams:
        """Children of the root: topk_p, topk_index [bs, topk]; hidden_states [bs, hidden]."""
        bs, topk = topk_p.shape
        # −1 stands for the root, the parent of block 0; blocks 1 … topk hang on candidates 0 … topk − 1.
        self.parents_list.append(torch.arange(-1, topk, device=topk_p.device).expand(bs, -1))
        self._record(topk_p, topk_index)
        return Beams(topk_p, topk_index, hidden_states[:, None].expand(-1, topk, -1), None)

    def next_level(
        self,
        beams: Beams,
        topk_p: torch.Tensor,
        topk_index: torch.Tensor,
        hidden_states: torch.Tensor,
        kernels: Any,
    ) -> Beams:
        """Children of `beams`, of which the best topk are the next beams.

        topk_p, topk_index [bs · topk, topk]; hidden_states [bs · topk, hidden].
        """
        first_candidate = sum(s.shape[1] for s in self.score_list)
        scores, tokens = self.last_level(beams, topk_p, topk_index)
        best_scores, best = kernels.top_k(scores, self.topk)  # [bs, topk]
        self.parents_list.append(best + first_candidate)
        parent = best // self.topk
        hidden = hidden_states.view(*beams.scores.shape, -1)
        hidden = hidden.gather(1, parent[:, :, None].expand(-1, -1, hidden.shape[-1]))
        return Beams(best_scores, tokens.gather(1, best), hidden, parent)

    def last_level(
        self, beams: Beams, topk_p: torch.Tensor, topk_index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Children of `beams` that nothing grows from; their scores and tokens, [bs, topk²] each."""
        scores = (beams.scores[:, :, None] * topk_p.view(*beams.scores.shape, -1)).flatten(1)
        return self._record(scores, topk_index.view(scores.shape))

    def select(self, count: int, kernels: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The best `count` candidates: flat numbers, ascending, and tokens [bs, count]; and the parent list.

        A child never scores above its parent, and equal scores go to the lower number, which is the
        parent's: so whatever is selected has its ancestors selected too.
        """
        scores, tokens = torch.cat(self.score_list, 1), torch.cat(self.token_list, 1)
        selected = kernels.top_k(scores, count)[1].sort(dim=-1).values
        return selected, tokens.gather(1, selected), torch.cat(self.parents_list, 1)

    def _record(self, scores: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.score_list.append(scores)
        self.token_list.append(tokens)
        return scores, tokens


def column_bits(columns: int, device: torch.device) -> torch.Tensor:
    """Mask words with only bit c set, for each column c: int64 [columns, ceil(columns / 64)]."""
    column = torch.arange(columns, device=device)
    word = torch.arange(-(-columns // 64), device=device)
    return torch.where(column[:, None] // 64 == word, 1 << column[:, None] % 64, 0)
