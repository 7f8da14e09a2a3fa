"""A round of EAGLE as three CUDA graphs: draft, verify, draft extend.

Restates eagle_draft_cuda_graph_runner.py of sglang/srt/speculative, its counterpart for the draft extend
(#6606) and the verifying half of model_executor/cuda_graph_runner.py. The graphs of one size hand each other
their results in place: verify reads what draft wrote, the draft extend what verify wrote. Rounds hand each
other theirs through the future map, whose rows are read and written inside the graphs. What the host sends
and reads goes outside of them: a step has host memory of its own, for the step before is still under way.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..layers.logits_processor import LogitsProcessorOutput
from ..managers.generation_result import GenerationBatchResult
from ..managers.overlap_utils import DecodeStep
from ..managers.schedule_batch import ModelWorkerBatch
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..model_executor.device_io import Readback
from ..model_executor.forward_batch_info import ForwardMode
from ..model_executor.model_runner import ModelRunner
from ..model_executor.packed_buffer import PackedBuffer
from .eagle_info import EagleVerifyInput, EagleVerifyOutput

if TYPE_CHECKING:
    from .eagle_worker_v2 import EAGLEWorkerV2


class EagleCudaGraphs:
    def __init__(self, worker: EAGLEWorkerV2, graphs: CudaGraphRunner):
        self.worker, self.graphs = worker, graphs
        self.inputs: dict[int, PackedBuffer] = {}
        self.readbacks: dict[int, Iterator[Readback]] = {}
        self._views: dict[tuple[int, int], EagleVerifyInput] = {}
        most, topk = max(graphs.sizes, default=0), worker.draft_worker.topk
        self.target_runner = worker.target_worker.model_runner
        self.draft_runner = worker.draft_worker.model_runner
        self.target_runner.attn_backend.init_cuda_graph_state(most, worker.speculative_num_draft_tokens)
        self.draft_runner.attn_backend.init_cuda_graph_state(most, max(topk, worker.max_path + 1))
        graphs.register(self._capture)

    def _capture(self, size: int) -> None:
        buffer = self.inputs[size] = PackedBuffer(self.worker.device, [(size,)] * 2)
        self.readbacks[size] = itertools.cycle((Readback(), Readback()))  # the last result is not read yet
        verify_input = self.graphs.capture(("draft", size), partial(self._draft, buffer))
        self.graphs.capture(("verify_logits", size), partial(self._verify_logits, size, verify_input))
        output = self.graphs.capture(("verify", size), partial(self._verify, verify_input))
        step = verify_input.step
        self.graphs.capture(("draft_extend", size), partial(self.worker.extend_draft, step, output))

    # ---- what is recorded ----

    def _draft(self, buffer: PackedBuffer) -> EagleVerifyInput:
        return self.worker.grow(DecodeStep.resolve(self.worker.future_map, *buffer.device))

    def _verify(self, verify_input: EagleVerifyInput) -> EagleVerifyOutput:
        return self.worker.accept(verify_input, self.worker.target_forward(verify_input, topk=1), None)

    def _verify_logits(self, size: int, verify_input: EagleVerifyInput) -> LogitsProcessorOutput:
        output = self.worker.target_forward(verify_input, topk=None)
        output.next_token_logits = self.graphs.shared("next_token_logits", size, output.next_token_logits)
        return output

    # ---- one round ----

    def draft(self, size: int, batch: ModelWorkerBatch) -> EagleVerifyInput:
        arrays = (batch.req_pool_indices, batch.prompt_lens)
        return self._rows(self._start(size, arrays, batch.seq_lens_cpu), len(batch.reqs))

    def _start(
        self, size: int, arrays: tuple[np.ndarray, ...], seq_lens_cpu: np.ndarray | None
    ) -> EagleVerifyInput:
        """Send `arrays`, rows and prompt lengths of the real requests, and draft for them."""
        self.inputs[size].send(*arrays)
        self.seq_lens_cpu = seq_lens_cpu
        draft_worker = self.worker.draft_worker
        if slots := draft_worker.draft_slots_per_req():
            self._plan(self.draft_runner, ForwardMode.DECODE, size, slots + draft_worker.kv_ahead)
        return self.graphs.replay(("draft", size))

    def verify(self, size: int) -> EagleVerifyOutput:
        self._plan_verify(size)
        return self._with_read(size, self.graphs.replay(("verify", size)))

    def verify_with_logits(
        self, size: int, verify_input: EagleVerifyInput, batch: ModelWorkerBatch
    ) -> EagleVerifyOutput:
        """The target in its graph; the acceptance outside, for it depends on what the requests ask."""
        self._plan_verify(size)
        logits_output = self.graphs.replay(("verify_logits", size))
        real = len(verify_input.positions)
        logits_output = dataclasses.replace(
            logits_output,
            next_token_logits=logits_output.next_token_logits[:real],
            hidden_states=logits_output.hidden_states[:real],
        )
        output = self.worker.accept(verify_input, logits_output, batch)
        output.result.start_read()
        self.graphs.result(("verify", size)).copy_(output)
        return output

    def _with_read(self, size: int, static: EagleVerifyOutput) -> EagleVerifyOutput:
        """A result of this round's own, on its way to the host: the graph's will be the next round's."""
        result = dataclasses.replace(static.result).start_read(next(self.readbacks[size]))
        return dataclasses.replace(static, result=result)

    def draft_extend(self, size: int) -> None:
        entries = self.worker.max_path + 1 + self.worker.draft_worker.kv_ahead
        self._plan(self.draft_runner, ForwardMode.DRAFT_EXTEND, size, entries)
        self.graphs.replay(("draft_extend", size))

    def idle(self, size: int) -> GenerationBatchResult:
        """A round of padding rows, for the collectives that the other ranks' graphs hold."""
        self._start(size, tuple(self.inputs[size].no_rows()), np.empty(0, np.int64))
        output = self.verify(size)
        self.draft_extend(size)
        return output.result

    def _plan_verify(self, size: int) -> None:
        n = self.worker.speculative_num_draft_tokens
        self._plan(self.target_runner, ForwardMode.TARGET_VERIFY, size, n)

    def _plan(self, runner: ModelRunner, mode: ForwardMode, size: int, entries: int) -> None:
        """Plan a graph's attention for S + `entries` of each request, if the backend plans at all."""
        if self.seq_lens_cpu is not None:
            lens = self.seq_lens_cpu + entries
            runner.attn_backend.init_forward_metadata_replay_cuda_graph(mode, size, lens)

    def _rows(self, static: EagleVerifyInput, bs: int) -> EagleVerifyInput:
        """`static.rows(bs)`, made once: a dozen slices in every round would cost as much as a forward."""
        key = (id(static), bs)
        if key not in self._views:
            self._views[key] = static.rows(bs)
        return self._views[key]
