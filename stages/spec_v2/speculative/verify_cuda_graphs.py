"""A round as CUDA graphs: what every method has of them, which is a draft and a verification.

Restates the verifying half of sglang/srt/model_executor/cuda_graph_runner.py. The graphs of one size hand
each other their results in place: verify reads what draft wrote. Rounds hand each other theirs through the
future map, whose rows are read inside the graphs. What the host sends and reads goes outside of them: a step
has host memory of its own, for the step before is still under way.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ..layers.logits_processor import LogitsProcessorOutput
from ..managers.overlap_utils import DecodeStep
from ..managers.schedule_batch import ModelWorkerBatch, most_new_slots
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..model_executor.device_io import Readback
from ..model_executor.forward_batch_info import ForwardMode
from ..model_executor.model_runner import ModelRunner
from ..model_executor.packed_buffer import PackedBuffer
from .eagle_info import EagleVerifyInput, EagleVerifyOutput

if TYPE_CHECKING:
    from .base_spec_worker import BaseSpecWorker


class VerifyCudaGraphs(ABC):
    def __init__(self, worker: BaseSpecWorker, graphs: CudaGraphRunner):
        self.worker, self.graphs = worker, graphs
        self.label: tuple = ()  # behind a graph's name and size, where there are several shapes of rounds
        self.inputs: dict[int, PackedBuffer] = {}
        self.readbacks: dict[int, Iterator[Readback]] = {}
        self._views: dict[tuple[int, int], EagleVerifyInput] = {}
        self.target_runner = worker.target_worker.model_runner
        most = max(graphs.sizes, default=0)
        self.target_runner.attn_backend.init_cuda_graph_state(most, worker.speculative_num_draft_tokens)
        self._register()

    def of(self, worker: BaseSpecWorker) -> VerifyCudaGraphs:
        """The same graphs for a worker whose rounds are narrower."""
        other = copy.copy(self)
        other.worker, other.label = worker, (worker.speculative_num_draft_tokens,)
        other.inputs, other.readbacks, other._views = {}, {}, {}
        other._register()
        return other

    def _register(self) -> None:
        sizes = self.worker.graph_sizes()
        self.graphs.register(lambda size: self._capture(size) if size in sizes else None)

    def _key(self, name: str, size: int) -> tuple:
        return (name, size, *self.label)

    def _capture(self, size: int) -> None:
        buffer = self.inputs[size] = self._input_buffer(size)
        self.readbacks[size] = itertools.cycle((Readback(), Readback()))  # the last result is not read yet
        verify_input = self.graphs.capture(self._key("draft", size), partial(self._draft, buffer))
        self.graphs.capture(
            self._key("verify_logits", size), partial(self._verify_logits, size, verify_input)
        )
        self.graphs.capture(self._key("verify", size), partial(self._verify, verify_input))

    def _input_buffer(self, size: int) -> PackedBuffer:
        """What the host sends for a round."""
        return PackedBuffer(self.worker.device, self._input_shapes(size))

    def _input_shapes(self, size: int) -> list[tuple[int, ...]]:
        worker = self.worker
        page_size = worker.server_args.page_size
        return DecodeStep.input_shapes(size, most_new_slots(worker.alloc_len_per_decode(), page_size))

    # ---- what is recorded ----

    @abstractmethod
    def _draft(self, buffer: PackedBuffer) -> EagleVerifyInput:
        """The trees to verify, from what the host has sent and the future map."""

    def _verify(self, verify_input: EagleVerifyInput) -> EagleVerifyOutput:
        output = self.worker.accept(verify_input, self.worker.target_forward(verify_input, topk=1), None)
        output.result.pack()
        return output

    def _verify_logits(self, size: int, verify_input: EagleVerifyInput) -> LogitsProcessorOutput:
        output = self.worker.target_forward(verify_input, topk=None)
        output.next_token_logits = self.graphs.shared("next_token_logits", size, output.next_token_logits)
        return output

    # ---- one round; `seq_lens_cpu` is set by whoever drafts ----

    def verify(self, size: int) -> EagleVerifyOutput:
        self._plan_verify(size)
        return self._with_read(size, self.graphs.replay(self._key("verify", size)))

    def verify_with_logits(
        self, size: int, verify_input: EagleVerifyInput, batch: ModelWorkerBatch
    ) -> EagleVerifyOutput:
        """The target in its graph; the acceptance outside, for it depends on what the requests ask."""
        self._plan_verify(size)
        logits_output = self.graphs.replay(self._key("verify_logits", size))
        real = len(verify_input.positions)
        logits_output = dataclasses.replace(
            logits_output,
            next_token_logits=logits_output.next_token_logits[:real],
            hidden_states=logits_output.hidden_states[:real],
        )
        output = self.worker.accept(verify_input, logits_output, batch)
        output.result.start_read()
        self.graphs.result(self._key("verify", size)).copy_(output)
        return output

    def _with_read(self, size: int, static: EagleVerifyOutput) -> EagleVerifyOutput:
        """A result of this round's own, on its way to the host: the graph's will be the next round's."""
        result = dataclasses.replace(static.result).start_read(next(self.readbacks[size]))
        return EagleVerifyOutput(static.paths, static.hidden_states, result)

    def _plan_verify(self, size: int) -> None:
        n = self.worker.speculative_num_draft_tokens
        self._plan(self.target_runner, ForwardMode.TARGET_VERIFY, size, n, n)

    def _plan(
        self, runner: ModelRunner, mode: ForwardMode, size: int, rows: int, entries: int, front: int = 0
    ) -> None:
        """Plan a graph's attention for `entries` behind S, or behind the `front` before it, of each request.

        A backend that does not plan is not asked to.
        """
        if self.seq_lens_cpu is not None:
            lens = (self.seq_lens_cpu - front).clip(0) + entries
            runner.attn_backend.init_forward_metadata_replay_cuda_graph(mode, size, lens, rows)

    def _rows(self, static: EagleVerifyInput, bs: int) -> EagleVerifyInput:
        """`static.rows(bs)`, made once: a dozen slices in every round would cost as much as a forward."""
        key = (id(static), bs)
        if key not in self._views:
            self._views[key] = static.rows(bs)
        return self._views[key]
