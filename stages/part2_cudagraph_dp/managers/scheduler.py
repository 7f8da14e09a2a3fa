"""Decides what runs next. Restates sglang/srt/managers/scheduler.py.

One step is: pick a batch (a prefill if any can start, else everything that decodes), run it, process its
result. A request gets one token in each step.
"""

from __future__ import annotations

import dataclasses
import logging
import time
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
from .schedule_batch import FinishReason, Req, ScheduleBatch
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
        self.workers = [self.tp_worker]
        self._init_memory(self.model_config.context_len)
        self.graphs = CudaGraphRunner(server_args, [w.model_runner for w in self.workers])
        # The last one's steps are those that are run: a speculative engine never decodes plainly.
        self.workers[-1].init_cuda_graphs(self.graphs)
        self.graphs.capture_all()
        # To make one for each step takes longer than to enter it.
        self._inference_mode = torch.inference_mode()
        self.reset()

    def _init_memory(self, row_width: int) -> None:
        args = self.server_args
        self.max_running_requests = args.max_running_requests
        self.max_total_num_tokens = profile_max_num_tokens(args, [w.model_runner for w in self.workers])
        logger.info("%d KV slots, %d requests at once", self.max_total_num_tokens, self.max_running_requests)
        self.req_to_token_pool = ReqToTokenPool(self.max_running_requests, row_width, self.device)
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(self.max_total_num_tokens, args.page_size)
        for worker in self.workers:
            worker.init_memory_pool(self.req_to_token_pool, self.token_to_kv_pool_allocator)
        self.tree_cache = RadixCache(
            self.req_to_token_pool,
            self.token_to_kv_pool_allocator,
            args.page_size,
            disable=args.disable_radix_cache,
        )

    # ---- the door ----

    def add_request(self, req: Req) -> None:
        """Queue a request. One that could never run ends at once, with the reason in its result."""
        allocator = self.token_to_kv_pool_allocator
        first_step = np.array([req.prompt_end() + 1])
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

    def flush_cache(self) -> bool:
        """Forget every cached prefix and reset the counters; refused (False) while requests run."""
        if not self.is_idle():
            return False
        self.reset()
        return True

    def get_internal_state(self) -> dict[str, Any]:
        """Pools, counters and time split, in upstream's names where it has them."""
        counters = dataclasses.asdict(self.counters)
        return counters | {
            "max_total_num_tokens": self.max_total_num_tokens,
            "available_size": self.token_to_kv_pool_allocator.available_size(),
            "evictable_size": self.tree_cache.evictable_size(),
            "protected_size": self.tree_cache.protected_size(),
            "num_running_reqs": sum(not r.finished() for r in self.running_batch.reqs),
            "num_waiting_reqs": len(self.waiting_queue),
            "forward_ct": {
                "target": self.tp_worker.model_runner.forward_ct,
                "draft": sum(w.model_runner.forward_ct for w in self.workers[1:]),
            },
            "avg_correct_drafts": average_correct_drafts(self.counters.spec_correct_drafts_histogram),
            "is_on": {
                "cuda_graph": bool(self.graphs.sizes),
                "overlap_schedule": self.server_args.overlap_schedule,
                "radix_cache": not self.server_args.disable_radix_cache,
                "dtype": str(self.tp_worker.model_runner.dtype).removeprefix("torch."),
            },
        }

    def shutdown(self) -> None:
        self.abort_all("the engine was shut down")

    def is_idle(self) -> bool:
        return not self.live_rids()

    def event_loop_normal(self) -> None:
        """Step until nothing is left to do."""
        while self.step():
            pass

    def step(self) -> bool:
        """One iteration; False if there was nothing to run."""
        self.in_step = True
        with self._inference_mode:
            has_run = self._step()
        self.in_step = False  # where a step breaks off, `reset` does this
        while self.pending_aborts:
            self.abort_req(self.pending_aborts.pop())
        return has_run

    def _step(self) -> bool:
        t0 = time.perf_counter()
        batch = self.get_next_batch_to_run()
        if self.dp_group is not None:
            batch = self.prepare_dp_attn_batch(batch)
        t1 = time.perf_counter()
        self.counters.schedule_seconds += t1 - t0
        if batch is None:
            return False
        result = self.run_batch(batch)
        t2 = time.perf_counter()
        self.process_batch_result(batch, result)
        self.counters.run_seconds += t2 - t1
        self.counters.process_seconds += time.perf_counter() - t2
        self.last_batch = batch
        return True

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
        batch.prepare_for_extend()
        self.counters.forward_ct_prefill += 1
        return batch

    def update_running_batch(self) -> ScheduleBatch | None:
        """The requests that decode, after pushing back as many as a full pool demands."""
        batch = self.running_batch
        if batch.is_empty():
            return None
        if batch.check_decode_mem():
            self.new_token_ratio = max(self.new_token_ratio - NEW_TOKEN_RATIO_DECAY, MIN_NEW_TOKEN_RATIO)
        else:
            retracted = self._retract_chunked() + batch.retract_decode()
            self.waiting_queue = retracted[::-1] + self.waiting_queue
            self.counters.num_retractions += len(retracted)
            if retracted:
                logger.warning("the KV pool is full: %d requests go back to the queue", len(retracted))
            self.new_token_ratio = INIT_NEW_TOKEN_RATIO
            if not batch.check_decode_mem():  # one is left, and the pool is too small for it alone
                pool = self.token_to_kv_pool_allocator.size
                self._abort(
                    batch.reqs[0],
                    f"the next step needs more KV slots than the pool of {pool} has: raise max_total_tokens",
                )
                return self.get_next_batch_to_run()
        batch.prepare_for_decode()
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

    def run_batch(self, batch: ScheduleBatch):
        """One forward step of the batch; returns what process_batch_result needs."""
        if batch.forward_mode.is_idle():
            return self.tp_worker.forward_idle(batch.global_step)
        return self.tp_worker.forward_batch_generation(batch.get_model_worker_batch())

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
        )

    def _abort(self, req: Req, message: str) -> None:
        if req.finished():
            return
        if req.req_pool_idx is not None:
            self.tree_cache.cache_finished_req(req)
        req.finish(FinishReason("abort", message=message))
        self.counters.add_finished(req)
