"""Penalties, minimum length and logit bias of a batch, exact along every path of a draft tree.

Restates sglang/srt/sampling/penaltylib. Upstream ("relaxed") counts only the token that a tree starts from
and gives all its nodes the same bias, so a token repeated inside one accepted run escapes its penalty; here
each row counts the tokens on its own path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..model_executor.device_io import send

if TYPE_CHECKING:
    from .sampling_params import SamplingParams

# Added to nothing: it replaces the logit of a forbidden token. Finite, so that a row in which everything is
# forbidden still has a softmax, and small enough that its probability is exactly zero beside any real logit.
FORBIDDEN_LOGIT = -1e30


class Penalties:
    """The state of a batch of which at least one request changes its logits.

    Args:
        reqs: the requests, in row order.
        vocab_size: V.
        device: where the logits live.

    `counts` [bs, V] counts output tokens and `in_prompt` [bs, V] marks prompt tokens; both are None while no
    request needs them. They hold whole numbers, so the order of additions does not matter.
    """

    def __init__(self, reqs: list, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.params: list[SamplingParams] = [req.sampling_params for req in reqs]
        self.counts: torch.Tensor | None = None
        self.in_prompt: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.stops: torch.Tensor | None = None
        if any(params.needs_counts for params in self.params):
            self.counts = self._zeros(torch.float32)
            self._mark(
                self.counts, [req.output_ids if req.sampling_params.needs_counts else () for req in reqs]
            )
        if any(params.repetition_penalty != 1.0 for params in self.params):
            self.in_prompt = self._zeros(torch.bool)
            repeats = [req.sampling_params.repetition_penalty != 1.0 for req in reqs]
            self._mark(
                self.in_prompt,
                [req.origin_input_ids if on else () for req, on in zip(reqs, repeats, strict=True)],
            )
        if any(params.logit_bias for params in self.params):
            self.bias = self._zeros(torch.float32)
            amounts = [amount for params in self.params for amount in params.logit_bias.values()]
            self._mark(self.bias, [params.logit_bias for params in self.params], torch.tensor(amounts))
        if any(params.min_new_tokens for params in self.params):
            self.stops = self._zeros(torch.bool)
            self._mark(self.stops, [req.eos_token_ids | req.sampling_params.stop_token_ids for req in reqs])
        self._refresh()

    @classmethod
    def neutral(cls, params: list[SamplingParams], vocab_size: int, device: torch.device | str) -> Penalties:
        """Rows of requests that change nothing, for merging with a batch that does."""
        penalties = cls([], vocab_size, device)
        penalties.params = params
        penalties._refresh()
        return penalties

    def _zeros(self, dtype: torch.dtype, rows: int | None = None) -> torch.Tensor:
        return torch.zeros(
            len(self.params) if rows is None else rows, self.vocab_size, dtype=dtype, device=self.device
        )

    def _mark(self, table: torch.Tensor, tokens_of_rows: list, amounts: torch.Tensor | None = None) -> None:
        """Add one (or `amounts`, in the same order) to the table's cells (row, token)."""
        rows = [row for row, tokens in enumerate(tokens_of_rows) for _ in range(len(tokens))]
        if not rows:
            return
        tokens = [token for tokens in tokens_of_rows for token in tokens]
        index = send(torch.tensor([rows, tokens], dtype=torch.int64), self.device)  # [2, marks]
        if amounts is None:
            values = torch.ones(len(rows), dtype=table.dtype, device=self.device)
        else:
            values = send(amounts.to(table.dtype), self.device)
        adds = table.dtype != torch.bool
        table.index_put_((index[0], index[1]), values, accumulate=adds)

    def _refresh(self) -> None:
        """Rebuild what follows from the parameters; called when rows change, not in every step."""
        columns = [
            [params.frequency_penalty for params in self.params],
            [params.presence_penalty for params in self.params],
            [params.repetition_penalty for params in self.params],
            [params.min_new_tokens for params in self.params],
        ]
        self._has_frequency = any(columns[0])
        self._has_presence = any(columns[1])
        self._has_repetition = any(value != 1.0 for value in columns[2])
        # float64 holds every token count exactly, so that one upload serves all four.
        packed = send(torch.tensor(columns, dtype=torch.float64), self.device)  # [4, bs]
        self._frequency, self._presence, self._repetition = packed[:3].float()
        self._minimum = packed[3].long()

    def filter(self, keep: list[int], index: torch.Tensor) -> None:
        """Keep the rows `keep`, in that order; `index` [len(keep)] holds the same numbers on the device."""
        self.params = [self.params[row] for row in keep]
        needed = {
            "counts": any(params.needs_counts for params in self.params),
            "in_prompt": any(params.repetition_penalty != 1.0 for params in self.params),
            "bias": any(params.logit_bias for params in self.params),
            "stops": any(params.min_new_tokens for params in self.params),
        }
        for name, is_needed in needed.items():
            table = getattr(self, name)
            setattr(self, name, table.index_select(0, index) if is_needed and table is not None else None)
        self._refresh()

    def merge(self, other: Penalties) -> None:
        """Append the rows of `other`; a side without a table has no request that needs it, so zeros do."""
        for name in ("counts", "in_prompt", "bias", "stops"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is None and theirs is None:
                continue
            dtype = (mine if theirs is None else theirs).dtype
            mine = self._zeros(dtype) if mine is None else mine
            theirs = self._zeros(dtype, len(other.params)) if theirs is None else theirs
            setattr(self, name, torch.cat((mine, theirs)))
        self.params = self.params + other.params
        self._refresh()

    def append(self, tokens: torch.Tensor, lens: torch.Tensor) -> None:
        """Count new output tokens: the first `lens` [bs] of each row of `tokens` [bs, w]."""
        if self.counts is not None:
            _add_tokens(self.counts, tokens, lens)

    def apply(
        self,
        logits: torch.Tensor,
        output_positions: torch.Tensor,
        row_to_req: torch.Tensor | None = None,
        path_tokens: torch.Tensor | None = None,
        path_lens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return changed float32 logits [rows, V]; the arguments are those of
        `SamplingBatchInfo.apply_logits_bias`.

        The order is repetition (on the model's own logits), frequency, presence, bias, and the minimum length
        last, so that no bias brings a forbidden token back.
        """
        logits = logits.float()

        def of_rows(values: torch.Tensor) -> torch.Tensor:
            return values if row_to_req is None else values[row_to_req]

        if self.counts is not None:
            counts = of_rows(self.counts)  # [rows, V]
            if path_tokens is not None:
                counts = counts.clone() if row_to_req is None else counts  # indexing has made a copy already
                _add_tokens(counts, path_tokens, path_lens)
            if self._has_repetition:
                repetition = of_rows(self._repetition).unsqueeze(1)  # [rows, 1]
                seen = (counts > 0) | of_rows(self.in_prompt)  # [rows, V]
                repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
                logits = torch.where(seen, repeated, logits)
            if self._has_frequency:
                logits = logits - of_rows(self._frequency).unsqueeze(1) * counts
            if self._has_presence:
                logits = logits - of_rows(self._presence).unsqueeze(1) * (counts > 0)
        if self.bias is not None:
            logits = logits + of_rows(self.bias)
        if self.stops is not None:
            too_short = output_positions < of_rows(self._minimum)  # [rows]
            logits = logits.masked_fill(too_short.unsqueeze(1) & of_rows(self.stops), FORBIDDEN_LOGIT)
        return logits


def _add_tokens(counts: torch.Tensor, tokens: torch.Tensor, lens: torch.Tensor) -> None:
    """counts[row, tokens[row, j]] += 1 for j < lens[row], in place; later tokens are never an index."""
    valid = torch.arange(tokens.shape[1], device=tokens.device) < lens.unsqueeze(1)  # [rows, w]
    counts.scatter_add_(1, torch.where(valid, tokens, 0), valid.to(counts.dtype))
