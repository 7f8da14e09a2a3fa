"""From hidden states to float32 logits. Restates sglang/srt/layers/logits_processor.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from .logprobs import LogprobRows, gather_logprobs


@dataclass
class LogitsProcessorOutput:
    """One row for each of `last_rows`, or for every row of the forward."""

    next_token_logits: torch.Tensor | None  # [rows, vocab] float32; None if ForwardBatch.topk asked for less
    topk_p: torch.Tensor | None = None  # [rows, topk] float32 probabilities of the likeliest tokens
    topk_index: torch.Tensor | None = None  # [rows, topk] the tokens
    hidden_states: torch.Tensor | None = None  # as CaptureHiddenMode says, in the model's dtype
    input_logprobs: LogprobRows | None = None


class LogitsProcessor(nn.Module):
    def __init__(self, kernels: Any):
        super().__init__()
        self.kernels = kernels

    def forward(
        self,
        hidden_states: torch.Tensor,
        lm_head: torch.Tensor,
        forward_batch: ForwardBatch,
        aux_hidden_states: torch.Tensor | None = None,
        hot_token_id: torch.Tensor | None = None,
    ) -> LogitsProcessorOutput:
        """`hidden_states` [rows, hidden] is what enters the LM head; `lm_head` [vocab, hidden].

        `aux_hidden_states` [rows, any]: what is captured in its place. `hot_token_id` [vocab]: the tokens
        that the rows of `lm_head` are for, where those are not their own numbers.
        """
        kept = hidden_states if aux_hidden_states is None else aux_hidden_states
        last, last_kept = hidden_states, kept
        if (rows := forward_batch.last_rows) is not None:
            last_kept = kept[rows]
            last = last_kept if aux_hidden_states is None else hidden_states[rows]
        mode = forward_batch.capture_hidden_mode
        captured = {
            CaptureHiddenMode.NULL: None,
            CaptureHiddenMode.LAST: last_kept,
            CaptureHiddenMode.FULL: kept,
        }
        scored = None
        if (request := forward_batch.input_logprobs) is not None:
            logits = self.kernels.linear_float32(hidden_states[request.rows], lm_head)
            scored = gather_logprobs(
                logits, request.targets, request.top_num, request.token_ids, self.kernels
            )
        output = LogitsProcessorOutput(None, hidden_states=captured[mode], input_logprobs=scored)
        if forward_batch.topk is None:
            output.next_token_logits = self.kernels.linear_float32(last, lm_head)
        else:
            output.topk_p, output.topk_index = self.kernels.linear_topk(
                last, lm_head, forward_batch.topk, hot_token_id=hot_token_id
            )
        return output
