"""What happens with a step's tokens. Restates sglang/srt/managers/scheduler_output_processor_mixin.py.

A result may come late: a request that has ended or gone back to the queue since the launch is passed over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..model_executor.device_io import upload
from .generation_result import GenerationBatchResult
from .schedule_batch import Req, ScheduleBatch

if TYPE_CHECKING:
    from .scheduler import Scheduler


class SchedulerOutputProcessorMixin:
    def process_batch_result(
        self: Scheduler, batch: ScheduleBatch, result: GenerationBatchResult | None
    ) -> None:
        if result is not None:  # None: an idle rank's step that left nothing to wait for
            result = result.read()
        if batch.forward_mode.is_extend():
            self.process_batch_result_prefill(batch, result)
        elif not batch.forward_mode.is_idle():
            self.process_batch_result_decode(batch, result)

    def process_batch_result_prefill(
        self: Scheduler, batch: ScheduleBatch, result: GenerationBatchResult
    ) -> None:
        self._take_input_logprobs(batch, result)
        for i, req in batch.rows_in_time():
            end = int(batch.seq_lens[i])
            # Neither a chunk that is not the last nor a resumed request was given a new token.
            if end == len(req.origin_input_ids) and not req.output_ids:
                req.take(result, i)
            if req.finished():
                self._release(req)
            elif (slots := self.tree_cache.cache_unfinished_req(req, end)) is not None:
                self.forward_stream.wait_for_reads()
                (device_slots,) = upload(self.device, slots)
                self.req_to_token_pool.req_to_token[req.req_pool_idx, : len(slots)] = device_slots.int()

    def process_batch_result_decode(
        self: Scheduler, batch: ScheduleBatch, result: GenerationBatchResult
    ) -> None:
        drafts, num_correct_drafts_per_req = result.num_draft_tokens - 1, []
        for i, req in batch.rows_in_time():
            count = req.take(result, i)
            req.kv_len += count
            if drafts >= 0:
                correct = len(result.tokens[i]) - 1
                num_correct_drafts_per_req.append(correct)
                req.count_round(proposed=drafts, correct=min(count, correct))
            if req.finished():
                self._release(req)
        if num_correct_drafts_per_req:
            self.model_worker.on_verify_complete_cpu(num_correct_drafts_per_req, drafts, len(batch.reqs))

    def _take_input_logprobs(self: Scheduler, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        if result.input_logprobs is None:
            return
        wanted, in_time = batch.input_logprobs, dict(batch.rows_in_time())
        for row, (owner, token) in enumerate(zip(wanted.owners.tolist(), wanted.targets, strict=True)):
            if owner in in_time:
                in_time[owner].logprobs.add("input", result.input_logprobs, row, int(token))

    def _release(self: Scheduler, req: Req) -> None:
        self.counters.add_finished(req)
        # An abort inside a step means that its KV cannot be trusted.
        self.tree_cache.cache_finished_req(req, is_insert=req.finished_reason.type != "abort")
