"""Decides what runs next. Restates sglang/srt/managers/scheduler.py.

One step is: pick a batch (a prefill if any can start, else everything that decodes), launch it, process a
result. That result is its own in `event_loop_normal`. In `event_loop_overlap` it is that of the step before:
while the device works, the host takes in what the last step gave, and a request that has ended takes part in
one step more. Speculation changes none of this: the scheduler hands the batch to another worker.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from ..configs.model_config import ModelConfig
from ..layers.dp_attention import get_dp_group, local_device
from ..mem_cache.allocator import TokenToKVPoolAllocator
from ..mem_cache.memory_pool import ReqToTokenPool
from ..mem_cache.radix_cache import RadixCache
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..model_executor.model_runner import profile_max_num_tokens
from ..server_args import ServerArgs
from ..speculative.spec_info import SpeculativeAlgorithm
from .forward_stream import make_forward_stream
from .generation_result import GenerationBatchResult
from .overlap_utils import FutureMap
from .schedule_batch import FinishReason, Req, ScheduleBatch, most_new_slots
from .schedule_policy import PrefillAdder
from .scheduler_counters import Counters, average_correct_drafts
from .scheduler_dp_attn_mixin import SchedulerDPAttnMixin
from .scheduler_output_processor import SchedulerOutputProcessorMixin
from .tp_worker import TpModelWorker

# How much of what running requests may still write is set aside when a prefill is admitted. It falls
# while nothing is retracted and jumps back when something is.
INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO = 0.1
NEW_TOKEN_RATIO_DECAY = 0.001


logger = logging.getLogger(__name__)


class Scheduler(SchedulerOutputProcessorMixin, SchedulerDPAttnMixin):
    def __init__(self, server_args: ServerArgs):
        self.server_args = server_args
        self.device = local_device(server_args.device)
        self.dp_group = get_dp_group()
        self.spec_algorithm = SpeculativeAlgorithm.from_string(server_args.speculative_algorithm)
        self.model_config = ModelConfig.from_path(server_args.model_path, server_args.context_length)
        self.tp_worker = TpModelWorker(server_args, self.model_config)
        self.draft_worker = None
        self.model_worker = self.tp_worker  # whose steps are run: a speculative engine never decodes plainly
        self.model_runners = [self.tp_worker.model_runner]
        if self.spec_algorithm.is_speculative():
            worker_class = self.spec_algorithm.create_worker(server_args)
            self.model_worker = self.draft_worker = worker_class(server_args, self.tp_worker)
            self.model_runners = self.draft_worker.model_runners
        self.alloc_len_per_decode = self.model_worker.alloc_len_per_decode()
        self.alloc_len_per_extend = self.model_worker.alloc_len_per_extend()
        self.enable_overlap = server_args.overlap_schedule
        self.forward_stream = make_forward_stream(self.device, self.enable_overlap)
        self._init_memory()
        self.graphs = CudaGraphRunner(server_args, self.model_runners)
        self.model_worker.init_cuda_graphs(self.graphs)
        self.graphs.capture_all()
        # To make one for each step takes longer than to enter it.
        self._inference_mode = torch.inference_mode()
        self.reset()

    def _init_memory(self) -> None:
        args = self.server_args
        self.max_running_requests = args.max_running_requests
        self.max_total_num_tokens = profile_max_num_tokens(args, self.model_runners)
        logger.info("%d KV slots, %d requests at once", self.max_total_num_tokens, self.max_running_requests)
        # What is reserved for a request at its context limit sticks out over the end of its row.
        width = self.model_config.context_len + most_new_slots(self.alloc_len_per_decode, args.page_size)
        self.req_to_token_pool = ReqToTokenPool(
            self.max_running_requests, width, self.device, self.tp_worker.kernels
        )
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(self.max_total_num_tokens, args.page_size)
        self.model_worker.init_memory_pool(self.req_to_token_pool, self.token_to_kv_pool_allocator)
        needs_lens = any(runner.attn_backend.needs_cpu_seq_lens for runner in self.model_runners)
        self.future_map = FutureMap(self.max_running_requests, self.device, self.forward_stream, needs_lens)
        self.model_worker.init_future_map(self.future_map)
        self.tree_cache = RadixCache(
            self.req_to_token_pool,
            self.token_to_kv_pool_allocator,
            args.page_size,
            self.model_worker.kv_lookahead(),
            disable=args.disable_radix_cache,
        )

    # ---- the door ----

    def add_request(self, req: Req) -> None:
        """Queue a request. One that could never run ends at once, with the reason in its result."""
        allocator = self.token_to_kv_pool_allocator
        first_step = np.array([req.prompt_end() + 2 * self.alloc_len_per_decode])
        need = allocator.new_slots(np.zeros(1, np.int64), first_step)
        if need > allocator.size:
            message = (
                f"the prompt's {len(req.origin_input_ids)} tokens and a first step need {need} KV slots, "
                f"the pool has {allocator.size}: shorten the prompt or raise max_total_tokens"
            )
            req.finish(FinishReason("abort", message=message))
            return
        self.live_reqs.append(req)
        self.waiting_queue.append(req)

    def abort_request(self, rid: str) -> bool:
        """End a request wherever it is, keeping what it has produced; False if none has this id."""
        return any(self.abort_req(r) for r in self.live_reqs if r.rid == rid)

    def abort_req(self, req: Req) -> bool:
        """The same for one request, since an id may be used again once its request has ended."""
        if req.finished():
            return False
        if self.in_step:  # a signal, or a stream collected as garbage: its rows are in use
            self.pending_aborts.append(req)
            return True
        if req in self.waiting_queue:
            self.waiting_queue.remove(req)
        self._abort(req, "aborted by the caller")
        return True

    def live_rids(self) -> set[str]:
        self.live_reqs = [r for r in self.live_reqs if not r.finished()]
        return {r.rid for r in self.live_reqs}

    def abort_all(self, message: str) -> None:
        """End every request without touching the pools."""
        for req in self.live_reqs:
            if not req.finished():
                req.finish(FinishReason("abort", message=message))

    def reset(self) -> None:
        """Empty queues, pools, prefix cache and counters. Requests still in them are forgotten."""
        self.forward_stream.synchronize()
        # Launched, and not processed yet: what the batch was then, and its result.
        self.result_queue: deque[tuple[ScheduleBatch, Future]] = deque()
        # Every request that has not ended; inside a step some stand in no queue and no batch of ours.
        self.live_reqs: list[Req] = []
        self.waiting_queue: list[Req] = []
        self.in_step = False
        self.pending_aborts: list[Req] = []
        self.running_batch = self._new_batch([])
        self.last_batch: ScheduleBatch | None = None
        self.chunked_req: Req | None = None
        self.new_token_ratio = INIT_NEW_TOKEN_RATIO
        self.counters = Counters()
        self.tree_cache.reset()
        self.req_to_token_pool.clear()
        self.token_to_kv_pool_allocator.clear()
        if self.draft_worker is not None:
            self.draft_worker.clear_cache_pool()

    def flush_cache(self) -> bool:
        """Forget every cached prefix and reset the counters; refused (False) while requests run."""
        if not self.is_idle():
            return False
        self.reset()
        return True

    def get_internal_state(self) -> dict[str, Any]:
        """Pools, counters and time split, in upstream's names where it has them."""
        self.forward_stream.synchronize()  # so that no step is counted by halves
        counters = dataclasses.asdict(self.counters)
        if self.draft_worker is not None:
            counters |= self.draft_worker.internal_state()
        return counters | {
            "max_total_num_tokens": self.max_total_num_tokens,
            "available_size": self.token_to_kv_pool_allocator.available_size(),
            "evictable_size": self.tree_cache.evictable_size(),
            "protected_size": self.tree_cache.protected_size(),
            "num_running_reqs": sum(not r.finished() for r in self.running_batch.reqs),
            "num_waiting_reqs": len(self.waiting_queue),
            "forward_ct": {
                "target": self.tp_worker.model_runner.forward_ct,
                "draft": sum(runner.forward_ct for runner in self.model_runners[1:]),
            },
            "avg_correct_drafts": average_correct_drafts(self.counters.spec_correct_drafts_histogram),
            "is_on": {
                "cuda_graph": bool(self.graphs.sizes),
                "overlap_schedule": self.enable_overlap,
                "radix_cache": not self.server_args.disable_radix_cache,
                "dtype": str(self.tp_worker.model_runner.dtype).removeprefix("torch."),
            },
        }

    def shutdown(self) -> None:
        self.abort_all("the engine was shut down")
        self.forward_stream.close()

    def is_idle(self) -> bool:
        return not self.live_rids()

    def event_loop_normal(self) -> None:
        """Launch a step and process its result, until nothing is left to do."""
        while self._run_iteration(self._step_normal):
            pass

    def event_loop_overlap(self) -> None:
        """Launch a step and process the result of the one before, until nothing is left to do."""
        while self._run_iteration(self._step_overlap):
            pass

    def step(self) -> bool:
        """One iteration of the loop that this engine runs; False if there was nothing to do."""
        return self._run_iteration(self._step_overlap if self.enable_overlap else self._step_normal)

    def _run_iteration(self, step: Callable[[], bool]) -> bool:
        self.in_step = True
        with self._inference_mode:
            has_run = step()
        self.in_step = False  # where a step breaks off, `reset` does this
        while self.pending_aborts:
            self.abort_req(self.pending_aborts.pop())
        return has_run

    def _step_normal(self) -> bool:
        launched = self._launch()
        while self.result_queue:
            self._process()
        return launched

    def _step_overlap(self) -> bool:
        pending = len(self.result_queue)  # the step before, if there was one
        launched = self._launch()
        if pending:
            self._process()
        return launched or pending > 0

    def _launch(self) -> bool:
        """Start the next step, if there is one to run."""
        t0 = time.perf_counter()
        batch = self.get_next_batch_to_run()
        if self.dp_group is not None:
            batch = self.prepare_dp_attn_batch(batch)
        t1 = time.perf_counter()
        self.counters.schedule_seconds += t1 - t0
        if batch is None:
            return False
        result = self.run_batch(batch)
        self.result_queue.append((batch.launched(), result))
        self.counters.run_seconds += time.perf_counter() - t1
        self.last_batch = batch
        return True

    def _process(self) -> None:
        """Take in the oldest result."""
        t0 = time.perf_counter()
        batch, result = self.result_queue.popleft()
        self.process_batch_result(batch, result.result())
        self.counters.process_seconds += time.perf_counter() - t0

    # ---- what runs next ----

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        self.running_batch.filter_batch()
        self._merge_last_prefill()
        batch = self.get_new_batch_prefill()
        if batch is None:
            batch = self.update_running_batch()
        return batch

    def _merge_last_prefill(self) -> None:
        """Requests whose prompt is complete join those that decode."""
        last, self.last_batch = self.last_batch, None
        if last is None or not last.forward_mode.is_extend():
            return
        last.filter_batch(
            [i for i, r in enumerate(last.reqs) if not r.finished() and r is not self.chunked_req]
        )
        self.running_batch.merge_batch(last)

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        if self.chunked_req is not None and self.chunked_req.finished():  # aborted between two chunks
            self.chunked_req = None
        free_rows = self.req_to_token_pool.available_size()
        if self.chunked_req is None and (not self.waiting_queue or free_rows == 0):
            return None
        adder = PrefillAdder(
            self.running_batch,
            self.new_token_ratio,
            self.server_args.max_prefill_tokens,
            self.server_args.chunked_prefill_size,
            2 * self.alloc_len_per_decode,
            self.alloc_len_per_extend,
        )
        if self.chunked_req is not None and not adder.add_chunked_req(self.chunked_req):
            return None
        admitted = 0
        while admitted < min(free_rows, len(self.waiting_queue)):
            if not adder.add_one_req(self.waiting_queue[admitted]):
                break
            admitted += 1
        if not adder.can_run_list:
            return None
        self.waiting_queue = self.waiting_queue[admitted:]
        self.chunked_req = adder.new_chunked_req
        batch = self._new_batch(adder.can_run_list)
        batch.prepare_for_extend(self.alloc_len_per_extend)
        self.counters.forward_ct_prefill += 1
        return batch

    def update_running_batch(self) -> ScheduleBatch | None:
        """The requests that decode, after pushing back as many as a full pool demands."""
        batch = self.running_batch
        if batch.is_empty():
            return None
        alloc_len = self.alloc_len_per_decode
        if batch.check_decode_mem(alloc_len):
            self.new_token_ratio = max(self.new_token_ratio - NEW_TOKEN_RATIO_DECAY, MIN_NEW_TOKEN_RATIO)
        else:
            retracted = self._retract_chunked() + batch.retract_decode(alloc_len)
            self.waiting_queue = retracted[::-1] + self.waiting_queue
            self.counters.num_retractions += len(retracted)
            if retracted:
                logger.warning("the KV pool is full: %d requests go back to the queue", len(retracted))
            self.new_token_ratio = INIT_NEW_TOKEN_RATIO
            if not batch.check_decode_mem(alloc_len):  # one is left, and the pool is too small for it alone
                pool = self.token_to_kv_pool_allocator.size
                self._abort(
                    batch.reqs[0],
                    f"the next step needs more KV slots than the pool of {pool} has: raise max_total_tokens",
                )
                return self.get_next_batch_to_run()
        batch.prepare_for_decode(alloc_len)
        self.counters.forward_ct_decode += 1
        return batch

    def _retract_chunked(self) -> list[Req]:
        """A prompt that is half read has cost least, so it goes before anything that decodes."""
        req, self.chunked_req = self.chunked_req, None
        if req is None:
            return []
        self.tree_cache.cache_finished_req(req)
        req.reset_for_retract()
        return [req]

    def run_batch(self, batch: ScheduleBatch) -> Future[GenerationBatchResult | None]:
        """Launch one forward step of the batch; in the end it gives what process_batch_result needs."""
        worker, submit = self.model_worker, self.forward_stream.submit
        if batch.forward_mode.is_idle():
            return submit(worker.forward_idle, batch.global_step)
        lens = None
        if batch.forward_mode.is_decode():
            lens = self.future_map.resolve_seq_lens_cpu(batch.req_pool_indices)
            worker = worker.activate_step_by_batch(len(batch.reqs))
        step = batch.get_model_worker_batch(lens)
        return submit(worker.forward_batch_generation, step, self.future_map.next_publish())

    # ---- helpers ----

    def _new_batch(self, reqs: list[Req]) -> ScheduleBatch:
        return ScheduleBatch(
            reqs=reqs,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            tree_cache=self.tree_cache,
            device=self.device,
            vocab_size=self.model_config.vocab_size,
            spec_algorithm=self.spec_algorithm,
            forward_stream=self.forward_stream,
        )

    def _abort(self, req: Req, message: str) -> None:
        if req.finished():
            return
        if req.req_pool_idx is not None:
            self.tree_cache.cache_finished_req(req)
        req.finish(FinishReason("abort", message=message))
        self.counters.add_finished(req)
