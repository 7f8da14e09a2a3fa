"""What happens with a step's tokens. Restates sglang/srt/managers/scheduler_output_processor_mixin.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..model_executor.device_io import upload
from .generation_result import GenerationBatchResult
from .schedule_batch import Req, ScheduleBatch

if TYPE_CHECKING:
    from .scheduler import Scheduler


class SchedulerOutputProcessorMixin:
    def process_batch_result(self: Scheduler, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        if batch.forward_mode.is_extend():
            self.process_batch_result_prefill(batch, result)
        else:
            self.process_batch_result_decode(batch, result)

    def process_batch_result_prefill(
        self: Scheduler, batch: ScheduleBatch, result: GenerationBatchResult
    ) -> None:
        result = result.read()
        self._take_input_logprobs(batch, result)
        for i, req in enumerate(batch.reqs):
            # Neither a chunk that is not the last nor a resumed request was given a new token.
            if req.extend_end == len(req.origin_input_ids) and not req.output_ids:
                req.take(result, i)
            if req.finished():
                self._release(req)
            elif (slots := self.tree_cache.cache_unfinished_req(req)) is not None:
                (device_slots,) = upload(self.device, slots)
                self.req_to_token_pool.req_to_token[req.req_pool_idx, : len(slots)] = device_slots.int()

    def process_batch_result_decode(
        self: Scheduler, batch: ScheduleBatch, result: GenerationBatchResult
    ) -> None:
        batch.book_decode_slots()  # while the device works
        batch.take(result.read())
        for req in batch.reqs:
            if req.finished_reason is not None:
                self._release(req)

    def _take_input_logprobs(self: Scheduler, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        if result.input_logprobs is None:
            return
        wanted = batch.input_logprobs
        for row, (owner, token) in enumerate(zip(wanted.owners, wanted.targets, strict=True)):
            batch.reqs[owner].logprobs.add("input", result.input_logprobs, row, int(token))

    def _release(self: Scheduler, req: Req) -> None:
        self.counters.add_finished(req)
        # An abort inside a step means that its KV cannot be trusted.
        self.tree_cache.cache_finished_req(req, is_insert=req.finished_reason.type != "abort")
