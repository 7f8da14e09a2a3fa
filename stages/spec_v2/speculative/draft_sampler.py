"""Drafts that are drawn instead of being the likeliest, and the law that each was drawn from.

Restates sample_draft_proposal of sglang/srt/speculative/spec_utils.py (#30303). Verification is exact
for any law, if it is the very one; the closer to the target's, the more is accepted. So it is filtered as the
target's is, where upstream's is a softmax at the request's temperature. And a draft with a vocabulary of its
own has a law over all tokens here; upstream cannot use such a draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..layers.logits_processor import LogitsProcessorOutput
from ..layers.sampler import target_probs
from ..sampling.sampling_batch_info import SamplingBatchInfo
from ..sampling.sampling_params import SamplingParams


class StaticSamplingInfo(SamplingBatchInfo):
    """Parameters of `size` requests that stay where they are on the device, for CUDA graphs that draw.

    Only with `filters` may a request ask for top-k or top-p, which sort the vocabulary for every draft.
    """

    def __init__(self, size: int, vocab_size: int, device: torch.device, filters: bool):
        super().__init__(vocab_size, device, [SamplingParams(temperature=0)] * size, [0] * size)
        self.is_all_greedy, self.is_any_greedy = False, True
        self.need_top_k = self.need_top_p = filters
        self.need_min_p = True

    def copy_(self, other: SamplingBatchInfo) -> None:
        """Take over the parameters of `other`; requests that it lacks keep theirs."""
        for mine, rows in zip(self._uploaded(), other._uploaded(), strict=True):
            mine[:, : len(other)].copy_(rows)


@dataclass
class DraftSampler:
    """
    Args:
        info: parameters of the batch whose drafts these are.
        kernels: what load_kernels returned.
        hot_token_id: int64 [draft vocabulary], the tokens that the draft's logits are for; None: all.
    """

    info: SamplingBatchInfo
    kernels: Any
    hot_token_id: torch.Tensor | None = None

    def draw(self, output: LogitsProcessorOutput, output_positions: torch.Tensor) -> torch.Tensor:
        """Make `topk_index` of `output` one token for each request, drawn from its logits.

        Args:
            output: with the logits of one row for each request.
            output_positions: int64 [bs], output position of the token that is drawn.

        Returns the law that it was drawn from, float32 [bs, V].
        """
        logits, vocab = output.next_token_logits, self.info.vocab_size
        if self.hot_token_id is not None:
            whole = logits.new_full((len(logits), vocab), float("-inf"))
            logits = whole.index_copy_(1, self.hot_token_id, logits)
        probs = target_probs(logits, self.info)
        # A draft that gives no numbers drafts token 0, and is sure of it.
        certain = (torch.arange(vocab, device=probs.device) == 0).float()
        probs = torch.where(probs.sum(-1, keepdim=True).isfinite(), probs, certain)
        drawn = self.kernels.sample_from_probs(
            probs, self.info.seeds, output_positions, self.kernels.USE_DRAFT
        ).unsqueeze(1)
        output.topk_index, output.topk_p = drawn, probs.gather(1, drawn)
        return probs
