"""What travels between the phases of a step. Restates sglang/srt/speculative/eagle_utils.py of v0.4.6.

EagleDraftInput lives from one step to the next, with one row per request. EagleStep, EagleVerifyInput and
EagleVerifyOutput live for one step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..kernels.tree_types import AcceptedPaths
from ..layers.dp_attention import GlobalStep
from ..layers.logits_processor import LogitsProcessorOutput
from ..layers.sampler import target_probs
from ..sampling.sampling_batch_info import SamplingBatchInfo

if TYPE_CHECKING:
    from ..managers.generation_result import GenerationBatchResult


@dataclass
class EagleDraftInput:
    """What drafting starts from: the last output token and the draft's proposals for the one after it."""

    hidden_states: torch.Tensor  # [bs, hidden] of the draft; inside a draft forward [rows, hidden]
    verified_id: torch.Tensor | None = None  # [bs]
    topk_p: torch.Tensor | None = None  # [bs, topk] float32
    topk_index: torch.Tensor | None = None  # [bs, topk]
    # Inside a draft forward: the row of hidden_states that each row is paired with, [rows]; None: its own
    hidden_rows: torch.Tensor | None = None

    _ROWS = ("hidden_states", "verified_id", "topk_p", "topk_index")

    def filter_batch(self, index: torch.Tensor) -> None:
        """Keep rows `index`, in that order (v0.4.6 keeps the first len(index) rows)."""
        for name in self._ROWS:
            setattr(self, name, getattr(self, name)[index])

    def rows(self, count: int) -> EagleDraftInput:
        """Views of the first `count` rows."""
        return EagleDraftInput(*(getattr(self, name)[:count] for name in self._ROWS))

    def copy_(self, other: EagleDraftInput) -> None:
        """Overwrite the first rows with those of `other`, unless that is where they were written."""
        for name in self._ROWS:
            mine, rows = getattr(self, name), getattr(other, name)
            if rows.data_ptr() != mine.data_ptr():
                mine[: len(rows)].copy_(rows)

    def merge_batch(self, other: EagleDraftInput) -> None:
        for name in self._ROWS:
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))


@dataclass
class EagleStep:
    """A step's slots and lengths on the device, from the step's one upload."""

    req_pool_indices: torch.Tensor  # [bs]
    seq_lens: torch.Tensor  # [bs] S
    output_positions: torch.Tensor  # [bs] output tokens so far
    draft_slots: torch.Tensor  # [bs, topk · (steps − 1)] scratch: free again before verification allocates
    verify_slots: torch.Tensor  # [bs, n]
    verify_lens: torch.Tensor  # [bs] S + n
    seq_lens_cpu: np.ndarray | None = None  # [bs] S on the host; None in what a graph records
    global_step: GlobalStep = GlobalStep()  # what the ranks of DP attention agreed on; nothing in a graph

    def planned(self, entries: int) -> np.ndarray | None:
        """ForwardBatch.seq_lens_cpu where every request gets `entries` more than S."""
        return None if self.seq_lens_cpu is None else self.seq_lens_cpu + entries

    def request_of_rows(self, width: int) -> torch.Tensor:
        """The request that each row belongs to, [bs · width]."""
        bs, device = len(self.seq_lens), self.seq_lens.device
        return torch.arange(bs, device=device).repeat_interleave(width, output_size=bs * width)


