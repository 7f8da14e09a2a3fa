"""One step of EAGLE: draft a chain, verify it in one target forward, bring the draft's KV up to date.

Restates sglang/srt/speculative/eagle_worker.py as of v0.4.6 (#2150 and what followed). To the
scheduler this is a worker like any other whose steps yield several tokens per request. Here is what the host
does around the forwards, which are in eagle_forwards.py:

    draft                               draft model, steps − 1 forwards of 1 row per request
    verify                              target model, 1 forward of n rows per request under a mask
    forward_draft_extend_after_decode   draft model, 1 forward over the accepted tokens

The host waits once per step, at the end, in `commit`: by then all three phases are launched. What it waits
for is the end of the verification only, so it works while the draft extend runs.
"""

from __future__ import annotations

import numpy as np

from ..managers.generation_result import GenerationBatchResult
from ..managers.schedule_batch import ScheduleBatch
from .eagle_forwards import EagleForwards
from .eagle_info import EagleVerifyInput, EagleVerifyOutput, align_evict_mask_to_page_size


class EAGLEWorker(EagleForwards):
    def max_slots_per_step(self) -> int:
        """The slots a request takes in a step: it drafts into those that it verifies in."""
        return self.speculative_num_draft_tokens

    def forward_batch_speculative_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run one step. A decode step leaves `batch` as if each request had decoded its accepted tokens."""
        if batch.forward_mode.is_extend():
            forward_batch, result = self.forward_target_extend(batch)
            self.forward_draft_extend(batch, forward_batch, result.next_token_ids[:, 0])
            return result
        verify_input = self.draft(batch)
        verify_output = self.verify(batch, verify_input)
        self.forward_draft_extend_after_decode(batch, verify_input, verify_output)
        return self.commit(batch, verify_output)

    # ---- before the forwards ----

    def draft(self, batch: ScheduleBatch) -> EagleVerifyInput:
        """A chain of drafts behind every request's last token."""
        batch.out_cache_loc = batch.alloc_decode_slots(self.speculative_num_draft_tokens)
        return self.draft_forward(self.start_round(batch), batch.spec_info)

    # ---- after them ----

    def commit(self, batch: ScheduleBatch, output: EagleVerifyOutput) -> GenerationBatchResult:
        """Read the step's result, append what each request accepted up to its end, free the other slots."""
        n, table = self.speculative_num_draft_tokens, batch.req_to_token_pool.req_to_token_host
        columns = np.arange(n)
        result = output.result.read()
        kept = batch.take_accepted(result, proposed=n - 1)
        is_kept = columns < kept[:, None]  # [bs, n]; the rest was not accepted, or is behind an end
        rows, places = batch.req_pool_indices[:, None].repeat(n, 1), batch.seq_lens[:, None] + columns
        table[rows[is_kept], places[is_kept]] = batch.out_cache_loc[is_kept]
        evict_mask = ~is_kept
        if self.server_args.page_size > 1:
            evict_mask = align_evict_mask_to_page_size(
                batch.seq_lens, kept, evict_mask, self.server_args.page_size
            )
        batch.token_to_kv_pool_allocator.free(batch.out_cache_loc[evict_mask])
        batch.seq_lens = batch.seq_lens + kept
        return result
