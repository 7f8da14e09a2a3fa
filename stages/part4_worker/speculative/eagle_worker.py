"""One step of EAGLE: draft a tree, verify it in one target forward, bring the draft's KV up to date.

Restates sglang/srt/speculative/eagle_worker.py as of v0.4.6 (#2150 and what followed). To the
scheduler this is a worker like any other whose steps yield several tokens per request. Here is what the host
does around the forwards, which are in eagle_forwards.py:

    draft                               draft model, steps − 1 forwards of topk rows per request
    verify                              target model, 1 forward of n rows per request under a tree mask
    forward_draft_extend_after_decode   draft model, 1 forward over the accepted tokens

The host waits once per step, at the end, in `commit`: by then all three phases are launched. What it waits
for is the end of the verification only, so it works while the draft extend runs.
"""

from __future__ import annotations

import numpy as np
import torch

from ..layers.dp_attention import GlobalStep
from ..managers.generation_result import GenerationBatchResult
from ..managers.schedule_batch import ScheduleBatch
from ..model_executor.device_io import upload
from .eagle_forwards import EagleForwards
from .eagle_info import (
    EagleDraftInput,
    EagleStep,
    EagleVerifyInput,
    EagleVerifyOutput,
    align_evict_mask_to_page_size,
)


class EAGLEWorker(EagleForwards):
    def max_slots_per_step(self) -> int:
        """The most slots a request takes in a step: drafting gives back its own before verifying takes."""
        return max(self.draft_slots_per_req(), self.speculative_num_draft_tokens)

    def forward_batch_speculative_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run one step. A decode step leaves `batch` as if each request had decoded its accepted tokens."""
        if batch.forward_mode.is_extend():
            self._idle_while_others_draft(batch.global_step)
            forward_batch, result = self.forward_target_extend(batch)
            self.forward_draft_extend(batch, forward_batch, result.next_token_ids[:, 0])
            return result
        verify_input = self.draft(batch)
        verify_output = self.verify(batch, verify_input)
        self.forward_draft_extend_after_decode(batch, verify_input, verify_output)
        return self.commit(batch, verify_output)

    # ---- before the forwards ----

    def draft(self, batch: ScheduleBatch) -> EagleVerifyInput:
        """Grow a tree of drafts behind every request's last token and choose the nodes to verify."""
        arrays = self._allocate(batch)
        size = self.graphs.padded_size(batch.batch_size(), batch.global_step)
        if size is not None:
            return self.round_graphs.draft(size, arrays, batch.spec_info)
        step = EagleStep(*upload(self.device, *arrays), batch.seq_lens, batch.global_step)
        return self.draft_forward(step, batch.spec_info)

    def _allocate(self, batch: ScheduleBatch) -> tuple[np.ndarray, ...]:
        """Slots for every beam that is run, taken back at once, then slots to verify in: often the same ones.

        The drafts' KV is scratch and dead when verification begins, so nothing has to wait: the host
        takes both allocations first and sends all a step needs, the fields of EagleStep, in one upload.
        """
        allocator = batch.token_to_kv_pool_allocator
        backup = allocator.backup_state()
        draft_slots = batch.alloc_decode_slots(self.draft_slots_per_req())
        allocator.restore_state(backup)
        batch.out_cache_loc = batch.alloc_decode_slots(self.speculative_num_draft_tokens)
        return (
            batch.req_pool_indices,
            batch.seq_lens,
            batch.seq_lens + 1 - batch.prompt_lens,
            draft_slots,
            batch.out_cache_loc,
            batch.seq_lens + self.speculative_num_draft_tokens,
        )

    # ---- after them ----

    def commit(self, batch: ScheduleBatch, output: EagleVerifyOutput) -> GenerationBatchResult:
        """Read the step's result, append what each request accepted up to its end, free the other slots."""
        bs, n = len(batch.reqs), self.speculative_num_draft_tokens
        table = batch.req_to_token_pool.req_to_token_host
        # Indices into flat arrays, since numpy takes several times as long over pairs of them. What needs no
        # result comes first: the device is still at work.
        columns = np.arange(self.max_path + 1)
        first_nodes = np.arange(0, bs * n, n)[:, None]
        places = (batch.req_pool_indices * table.shape[1] + batch.seq_lens)[:, None] + columns
        evict_mask = np.ones(bs * n, dtype=bool)
        result = output.result.read()
        kept = batch.take_accepted(result, proposed=n - 1)
        is_kept = columns < kept[:, None]  # [bs, max_path + 1]; what else was accepted is behind an end
        nodes = (first_nodes + (columns if self.moves_kv else result.accept_index[:bs]))[is_kept]
        table.reshape(-1)[places[is_kept]] = batch.out_cache_loc.reshape(-1)[nodes]
        evict_mask[nodes] = False
        evict_mask = evict_mask.reshape(bs, n)
        if self.server_args.page_size > 1:
            evict_mask = align_evict_mask_to_page_size(
                batch.seq_lens, kept, evict_mask, self.server_args.page_size
            )
        batch.token_to_kv_pool_allocator.free(batch.out_cache_loc[evict_mask])
        batch.seq_lens = batch.seq_lens + kept
        return result

    # ---- beside other ranks of DP attention ----

    def rows_per_req(self) -> tuple[int, int, int]:
        """Rows of a decoding request in a forward of the draft loop, in verification, in the draft extend."""
        return self.topk, self.speculative_num_draft_tokens, self.max_path + 1

    def forward_idle(self, step: GlobalStep) -> None:
        """A step without requests, so that the gathers of the ranks that have some are whole."""
        size = self.graphs.padded_size(0, step)
        if size is not None:
            self.round_graphs.idle(size)
            return
        self._idle_while_others_draft(step)
        self.target_worker.model_runner.forward_idle(step.target_rows)
        self._forward_idle_draft(step.draft_extend_rows)

    def _idle_while_others_draft(self, step: GlobalStep) -> None:
        if step.draft_rows:
            for _ in range(self.speculative_num_steps - 1):
                self._forward_idle_draft(step.draft_rows)

    def _forward_idle_draft(self, dp_rows: int) -> None:
        runner = self.draft_model_runner
        hidden = torch.zeros(1, self.model_config.hidden_size, dtype=runner.dtype, device=self.device)
        runner.forward_idle(dp_rows, EagleDraftInput(hidden))
