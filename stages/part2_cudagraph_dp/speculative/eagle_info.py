"""What travels between the phases of a step. Restates sglang/srt/speculative/eagle_utils.py of v0.4.6.

EagleDraftInput lives from one step to the next, with one row per request. EagleStep, EagleVerifyInput and
EagleVerifyOutput live for one step. A request's drafts are a chain, each behind the one before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

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


@dataclass
class EagleStep:
    """A step's slots and lengths on the device, from the step's one upload."""

    req_pool_indices: torch.Tensor  # [bs]
    seq_lens: torch.Tensor  # [bs] S
    output_positions: torch.Tensor  # [bs] output tokens so far
    verify_slots: torch.Tensor  # [bs, n] for the target's KV, and before that for the draft's own
    verify_lens: torch.Tensor  # [bs] S + n
    seq_lens_cpu: np.ndarray | None = None  # [bs] S on the host; None in what a graph records

    def planned(self, entries: int) -> np.ndarray | None:
        """ForwardBatch.seq_lens_cpu where every request gets `entries` more than S."""
        return None if self.seq_lens_cpu is None else self.seq_lens_cpu + entries

    def request_of_rows(self, width: int) -> torch.Tensor:
        """The request that each row belongs to, [bs · width]."""
        bs, device = len(self.seq_lens), self.seq_lens.device
        return torch.arange(bs, device=device).repeat_interleave(width, output_size=bs * width)


class AcceptedPaths(NamedTuple):
    """How far the target agreed with each chain: column j is its j-th token, the root first."""

    tokens: torch.Tensor  # [bs, n] what the target says after each token, 0 behind the path
    nodes: torch.Tensor  # [bs, n] j, −1 behind the path
    is_finite: torch.Tensor  # float32 [bs] 0, or NaN if the logits after one of its tokens were not finite
    lens: torch.Tensor  # [bs] accepted drafts and the root
    kv_lens: torch.Tensor  # [bs] S + lens
    last_rows: torch.Tensor  # [bs] where the path ends among bs · n rows
    verified_id: torch.Tensor  # [bs] its last token


@dataclass
class EagleVerifyInput:
    """A chain of n tokens per request; the first is the root, the last output token."""

    step: EagleStep
    draft_token: torch.Tensor  # [bs, n]

    @property
    def positions(self) -> torch.Tensor:
        """[bs · n] S + j."""
        column = torch.arange(self.draft_token.shape[1], device=self.draft_token.device)
        return (self.step.seq_lens.unsqueeze(1) + column).flatten()

    @property
    def tree_mask(self) -> torch.Tensor:
        """[bs, n, 1] bits: token i sees tokens 0 … i."""
        bs, n = self.draft_token.shape
        column = torch.arange(n, device=self.draft_token.device)
        return ((2 << column) - 1).view(1, n, 1).expand(bs, -1, -1)

    def accept(
        self, logits_output: LogitsProcessorOutput, info: SamplingBatchInfo | None, kernels: Any
    ) -> AcceptedPaths:
        """Choose a token behind each of the chain's as plain decoding would, and keep what agrees with it.

        Plain decoding draws each token with a number that depends on its position alone, so this is its very
        text, sampled or not. `logits_output` has the target's logits [bs · n, vocab] or, for a greedy batch,
        only the best token of each row; `info` may then be None.
        """
        bs, n = self.draft_token.shape
        logits = logits_output.next_token_logits
        if logits is None:
            checks, target_predict = logits_output.topk_p[:, 0], logits_output.topk_index
        else:
            checks = logits.sum(-1)
            row_to_req = self.step.request_of_rows(n)
            depth = self.positions - self.step.seq_lens[row_to_req]
            output_positions = self.step.output_positions[row_to_req] + depth
            if info.is_all_greedy:
                target_predict = kernels.argmax(logits)
            else:
                probs = target_probs(logits, info, row_to_req)
                target_predict = kernels.sample_from_probs(probs, info.seeds[row_to_req], output_positions)
        return self._paths(target_predict.view(bs, n), checks.view(bs, n))

    def _paths(self, target_predict: torch.Tensor, checks: torch.Tensor) -> AcceptedPaths:
        """Each chain up to its first token that the target would not have said, [bs, n] both."""
        bs, n = target_predict.shape
        column = torch.arange(n, device=target_predict.device)
        agrees = self.draft_token[:, 1:] == target_predict[:, :-1]
        lens = 1 + agrees.long().cumprod(dim=1).sum(1)
        there = column < lens.unsqueeze(1)
        tokens = torch.where(there, target_predict, 0)
        return AcceptedPaths(
            tokens=tokens,
            nodes=torch.where(there, column, -1),
            is_finite=torch.where(there, checks * 0, 0).sum(1),
            lens=lens,
            kv_lens=self.step.seq_lens + lens,
            last_rows=torch.arange(0, bs * n, n, device=lens.device) + lens - 1,
            verified_id=tokens.gather(1, lens.unsqueeze(1) - 1).squeeze(1),
        )


@dataclass
class EagleVerifyOutput:
    """What a verification leaves to the draft extend and to the host."""

    paths: AcceptedPaths
    hidden_states: torch.Tensor  # [bs · n, hidden] of the target, at every token
    result: GenerationBatchResult  # what the host is told, on its way there

    def rows(self, bs: int) -> EagleVerifyOutput:
        """Views of the first `bs` requests."""
        n = self.paths.nodes.shape[1]
        paths = AcceptedPaths(*(t[:bs] for t in self.paths))
        # The next round starts from it; other graphs may have used its memory by then.
        paths = paths._replace(verified_id=paths.verified_id.clone())
        return EagleVerifyOutput(paths, self.hidden_states[: bs * n], self.result)
