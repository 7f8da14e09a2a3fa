"""A round of EAGLE as three CUDA graphs: draft, verify, draft extend.

Restates eagle_draft_cuda_graph_runner.py of sglang/srt/speculative and its counterpart for the draft extend
(#6606). The draft extend reads what verify wrote, and writes to the future map.

Where drafts may be drawn, draft and draft extend have two more graphs each, which draw: one with filters,
which sort the vocabulary for every draft, one without. All leave their chains in one place, so that there is
one verification.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..managers.generation_result import GenerationBatchResult
from ..managers.overlap_utils import DecodeStep
from ..managers.schedule_batch import ModelWorkerBatch
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..model_executor.forward_batch_info import ForwardMode
from ..model_executor.packed_buffer import PackedBuffer
from ..sampling.sampling_batch_info import SamplingBatchInfo
from .draft_sampler import DraftSampler, StaticSamplingInfo
from .eagle_info import EagleVerifyInput
from .verify_cuda_graphs import VerifyCudaGraphs

if TYPE_CHECKING:
    from .eagle_worker_v2 import EAGLEWorkerV2


class EagleCudaGraphs(VerifyCudaGraphs):
    def __init__(self, worker: EAGLEWorkerV2, graphs: CudaGraphRunner):
        super().__init__(worker, graphs)
        most, draft_worker = max(graphs.sizes, default=0), worker.draft_worker
        self.draft_runner = draft_worker.model_runner
        widest = max(draft_worker.topk, draft_worker.draft_extend_width())
        self.draft_runner.attn_backend.init_cuda_graph_state(most, widest)
        sizes = graphs.sizes if worker.server_args.speculative_use_rejection_sampling else ()
        vocab_size = self.target_runner.model_config.vocab_size
        self.sampling = {
            (kind, size): StaticSamplingInfo(size, vocab_size, worker.device, filters=kind == "filtered_")
            for kind in ("drawn_", "filtered_")
            for size in sizes
        }

    def _capture(self, size: int) -> None:
        super()._capture(size)
        step = self.graphs.result(self._key("draft", size)).step
        output = self.graphs.result(self._key("verify", size))
        self.graphs.capture(self._key("draft_extend", size), partial(self.worker.extend_draft, step, output))
        for kind in (kind for kind, each in self.sampling if each == size):
            sampler = self.worker.sampler(self.sampling[kind, size])
            self.graphs.capture(self._key(f"{kind}draft", size), partial(self._drawn_draft, size, sampler))
            extend = partial(self.worker.extend_draft, step, output, sampler)
            self.graphs.capture(self._key(f"{kind}draft_extend", size), extend)

    def _draft(self, buffer: PackedBuffer, sampler: DraftSampler | None = None) -> EagleVerifyInput:
        worker = self.worker
        step = DecodeStep.resolve(worker.future_map, worker.req_to_token_pool, *buffer.device)
        return worker.grow(step, sampler)

    def _drawn_draft(self, size: int, sampler: DraftSampler) -> EagleVerifyInput:
        drawn = self._draft(self.inputs[size], sampler)
        chain = self.graphs.write(self._key("draft", size), dataclasses.replace(drawn, draft_probs=None))
        if (laws := drawn.draft_probs) is not None:  # the root alone has none
            laws = self.graphs.shared("draft_probs", size, laws.flatten(0, 1)).view_as(laws)
        return dataclasses.replace(chain, draft_probs=laws)

    # ---- one round ----

    def kind(self, info: SamplingBatchInfo) -> str:
        """How the drafts of a batch are come by: what the names of its graphs begin with."""
        if not self.worker.is_drawn(info):
            return ""
        return "filtered_" if info.need_top_k or info.need_top_p else "drawn_"

    def draft(self, size: int, batch: ModelWorkerBatch) -> EagleVerifyInput:
        if kind := self.kind(batch.sampling_info):
            self.sampling[kind, size].copy_(batch.sampling_info)
        chosen = self._start(size, batch.decode_inputs, batch.seq_lens_cpu, kind)
        return self._rows(chosen, len(batch.reqs))

    def _start(
        self,
        size: int,
        arrays: tuple[np.ndarray, ...],
        seq_lens_cpu: np.ndarray | None,
        kind: str = "",
    ) -> EagleVerifyInput:
        """Send `arrays`, ModelWorkerBatch.decode_inputs of the real requests, and draft for them."""
        self.inputs[size].send(*arrays)
        self.seq_lens_cpu = seq_lens_cpu
        draft_worker = self.worker.draft_worker
        if slots := draft_worker.draft_slots_per_req():
            entries = slots + draft_worker.kv_ahead
            self._plan(self.draft_runner, ForwardMode.DECODE, size, draft_worker.topk, entries)
        return self.graphs.replay(self._key(f"{kind}draft", size))

    def draft_extend(self, size: int, kind: str = "") -> None:
        draft_worker = self.worker.draft_worker
        width, front = draft_worker.draft_extend_width(), draft_worker.num_front_tokens
        entries = width + draft_worker.kv_ahead
        self._plan(self.draft_runner, ForwardMode.DRAFT_EXTEND, size, width, entries, front)
        self.graphs.replay(self._key(f"{kind}draft_extend", size))

    def idle(self, size: int) -> GenerationBatchResult:
        """A round of padding rows, for the collectives that the other ranks' graphs hold."""
        self._start(size, tuple(self.inputs[size].no_rows()), np.empty(0, np.int64))
        output = self.verify(size)
        self.draft_extend(size)
        return output.result
