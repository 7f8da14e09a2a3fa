"""An independent small model as the draft, with an embedding and a head of its own.

Restates sglang/srt/speculative/standalone_worker_v2.py (#12625). The round is EAGLE's. No hidden states go
from the target to the draft, so the draft's KV at p is that of token p, and what it proposes next comes from
the last output token, which stands at S: its KV is one entry ahead of the target's.

Upstream feeds the draft as EAGLE's, token p + 1 at p: it never sees the first token of a text. A draft that
sees all of it proposes what decoding with it would say: a model that drafts for itself is always right.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ..managers.overlap_utils import DecodeStep
from ..mem_cache.memory_pool import PADDING_SLOT
from ..model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from .draft_sampler import DraftSampler
from .eagle_info import EagleDraftInput, EagleVerifyOutput
from .eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2
from .spec_info import SpeculativeAlgorithm


class StandaloneDraftWorker(EagleDraftWorker):
    """A whole model: nothing is borrowed from the target."""

    kv_ahead = 1

    def _kind(self, algorithm: SpeculativeAlgorithm) -> str:
        return "STANDALONE"

    def _share_with(self, target: nn.Module, algorithm: SpeculativeAlgorithm) -> None:
        pass

    def forward_draft_extend(
        self,
        forward_batch: ForwardBatch,
        next_token_ids: torch.Tensor,
        dp_rows: int | None,
        sampler: DraftSampler | None = None,
        output_positions: torch.Tensor | None = None,
    ) -> EagleDraftInput:
        """The draft over the same rows, and over the token behind them for what may follow it."""
        runner = self.model_runner
        prompt = forward_batch.for_runner(
            runner,
            capture_hidden_mode=CaptureHiddenMode.LAST,
            topk=self.topk,
            input_logprobs=None,
            dp_rows=dp_rows,
        )
        runner.forward(prompt)
        end, rows = forward_batch.seq_lens, forward_batch.req_pool_indices
        lens_cpu = forward_batch.seq_lens_cpu
        behind = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=rows,
            prefix_lens=end,
            q_start_loc=self.first_rows(len(end), 1),
            max_q_len=1,
            attn_backend=runner.attn_backend,
            input_ids=next_token_ids,
            positions=end,
            seq_lens=end + 1,
            out_cache_loc=self.kernels.assign_extend_cache_locs(self._table(), rows, end, 1)[:, 0],
            seq_lens_cpu=None if lens_cpu is None else lens_cpu + 1,
            topk=self.topk,
            dp_rows=dp_rows,
        )
        return self.capture_for_decode(next_token_ids, *self._propose(behind, sampler, output_positions))

    def draft_extend_forward(
        self, step: DecodeStep, output: EagleVerifyOutput, sampler: DraftSampler | None = None
    ) -> EagleDraftInput:
        """The same over the accepted tokens where they stand themselves: one position behind their pairs."""
        ahead, paths = step.moved(self.kv_ahead), output.paths
        slots = self.kernels.assign_extend_cache_locs(
            self._table(), step.req_pool_indices, ahead.seq_lens, self.max_path + 1
        )
        paths = paths._replace(
            slots=torch.where(paths.nodes >= 0, slots, PADDING_SLOT).flatten(),
            positions=paths.positions + self.kv_ahead,
            kv_lens=paths.kv_lens + self.kv_ahead,
        )
        return super().draft_extend_forward(ahead, replace(output, paths=paths), sampler)


class StandaloneWorkerV2(EAGLEWorkerV2):
    draft_worker_class = StandaloneDraftWorker
