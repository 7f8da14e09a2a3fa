"""From logits to probabilities and to the next token.

Restates sglang/srt/layers/sampler.py. Plain decoding and the verification of a tree take the same
probabilities from `target_probs`, so that both follow one law. Upstream's verification ignores min_p at
v0.4.6.
"""

from __future__ import annotations

from typing import Any

import torch

from ..sampling.sampling_batch_info import SamplingBatchInfo


def target_probs(
    logits: torch.Tensor, info: SamplingBatchInfo, row_to_req: torch.Tensor | None = None
) -> torch.Tensor:
    """The law that the next token of each row has to follow.

    Temperature, then top-k, top-p and min-p, each on the renormalised rest of the one before. Ties at a
    boundary go to the lowest id. Top-p keeps the smallest set whose mass reaches top_p; min-p keeps what has
    at least min_p times the largest probability. A row that asks for no filter is the plain softmax whatever
    its neighbours ask for, and a greedy row is exactly one-hot.

    Args:
        logits: [rows, V], after penalties.
        info: parameters of the batch.
        row_to_req: int64 [rows], row of the batch for each row of logits; None if they are the same.

    Returns float32 [rows, V]; every row sums to one.
    """

    def of_rows(values: torch.Tensor) -> torch.Tensor:
        return (values if row_to_req is None else values[row_to_req]).unsqueeze(1)  # [rows, 1]

    logits = logits.float()
    if info.is_all_greedy:
        return _one_hot(logits)
    probs = torch.softmax(logits / of_rows(info.temperatures), dim=-1)  # [rows, V]
    if info.need_top_k or info.need_top_p:
        filtered = _filter_sorted(probs, info, of_rows)
        asks = (of_rows(info.top_ks) < info.vocab_size) | (of_rows(info.top_ps) < 1)
        probs = torch.where(asks, filtered, probs)
    if info.need_min_p:
        min_ps = of_rows(info.min_ps)
        kept = probs.masked_fill(probs < min_ps * probs.amax(dim=-1, keepdim=True), 0)
        probs = _renormalised(kept, min_ps > 0)
    if info.is_any_greedy:
        probs = torch.where(of_rows(info.top_ks) == 1, _one_hot(logits), probs)
    return probs


def _filter_sorted(probs: torch.Tensor, info: SamplingBatchInfo, of_rows: Any) -> torch.Tensor:
    """Top-k and top-p of every row; the only place that sorts the vocabulary."""
    ordered, ids = torch.sort(
        probs, dim=-1, descending=True, stable=True
    )  # stable: equal ones stay in id order
    if info.need_top_k:
        top_ks = of_rows(info.top_ks)
        ranks = torch.arange(info.vocab_size, device=ordered.device)
        ordered = _renormalised(ordered.masked_fill(ranks >= top_ks, 0), top_ks < info.vocab_size)
    if info.need_top_p:
        top_ps = of_rows(info.top_ps)
        # float64: over a large vocabulary a float32 running sum drifts by more than a rare token's
        # probability.
        before = torch.cumsum(ordered, dim=-1, dtype=torch.float64) - ordered  # mass of the better tokens
        # The best one always stays: a top_p below float32's range counts as zero.
        cut = (before >= top_ps) & (before > 0) & (top_ps < 1)
        ordered = _renormalised(ordered.masked_fill(cut, 0), top_ps < 1)
    return torch.zeros_like(probs).scatter_(1, ids, ordered)


def _renormalised(probs: torch.Tensor, asks: torch.Tensor) -> torch.Tensor:
    """Divide the rows that ask for it by their sum, and the others by exactly one."""
    return probs / torch.where(asks, probs.sum(dim=-1, keepdim=True), 1.0)


def _one_hot(logits: torch.Tensor) -> torch.Tensor:
    """float32 [rows, V] with a one at the lowest id among the largest logits of each row."""
    vocab_size = logits.shape[-1]
    ids = torch.arange(vocab_size, device=logits.device)
    best = torch.where(logits == logits.amax(dim=-1, keepdim=True), ids, vocab_size - 1).amin(
        dim=-1, keepdim=True
    )
    return torch.zeros_like(logits).scatter_(1, best, 1.0)


class Sampler:
    """Draws one token per row.

    Args:
        kernels: what `load_kernels` returned; uses its argmax and sample_from_probs.
    """

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    def forward(
        self, logits: torch.Tensor, info: SamplingBatchInfo, output_positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the next token ids, int64 [bs].

        Args:
            logits: [bs, V], after `info.apply_logits_bias`.
            info: parameters of the batch, in the same order.
            output_positions: int64 [bs]; the number of output tokens so far. With the request's seed it fixes
                the random number, so neither the batch nor its order changes what is drawn.
        """
        if info.is_all_greedy:
            return self.kernels.argmax(logits)
        return self.kernels.sample_from_probs(target_probs(logits, info), info.seeds, output_positions)
