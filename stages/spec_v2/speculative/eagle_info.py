"""What travels between the phases of a step. Restates sglang/srt/speculative/eagle_info.py.

All of it lives for one step. What the next step starts from stands in the future map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.tree_types import AcceptedPaths
from ..layers.logits_processor import LogitsProcessorOutput
from ..layers.sampler import target_probs
from ..managers.overlap_utils import DecodeStep, FutureMap
from ..sampling.sampling_batch_info import SamplingBatchInfo

if TYPE_CHECKING:
    from ..managers.generation_result import GenerationBatchResult


@dataclass
class EagleDraftInput:
    """What drafting starts from: the last output token and the draft's proposals for the one after it."""

    # [bs, hidden] of the draft; inside a draft forward [rows, hidden]; None where the draft reads none
    hidden_states: torch.Tensor | None
    verified_id: torch.Tensor | None = None  # [bs]
    # Of a draft with a module for each step, here as below: a chain, so that topk is the number of steps
    topk_p: torch.Tensor | None = None  # [bs, topk] float32
    topk_index: torch.Tensor | None = None  # [bs, topk]
    # What topk_index was drawn from, where it was drawn: [bs, V], of a chain [bs, steps, V]
    draft_probs: torch.Tensor | None = None
    # Inside a draft forward: the row of hidden_states that each row is paired with, [rows]; None: its own
    hidden_rows: torch.Tensor | None = None
    # Which of the modules runs, and the pairs that it will run once more
    module: int = 0
    front_tokens: torch.Tensor | None = None  # [bs, steps − 1]
    front_hidden: torch.Tensor | None = None  # [bs, steps − 1, any]

    @staticmethod
    def init_future_map(future_map: FutureMap, topk: int, hidden_size: int, dtype: torch.dtype) -> None:
        """`hidden_size` 0: the draft reads no hidden states."""
        if hidden_size:
            future_map.add_draft_state("hidden_states", (hidden_size,), dtype)
        future_map.add_draft_state("topk_p", (topk,), torch.float32)
        future_map.add_draft_state("topk_index", (topk,), torch.int64)

    @classmethod
    def resolve(cls, future_map: FutureMap, step: DecodeStep, is_drawn: bool = False) -> EagleDraftInput:
        """`is_drawn`: with the laws that proposals were drawn from."""
        unread = ("front_tokens", "front_hidden", *(() if is_drawn else ("draft_probs",)))
        state = {
            name: rows[step.req_pool_indices]
            for name, rows in future_map.draft_state.items()
            if name not in unread
        }
        return cls(**{"hidden_states": None} | state, verified_id=step.output_tokens)

    def stash(self, future_map: FutureMap, req_pool_indices: torch.Tensor) -> None:
        """Leave it to the next step."""
        state = {name: getattr(self, name) for name in future_map.draft_state}
        known = {name: tensor for name, tensor in state.items() if tensor is not None}
        future_map.stash(req_pool_indices, self.verified_id, **known)


@dataclass
class EagleVerifyInput:
    """A tree of n tokens per request; node 0 is the root, the last output token."""

    step: DecodeStep
    verify_slots: torch.Tensor  # [bs, n] of positions S … S + n − 1
    draft_token: torch.Tensor  # [bs, n]
    tree_mask: torch.Tensor  # [bs, n, 1] bits: node i sees node j
    positions: torch.Tensor  # [bs · n] S + depth
    retrieve_index: torch.Tensor  # [bs, n] row of each node in the flat batch
    retrieve_next_token: torch.Tensor  # [bs, n] first child, −1 for a leaf
    retrieve_next_sibling: torch.Tensor  # [bs, n] next child of the same parent, −1 for the last
    # [bs, n − 1, V] of a chain that was drawn: what each draft was drawn from
    draft_probs: torch.Tensor | None = None

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
        where = (self.verify_slots, self.step.seq_lens, checks)
        if target_predict is not None:
            return kernels.verify_tree_greedy(
                self.draft_token, target_predict.view(bs, n), *tree, *where, max_depth
            )
        probs = target_probs(logits, info, row_to_req).view(bs, n, -1)
        numbers = (info.seeds, self.step.output_positions)
        if self.draft_probs is not None:
            return kernels.chain_speculative_sampling(
                self.draft_token, probs, self.draft_probs, self.retrieve_index, *where, *numbers
            )
        return kernels.tree_speculative_sampling_target_only(
            self.draft_token,
            probs,
            *tree,
            *where,
            *numbers,
            max_depth,
            threshold_single,
            threshold_acc,
        )

    def rows(self, bs: int) -> EagleVerifyInput:
        """Views of the first `bs` requests."""
        n = self.draft_token.shape[1]
        links = (self.retrieve_index, self.retrieve_next_token, self.retrieve_next_sibling)
        return EagleVerifyInput(
            self.step.rows(bs),
            self.verify_slots[:bs],
            self.draft_token[:bs],
            self.tree_mask[:bs],
            self.positions[: bs * n],
            *(t[:bs] for t in links),
            None if self.draft_probs is None else self.draft_probs[:bs],
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
