"""A round of EAGLE as three CUDA graphs: draft, verify, draft extend.

Restates eagle_draft_cuda_graph_runner.py of sglang/srt/speculative, its counterpart for the draft extend
(#6606, after v0.4.6) and the verifying half of model_executor/cuda_graph_runner.py. The graphs of one size
hand each other their results in place: verify reads what draft wrote, the draft extend what verify wrote, and
the next round's draft what the draft extend wrote. In greedy rounds only after rows came or went is anything
copied. Where a request is sampled, verify is recorded up to the logits, and what is accepted is copied in.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..layers.logits_processor import LogitsProcessorOutput
from ..managers.schedule_batch import ScheduleBatch
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..model_executor.device_io import Readback
from ..model_executor.forward_batch_info import ForwardMode
from ..model_executor.model_runner import ModelRunner
from ..model_executor.packed_buffer import PackedBuffer
from .eagle_info import EagleDraftInput, EagleStep, EagleVerifyInput, EagleVerifyOutput

if TYPE_CHECKING:
    from .eagle_forwards import EagleForwards


class EagleCudaGraphs:
    def __init__(self, worker: EagleForwards, graphs: CudaGraphRunner):
        self.worker, self.graphs = worker, graphs
        self.inputs: dict[int, PackedBuffer] = {}
        self._views: dict[tuple[int, int], EagleVerifyInput | EagleDraftInput] = {}
        most = max(graphs.sizes, default=0)
        runner, device = worker.draft_model_runner, worker.device
        hidden, topk = runner.model_config.hidden_size, worker.topk
        # What the next round starts from. Zeros are a valid token, so padding rows never index out of range.
        self.draft_input = EagleDraftInput(
            hidden_states=torch.zeros(most, hidden, dtype=runner.dtype, device=device),
            verified_id=torch.zeros(most, dtype=torch.int64, device=device),
            topk_p=torch.zeros(most, topk, device=device),
            topk_index=torch.zeros(most, topk, dtype=torch.int64, device=device),
        )
        self.target_runner, self.draft_runner = worker.target_worker.model_runner, runner
        self.target_runner.attn_backend.init_cuda_graph_state(most, worker.speculative_num_draft_tokens)
        self.draft_runner.attn_backend.init_cuda_graph_state(most, max(topk, worker.max_path + 1))
        graphs.register(self._capture)

    def _capture(self, size: int) -> None:
        worker, n = self.worker, self.worker.speculative_num_draft_tokens
        running = copy.deepcopy(self.draft_input)  # on a CPU a size is prepared while requests run
        shapes = [(size,)] * 3 + [(size, worker.draft_slots_per_req()), (size, n), (size,)]
        buffer = self.inputs[size] = PackedBuffer(worker.device, shapes)
        step = EagleStep(*buffer.device)
        verify_input = self.graphs.capture(("draft", size), partial(self._draft, buffer, step))
        self.graphs.capture(("verify_logits", size), partial(self._verify_logits, size, verify_input))
        output = self.graphs.capture(("verify", size), partial(self._verify, verify_input, Readback()))
        self.graphs.capture(("draft_extend", size), partial(self._draft_extend, step, output))
        self.draft_input.copy_(running)

    # ---- what is recorded ----

    def _draft(self, buffer: PackedBuffer, step: EagleStep) -> EagleVerifyInput:
        buffer.send()
        return self.worker.draft_forward(step, self.draft_input.rows(len(step.seq_lens)))

    def _verify(self, verify_input: EagleVerifyInput, readback: Readback) -> EagleVerifyOutput:
        logits_output = self.worker.target_forward(verify_input, topk=1)
        return self.worker.accept(verify_input, logits_output, None, readback)

    def _verify_logits(self, size: int, verify_input: EagleVerifyInput) -> LogitsProcessorOutput:
        output = self.worker.target_forward(verify_input, topk=None)
        output.next_token_logits = self.graphs.shared("next_token_logits", size, output.next_token_logits)
        return output

    def _draft_extend(self, step: EagleStep, output: EagleVerifyOutput) -> None:
        static = self.draft_input.rows(len(step.seq_lens))
        self.draft_input.copy_(self.worker.draft_extend_forward(step, output, static))

    # ---- one round ----

    def draft(
        self, size: int, arrays: tuple[np.ndarray, ...], draft_input: EagleDraftInput
    ) -> EagleVerifyInput:
        """Send `arrays`, the fields of EagleStep for the real rows, and draft for them."""
        self.inputs[size].fill(*arrays)
        self.seq_lens_cpu = arrays[1]
        if self.worker.draft_slots_per_req():
            self._plan(self.draft_runner, ForwardMode.DECODE, size, self.worker.draft_slots_per_req())
        if draft_input.hidden_states.data_ptr() != self.draft_input.hidden_states.data_ptr():
            self.draft_input.copy_(draft_input)
        return self._rows(self.graphs.replay(("draft", size)), len(arrays[0]))

    def verify(self, size: int) -> EagleVerifyOutput:
        self._plan_verify(size)
        output = self.graphs.replay(("verify", size))
        output.result.readback.launched()
        return output

    def verify_with_logits(
        self, size: int, verify_input: EagleVerifyInput, batch: ScheduleBatch
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
        self.graphs.result(("verify", size)).copy_(output)
        return output

    def draft_extend(self, size: int, bs: int) -> EagleDraftInput:
        self._plan(self.draft_runner, ForwardMode.DRAFT_EXTEND, size, self.worker.max_path + 1)
        self.graphs.replay(("draft_extend", size))
        return dataclasses.replace(self._rows(self.draft_input, bs))  # the batch will filter its own

    def idle(self, size: int) -> None:
        """A round of padding rows, for the collectives that the other ranks' graphs hold."""
        self.draft(size, tuple(self.inputs[size].no_rows()), self.draft_input)
        output = self.verify(size)
        self.draft_extend(size, 0)
        output.result.read()  # waiting keeps the pinned inputs until they are sent

    def _plan_verify(self, size: int) -> None:
        n = self.worker.speculative_num_draft_tokens
        self._plan(self.target_runner, ForwardMode.TARGET_VERIFY, size, n)

    def _plan(self, runner: ModelRunner, mode: ForwardMode, size: int, entries: int) -> None:
        """Plan a graph's attention for S + `entries` of each request."""
        lens = self.seq_lens_cpu + entries
        runner.attn_backend.init_forward_metadata_replay_cuda_graph(mode, size, lens)

    def _rows(
        self, static: EagleVerifyInput | EagleDraftInput, bs: int
    ) -> EagleVerifyInput | EagleDraftInput:
        """`static.rows(bs)`, made once: a dozen slices in every round would cost as much as a forward."""
        key = (id(static), bs)
        if key not in self._views:
            self._views[key] = static.rows(bs)
        return self._views[key]
