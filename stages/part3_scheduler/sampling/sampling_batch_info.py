"""The sampling parameters of a batch, kept across decode steps.

Restates sglang/srt/sampling/sampling_batch_info.py. The truth is a pair of small host arrays; the device gets
a copy when a step first needs one after the rows have changed, so a greedy batch never uploads anything.
"""

from __future__ import annotations

import numpy as np
import torch

from ..model_executor.device_io import send
from .penaltylib import Penalties
from .sampling_params import SamplingParams


class SamplingBatchInfo:
    """Sampling parameters of `bs` requests; make one with `from_reqs`.

    On the device, each [bs]: `temperatures`, `top_ps`, `min_ps` float32; `top_ks`, `seeds` int64. A greedy
    request stands as temperature 1 and top_k 1, and a request without top_k as top_k V, as upstream.
    """

    def __init__(
        self, vocab_size: int, device: torch.device | str, params: list[SamplingParams], seeds: list[int]
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.penalties: Penalties | None = None
        self._params = params
        rows = [
            (1.0, 1.0, 0.0) if item.is_greedy else (item.temperature, item.top_p, item.min_p)
            for item in params
        ]
        self._floats = np.array(rows, dtype=np.float32).reshape(-1, 3).T  # [3, bs]
        top_ks = [1 if item.is_greedy else vocab_size if item.top_k == -1 else item.top_k for item in params]
        self._ints = np.array([top_ks, seeds], dtype=np.int64)  # [2, bs]
        self._rows_changed()

    @classmethod
    def from_reqs(cls, reqs: list, vocab_size: int, device: torch.device | str) -> SamplingBatchInfo:
        """Collect the parameters of requests (`sampling_params`, `seed`, and their tokens for penalties)."""
        params = [req.sampling_params for req in reqs]
        info = cls(vocab_size, device, params, [req.seed for req in reqs])
        if any(item.needs_penalties for item in params):
            info.penalties = Penalties(reqs, vocab_size, device)
        return info

    def __len__(self) -> int:
        return len(self._params)

    def _rows_changed(self) -> None:
        self._on_device: tuple[torch.Tensor, torch.Tensor] | None = None
        greedy = self._ints[0] == 1
        self.is_all_greedy = bool(greedy.all())
        self.is_any_greedy = bool(greedy.any())
        self.need_top_k = bool((~greedy & (self._ints[0] < self.vocab_size)).any())
        self.need_top_p = bool((self._floats[1] < 1).any())
        self.need_min_p = bool((self._floats[2] > 0).any())

    def _uploaded(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._on_device is None:
            self._on_device = (
                send(torch.from_numpy(np.ascontiguousarray(self._floats)), self.device),
                send(torch.from_numpy(np.ascontiguousarray(self._ints)), self.device),
            )
        return self._on_device

    @property
    def temperatures(self) -> torch.Tensor:
        return self._uploaded()[0][0]

    @property
    def top_ps(self) -> torch.Tensor:
        return self._uploaded()[0][1]

    @property
    def min_ps(self) -> torch.Tensor:
        return self._uploaded()[0][2]

    @property
    def top_ks(self) -> torch.Tensor:
        return self._uploaded()[1][0]

    @property
    def seeds(self) -> torch.Tensor:
        return self._uploaded()[1][1]

    def filter_batch(self, keep: list[int]) -> None:
        """Keep the rows `keep`, in that order."""
        keep = [int(row) for row in keep]
        if keep == list(range(len(self))):
            return
        self._params = [self._params[row] for row in keep]
        self._floats = self._floats[:, keep]
        self._ints = self._ints[:, keep]
        if self.penalties is not None:
            if any(item.needs_penalties for item in self._params):
                self.penalties.filter(keep, send(torch.tensor(keep, dtype=torch.int64), self.device))
            else:
                self.penalties = None
        self._rows_changed()

    def merge_batch(self, other: SamplingBatchInfo) -> None:
        """Append the rows of `other`, which must not be used afterwards."""
        if self.penalties is not None or other.penalties is not None:
            mine = self.penalties or Penalties.neutral(self._params, self.vocab_size, self.device)
            mine.merge(other.penalties or Penalties.neutral(other._params, self.vocab_size, self.device))
            self.penalties = mine
        self._params = self._params + other._params
        self._floats = np.concatenate((self._floats, other._floats), axis=1)
        self._ints = np.concatenate((self._ints, other._ints), axis=1)
        self._rows_changed()

    @property
    def is_plain_greedy(self) -> bool:
        """Every request takes the likeliest token of the model's own logits."""
        return self.is_all_greedy and self.penalties is None

    def append_tokens(self, tokens: torch.Tensor, lens: torch.Tensor) -> None:
        """Tell the penalties which output tokens were committed; does nothing without penalties.

        Args:
            tokens: int64 [bs, w], on the device.
            lens: int64 [bs]; only tokens[b, j] with j < lens[b] count.
        """
        if self.penalties is not None:
            self.penalties.append(tokens, lens)

    def apply_logits_bias(
        self,
        logits: torch.Tensor,
        output_positions: torch.Tensor,
        row_to_req: torch.Tensor | None = None,
        path_tokens: torch.Tensor | None = None,
        path_lens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Penalties, logit bias and minimum length; without any of them, `logits` itself is returned.

        Args:
            logits: [rows, V].
            output_positions: int64 [rows]; the number of output tokens before the one that this row decides.
            row_to_req: int64 [rows], the row of the batch that each row of logits belongs to; None if they
                are the same.
            path_tokens: int64 [rows, depth]; for a tree, the drafted tokens from the root's child down to
                this row's node. The root is an output token and counted already.
            path_lens: int64 [rows]; how many of path_tokens are real.

        Returns float32 [rows, V]; the logits passed in are not changed.
        """
        if self.penalties is None:
            return logits
        return self.penalties.apply(logits, output_positions, row_to_req, path_tokens, path_lens)
