"""EAGLE whose rounds change their number of steps. Restates adaptive_runtime_state.py of
sglang/srt/speculative (#21599, in spec v2 since #23336).

What depends on the number of steps is a worker's shape and its graphs; models, pools and the future map do
not. So there is a worker for each candidate, all copies of one, and a step is run by the one that was chosen
when it was launched. Nothing is switched, so nothing in flight can notice.

What a round leaves to the next is one proposal and a draft KV that is true up to S, whatever its shape: any
worker can go on from any other. With 0 steps the root alone is verified, and the draft extend still runs.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from ..arg_groups.adaptive_config import read_adaptive_config
from ..managers.tp_worker import TpModelWorker
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..server_args import MAX_DRAFT_TOKENS, ServerArgs
from .adaptive_spec_params import AdaptiveSpeculativeParams
from .eagle_worker_v2 import EAGLEWorkerV2


class AdaptiveEAGLEWorker(EAGLEWorkerV2):
    """The worker of the most steps; it reserves and prefills for all of them."""

    def __init__(self, server_args: ServerArgs, target_worker: TpModelWorker):
        config = read_adaptive_config(server_args.speculative_adaptive_config, MAX_DRAFT_TOKENS - 1)
        self.params = AdaptiveSpeculativeParams(config, server_args.speculative_num_steps)
        most = self.params.candidate_steps[-1]
        flags = {"speculative_num_steps": most, "speculative_num_draft_tokens": most + 1}
        super().__init__(replace(server_args, **flags), target_worker)

    def alloc_len_per_decode(self) -> int:
        """That of the most steps: what a request holds must serve whatever is chosen next."""
        return self.params.candidate_steps[-1] + 1

    def init_cuda_graphs(self, graphs: CudaGraphRunner) -> None:
        """Record the rounds of every candidate, each in the sizes in which it can be chosen."""
        self.params.cuda_graph_bs = graphs.sizes
        super().init_cuda_graphs(graphs)
        # The most first, since graphs share their largest buffers.
        fewer = self.params.candidate_steps[-2::-1]
        self.by_steps = {self.speculative_num_steps: self} | {steps: self._with(steps) for steps in fewer}
        self.active = self.by_steps[self.params.initial_steps]

    def graph_sizes(self) -> list[int]:
        return self.params.cuda_graph_bs_for_step(self.speculative_num_steps)

    def _with(self, steps: int) -> AdaptiveEAGLEWorker:
        """The same worker for rounds of `steps`."""
        worker = copy.copy(self)
        worker.draft_worker = copy.copy(self.draft_worker)
        worker.draft_worker.set_shape(steps, steps + 1)
        worker.speculative_num_steps = worker.max_path = steps
        worker.speculative_num_draft_tokens = steps + 1
        worker.round_graphs = self.round_graphs.of(worker)
        return worker

    # ---- on the host, beside the forward stream ----

    def activate_step_by_batch(self, batch_size: int) -> AdaptiveEAGLEWorker:
        self.active = self.by_steps[self.params.get_steps_for_batch(batch_size)]
        return self.active

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], num_steps: int, batch_size: int
    ) -> None:
        self.params.on_verify_complete(num_correct_drafts_per_req, num_steps, batch_size)

    def internal_state(self) -> dict[str, int]:
        """By the names of upstream's metrics, which get_server_info has no other place for."""
        return {
            "spec_num_steps": self.active.speculative_num_steps,
            "spec_num_draft_tokens": self.active.speculative_num_draft_tokens,
        }

    def clear_cache_pool(self) -> None:
        self.params.reset()
