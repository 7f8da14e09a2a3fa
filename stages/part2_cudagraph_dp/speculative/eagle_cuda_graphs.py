"""The verification of a round as a CUDA graph.

Restates the verifying half of model_executor/cuda_graph_runner.py. The draft and the draft extend run eagerly
around it: their tokens are copied to where the graph reads them, and its results are used where it left them.
"""

from __future__ import annotations

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
from ..model_executor.packed_buffer import PackedBuffer
from .eagle_info import EagleStep, EagleVerifyInput, EagleVerifyOutput

if TYPE_CHECKING:
    from .eagle_forwards import EagleForwards


class EagleCudaGraphs:
    def __init__(self, worker: EagleForwards, graphs: CudaGraphRunner):
        self.worker, self.graphs = worker, graphs
        self.inputs: dict[int, PackedBuffer] = {}
        self.verify_inputs: dict[int, EagleVerifyInput] = {}
        most = max(graphs.sizes, default=0)
        self.target_runner = worker.target_worker.model_runner
        self.target_runner.attn_backend.init_cuda_graph_state(most, worker.speculative_num_draft_tokens)
        graphs.register(self._capture)

    def _capture(self, size: int) -> None:
        worker, n = self.worker, self.worker.speculative_num_draft_tokens
        shapes = [(size,)] * 3 + [(size, n), (size,)]
        buffer = self.inputs[size] = PackedBuffer(worker.device, shapes)
        draft_token = torch.zeros(size, n, dtype=torch.int64, device=worker.device)
        verify_input = self.verify_inputs[size] = EagleVerifyInput(EagleStep(*buffer.device), draft_token)
        self.graphs.capture(("verify_logits", size), partial(self._verify_logits, size, verify_input))
        self.graphs.capture(("verify", size), partial(self._verify, verify_input, Readback()))

    # ---- what is recorded ----

    def _verify(self, verify_input: EagleVerifyInput, readback: Readback) -> EagleVerifyOutput:
        logits_output = self.worker.target_forward(verify_input, topk=1)
        return self.worker.accept(verify_input, logits_output, None, readback)

    def _verify_logits(self, size: int, verify_input: EagleVerifyInput) -> LogitsProcessorOutput:
        output = self.worker.target_forward(verify_input, topk=None)
        output.next_token_logits = self.graphs.shared("next_token_logits", size, output.next_token_logits)
        return output

    # ---- one round ----

    def send(self, size: int, arrays: tuple[np.ndarray, ...]) -> EagleStep:
        """Send `arrays`, the fields of EagleStep for the real rows."""
        buffer, bs = self.inputs[size], len(arrays[0])
        buffer.fill(*arrays)
        buffer.send()
        return EagleStep(*(t[:bs] for t in buffer.device), arrays[1])

    def verify(self, size: int, verify_input: EagleVerifyInput) -> EagleVerifyOutput:
        self._prepare(size, verify_input)
        output = self.graphs.replay(("verify", size))
        output.result.readback.launched()
        return output.rows(len(verify_input.draft_token))

    def verify_with_logits(
        self, size: int, verify_input: EagleVerifyInput, batch: ScheduleBatch
    ) -> EagleVerifyOutput:
        """The target in its graph; the acceptance outside, for it depends on what the requests ask."""
        self._prepare(size, verify_input)
        logits_output = self.graphs.replay(("verify_logits", size))
        real = len(verify_input.positions)
        logits_output = dataclasses.replace(
            logits_output,
            next_token_logits=logits_output.next_token_logits[:real],
            hidden_states=logits_output.hidden_states[:real],
        )
        return self.worker.accept(verify_input, logits_output, batch)

    def _prepare(self, size: int, verify_input: EagleVerifyInput) -> None:
        """The chains where the graph reads them, and its attention planned for S + n of each request."""
        static, bs = self.verify_inputs[size].draft_token, len(verify_input.draft_token)
        static[:bs].copy_(verify_input.draft_token)
        static[bs:].zero_()
        lens = verify_input.step.planned(static.shape[1])
        backend = self.target_runner.attn_backend
        backend.init_forward_metadata_replay_cuda_graph(ForwardMode.TARGET_VERIFY, size, lens)
