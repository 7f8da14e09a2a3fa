"""Scores of tokens under the model's own distribution: natural log-probabilities of the raw logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class LogprobRows(NamedTuple):
    """One row per scored token; tensors on the device, numpy arrays once read back."""

    token: Any  # [n] of the token itself
    top_values: Any  # [n, top_num] of the likeliest tokens, descending
    top_ids: Any  # [n, top_num]
    id_values: Any  # [n, m] of the token ids asked for


def gather_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top_num: int, token_ids: torch.Tensor, kernels: Any
) -> LogprobRows:
    """Score `tokens` [n] and `token_ids` [n, m], and find the top_num best; float32 `logits` [n, vocab]."""
    logprobs = torch.log_softmax(logits, dim=-1)
    top_values, top_ids = (
        kernels.top_k(logprobs, top_num) if top_num else (logprobs[:, :0], tokens[:, None][:, :0])
    )
    return LogprobRows(
        logprobs.gather(1, tokens[:, None])[:, 0], top_values, top_ids, logprobs.gather(1, token_ids)
    )
