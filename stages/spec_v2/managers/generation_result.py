"""What a step gives each request. Restates GenerationBatchResult of sglang/srt/managers/scheduler.py."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from ..layers.logprobs import LogprobRows
from ..model_executor.device_io import Packed, Readback, pack


@dataclass
class GenerationBatchResult:
    """What one step gives each request: on the device until `read`, on the host after it.

    Request i gets tokens next_token_ids[i, j] for every j with accept_index[i, j] ≥ 0; all columns (one)
    where nothing was drafted. Rows of the flat fields are i · width + j.
    """

    next_token_ids: torch.Tensor | np.ndarray  # [bs, width]
    # [bs] on the device a number, finite only where the target's logits held no NaN or infinity; on the host
    # a list of bool
    is_finite: torch.Tensor | list[bool]
    # [bs, width] number of the drafted token, −1 behind the accepted
    accept_index: torch.Tensor | np.ndarray | None = None
    logprobs: LogprobRows | None = None  # rows: [bs · width]
    hidden_states: torch.Tensor | np.ndarray | None = None  # [bs · width, hidden] float32
    input_logprobs: LogprobRows | None = None  # rows as in ModelWorkerBatch.input_logprobs
    num_draft_tokens: int = 0  # nodes of each request's tree, root included; 0 where nothing was drafted
    packed: Packed | None = field(default=None, repr=False)  # all of the above on the device, once `pack` ran
    readback: Readback | None = field(default=None, repr=False)
    _on_host: GenerationBatchResult | None = field(default=None, init=False, repr=False)
    _reading: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    _PLAIN = ("next_token_ids", "is_finite", "accept_index", "hidden_states")
    _SCORED = ("logprobs", "input_logprobs")

    def start_read(self, readback: Readback | None = None) -> GenerationBatchResult:
        """Send everything on its way to the host; whatever is launched from now on need not be waited for."""
        self.readback = readback or Readback()
        self.readback.copy(self.packed or self.pack().packed)
        return self

    def pack(self) -> GenerationBatchResult:
        """Have all of it where one copy reads it; may be recorded."""
        plain = [getattr(self, n) for n in self._PLAIN if getattr(self, n) is not None]
        scored = [t for n in self._SCORED if getattr(self, n) is not None for t in getattr(self, n)]
        self.packed = pack(*plain, *scored)
        return self

    def read(self) -> GenerationBatchResult:
        """The same on the host: the one blocking read of a step, whoever asks first.

        That is the scheduler, or a method that drafts on the host, in the job of the next step.
        """
        with self._reading:
            if self._on_host is None:
                self._on_host = self._read()
        return self._on_host

    def _read(self) -> GenerationBatchResult:
        arrays = iter(self.readback.wait())
        fields = {n: next(arrays) for n in self._PLAIN if getattr(self, n) is not None}
        for n in self._SCORED:
            if getattr(self, n) is not None:
                fields[n] = LogprobRows(*(next(arrays) for _ in LogprobRows._fields))
        result = GenerationBatchResult(**fields, num_draft_tokens=self.num_draft_tokens)
        # Every request asks for its own: a list answers faster than an array.
        result.is_finite = np.isfinite(result.is_finite).tolist()
        return result

    @cached_property
    def tokens(self) -> list[list[int]]:
        """Each request's tokens, on the host."""
        tokens = self.next_token_ids.tolist()
        if self.accept_index is None:
            return tokens
        paths = zip(tokens, self.accept_index.tolist(), strict=True)
        return [row if path[-1] >= 0 else row[: path.index(-1)] for row, path in paths]
