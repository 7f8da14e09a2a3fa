"""EAGLE beside the scheduler: a loop that drafts and verifies until a whole call is answered.

    draft                               draft model, steps − 1 forwards of 1 row per request
    verify                              target model, 1 forward of n rows per request
    forward_draft_extend_after_decode   draft model, 1 forward over the accepted tokens

No scheduler has to know of it, because nothing is left to decide: nobody joins a batch that has begun or is
pushed back from it, no KV is shared, and a request gets all the slots that it can come to need before it
starts. A rejected token's slots are simply written again in the next round. Upstream has no such loop: its
draft model had to wait for the scheduler (#2709) and the worker (#2150).
"""

from __future__ import annotations

import numpy as np

from ..managers.generation_result import GenerationBatchResult
from ..managers.schedule_batch import Req, ScheduleBatch
from ..managers.scheduler import Scheduler
from ..model_executor.device_io import upload
from .eagle_forwards import EagleForwards
from .eagle_info import EagleVerifyInput, EagleVerifyOutput

# What changes logits from one position to the next: keys of SamplingParams.
_PENALTIES = (
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "logit_bias",
)  # fmt: skip


class OfflineLoop(Scheduler):
    """The scheduler's door and its pools. One step answers all that waits, as far as the pools hold it."""

    def _init_memory(self, row_width: int) -> None:
        self.draft_worker = EagleForwards(self.server_args, self.tp_worker)
        self.workers.append(self.draft_worker)
        self.num_draft_tokens = self.draft_worker.speculative_num_draft_tokens
        # The drafts of a request at its context limit stick out over the end of its row.
        super()._init_memory(row_width + self.num_draft_tokens)

    # ---- what fits ----

    def check_call(self, reqs: list[Req], stream: bool) -> None:
        """Refuse what takes a scheduler that knows of speculation, and name the stage that brings it.

        Raises:
            ValueError: nothing has been started then.
        """
        features, neutral = self.server_args.features, type(reqs[0].sampling_params)()
        if stream:
            features.require("spec_scheduler", "stream", stream)
        for req in reqs:
            if req.logprobs is not None:
                features.require("spec_scheduler", "return_logprob", True)
            for name in _PENALTIES:
                if (value := getattr(req.sampling_params, name)) != getattr(neutral, name):
                    features.require("spec_scheduler", name, value)
        if len(self._fitting(reqs)) < len(reqs):
            ends = np.array([self._last_end(r) for r in reqs])
            need = self.token_to_kv_pool_allocator.new_slots(np.zeros_like(ends), ends)
            raise ValueError(
                f"fledge's {features.stage} runs EAGLE over a whole call at once, which takes {len(reqs)} "
                f"requests and {need} KV slots here, and the pools have {self.max_running_requests} and "
                f"{self.token_to_kv_pool_allocator.size}: send fewer prompts, lower max_new_tokens, or raise "
                "max_running_requests or max_total_tokens; requests take turns from "
                f"{features.missing['spec_scheduler']} on."
            )

    def _fitting(self, reqs: list[Req]) -> list[Req]:
        """The first of `reqs`, as many as there are rows and slots for."""
        allocator, room = self.token_to_kv_pool_allocator, self.token_to_kv_pool_allocator.size
        for i, req in enumerate(reqs[: self.max_running_requests]):
            room -= allocator.new_slots(np.zeros(1, np.int64), np.array([self._last_end(req)]))
            if room < 0:
                return reqs[:i]
        return reqs[: self.max_running_requests]

    def _last_end(self, req: Req) -> int:
        """One behind the last position that a round of this request can write to."""
        return len(req.origin_input_ids) + req.max_new_tokens + self.num_draft_tokens

    # ---- the loop ----

    def _step(self) -> bool:
        reqs = self._fitting(self.waiting_queue)
        if not reqs:
            return False
        self.waiting_queue = self.waiting_queue[len(reqs) :]
        batch = self.prefill(reqs)
        while not batch.is_empty():
            self.decode(batch)
        return True

    def prefill(self, reqs: list[Req]) -> ScheduleBatch:
        """Both models over all prompts; the batch of those requests that their first token has not ended."""
        batch, table = self._new_batch(reqs), self.req_to_token_pool.req_to_token_host
        for req in reqs:
            req.init_next_round_input(self.tree_cache)  # in which there is nothing
        batch.prepare_for_extend()
        ends = np.array([self._last_end(r) for r in reqs])
        rest = np.split(batch.alloc_extend_slots(batch.seq_lens, ends), np.cumsum(ends - batch.seq_lens)[:-1])
        for req, start, end, slots in zip(reqs, batch.seq_lens, ends, rest, strict=True):
            table[req.req_pool_idx, start:end] = slots
        forward_batch, result = self.draft_worker.forward_target_extend(batch)
        self.draft_input = self.draft_worker.forward_draft_extend(forward_batch, result.next_token_ids[:, 0])
        result = result.read()
        for i, req in enumerate(reqs):
            req.take(result, i)
        self.counters.forward_ct_prefill += 1
        self._drop_finished(batch)
        return batch

    def decode(self, batch: ScheduleBatch) -> None:
        """One round for every request of the batch; those that end leave it."""
        verify_input = self.draft(batch)
        verify_output = self.draft_worker.verify(batch, verify_input)
        self.draft_input = self.draft_worker.forward_draft_extend_after_decode(verify_input, verify_output)
        self.commit(batch, verify_output)
        self.counters.forward_ct_decode += 1
        self._drop_finished(batch)

    def draft(self, batch: ScheduleBatch) -> EagleVerifyInput:
        """A chain of drafts behind every request's last token."""
        table, columns = self.req_to_token_pool.req_to_token_host, np.arange(self.num_draft_tokens)
        batch.out_cache_loc = table[batch.req_pool_indices[:, None], batch.seq_lens[:, None] + columns]
        return self.draft_worker.draft_forward(self.draft_worker.start_round(batch), self.draft_input)

    def commit(self, batch: ScheduleBatch, output: EagleVerifyOutput) -> GenerationBatchResult:
        """Read the round's result and append what each request accepted up to its end."""
        result = output.result.read()
        batch.seq_lens = batch.seq_lens + batch.take_accepted(result, proposed=self.num_draft_tokens - 1)
        return result

    def _drop_finished(self, batch: ScheduleBatch) -> None:
        """Give back all that ended requests hold, and their rows in the batch."""
        for req in batch.reqs:
            if req.finished():
                self.counters.add_finished(req)
                req.kv_len = self._last_end(req)  # its slots, though not all of them hold something
                self.tree_cache.cache_finished_req(req, is_insert=False)
        keep = [i for i, req in enumerate(batch.reqs) if not req.finished()]
        if len(keep) < len(batch.reqs):
            batch.filter_batch(keep)
            (index,) = upload(self.device, np.array(keep, dtype=np.int64))
            self.draft_input.filter_batch(index)