@dataclass
class EagleVerifyInput:
    """A tree of n tokens per request; node 0 is the root, the last output token."""

    step: EagleStep
    draft_token: torch.Tensor  # [bs, n]
    tree_mask: torch.Tensor  # [bs, n, 1] bits: node i sees node j
    positions: torch.Tensor  # [bs · n] S + depth
    retrieve_index: torch.Tensor  # [bs, n] row of each node in the flat batch
    retrieve_next_token: torch.Tensor  # [bs, n] first child, −1 for a leaf
    retrieve_next_sibling: torch.Tensor  # [bs, n] next child of the same parent, −1 for the last

    def accept(
        self,
        logits_output: LogitsProcessorOutput,
        info: SamplingBatchInfo | None,
        max_depth: int,
        threshold_single: float,
        threshold_acc: float,
        kernels: Any,
    ) -> AcceptedPaths:
        """Walk each tree along what the target would have said itself.

        `logits_output` has the target's logits [bs · n, vocab] or, for a greedy batch, only the best token of
        each row; `info` may then be None.
        """
        bs, n = self.draft_token.shape
        tree = (self.retrieve_index, self.retrieve_next_token, self.retrieve_next_sibling)
        logits = logits_output.next_token_logits
        if logits is None:
            checks, target_predict = logits_output.topk_p[:, 0], logits_output.topk_index
        else:
            checks, target_predict = logits.sum(-1), None
            row_to_req = self.step.request_of_rows(n)
            if info.penalties is not None:
                path_tokens, path_lens = self.paths()
                depth = self.positions - self.step.seq_lens[row_to_req]
                output_positions = self.step.output_positions[row_to_req] + depth
                logits = info.apply_logits_bias(logits, output_positions, row_to_req, path_tokens, path_lens)
            if info.is_all_greedy:
                target_predict = kernels.argmax(logits)
        where = (self.step.verify_slots, self.step.seq_lens, checks)
        if target_predict is not None:
            return kernels.verify_tree_greedy(
                self.draft_token, target_predict.view(bs, n), *tree, *where, max_depth
            )
        return kernels.tree_speculative_sampling_target_only(
            self.draft_token,
            target_probs(logits, info, row_to_req).view(bs, n, -1),
            *tree,
            *where,
            info.seeds,
            self.step.output_positions,
            max_depth,
            threshold_single,
            threshold_acc,
        )

    def rows(self, bs: int) -> EagleVerifyInput:
        """Views of the first `bs` requests."""
        has_rows = (torch.Tensor, np.ndarray)
        fields = {name: t[:bs] for name, t in vars(self.step).items() if isinstance(t, has_rows)}
        step = dataclasses.replace(self.step, **fields)
        n = self.draft_token.shape[1]
        per_request = (self.retrieve_index, self.retrieve_next_token, self.retrieve_next_sibling)
        return EagleVerifyInput(
            step,
            self.draft_token[:bs],
            self.tree_mask[:bs],
            self.positions[: bs * n],
            *(t[:bs] for t in per_request),
        )

    def paths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafted tokens on the way to each node, root left out: [bs · n, n − 1], and how many are real."""
        n = self.draft_token.shape[1]
        column = torch.arange(1, n, device=self.draft_token.device)
        on_path = (self.tree_mask >> column & 1).bool()  # [bs, n, n − 1]
        order = on_path.long().argsort(dim=-1, descending=True, stable=True)
        tokens = self.draft_token[:, None, 1:].expand(-1, n, -1).gather(2, order)
        return tokens.flatten(0, 1), on_path.sum(-1).flatten()


@dataclass
class EagleVerifyOutput:
    """What a verification leaves to the draft extend and to the host."""

    paths: AcceptedPaths  # its slots name where the nodes' KV stands now
    hidden_states: torch.Tensor  # [bs · n, hidden] of the target, at every node
    result: GenerationBatchResult  # what the host is told, on its way there

    def copy_(self, other: EagleVerifyOutput) -> None:
        """Take over what the draft extend needs of `other`; requests that it lacks have no path."""
        for mine, rows in zip(self.paths, other.paths, strict=True):
            mine[: len(rows)].copy_(rows)
            mine[len(rows) :].zero_()
        self.hidden_states[: len(other.hidden_states)].copy_(other.hidden_states)


def align_evict_mask_to_page_size(
    seq_lens: np.ndarray, kept: np.ndarray, evict_mask: np.ndarray, page_size: int
) -> np.ndarray:
    """Spare the page that holds the last kept token: freeing one slot of a page frees all of it.

    `evict_mask` [bs, n] over positions seq_lens[i] … seq_lens[i] + n − 1, of which the first kept[i] stay.
    """
    positions = seq_lens[:, None] + np.arange(evict_mask.shape[1])
    last_page = (seq_lens + kept - 1) // page_size
    return evict_mask & (positions // page_size > last_page[:, None])
