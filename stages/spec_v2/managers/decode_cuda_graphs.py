"""A plain decode step as a CUDA graph, greedy or with its logits for whoever samples.

Restates the decoding half of sglang/srt/model_executor/cuda_graph_runner.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..layers.logits_processor import LogitsProcessorOutput
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..model_executor.device_io import Readback
from ..model_executor.forward_batch_info import ForwardMode
from ..model_executor.packed_buffer import PackedBuffer
from .generation_result import GenerationBatchResult
from .overlap_utils import DecodeStep, OnPublish
from .schedule_batch import ModelWorkerBatch, most_new_slots

if TYPE_CHECKING:
    from .tp_worker import TpModelWorker


class DecodeCudaGraphs:
    def __init__(self, worker: TpModelWorker, graphs: CudaGraphRunner):
        self.worker, self.graphs = worker, graphs
        self.inputs: dict[int, PackedBuffer] = {}
        self.readbacks: dict[int, Iterator[Readback]] = {}
        self.model_runner = worker.model_runner
        self.model_runner.attn_backend.init_cuda_graph_state(max(graphs.sizes, default=0), 1)
        graphs.register(self._capture)

    def _capture(self, size: int) -> None:
        new_slots = most_new_slots(self.worker.alloc_len_per_decode(), self.worker.server_args.page_size)
        shapes = DecodeStep.input_shapes(size, new_slots)
        buffer = self.inputs[size] = PackedBuffer(self.worker.device, shapes)
        self.readbacks[size] = itertools.cycle((Readback(), Readback()))  # the last result is not read yet
        self.graphs.capture(("decode", size), partial(self._decode_greedily, buffer))
        self.graphs.capture(("decode_logits", size), partial(self._decode_logits, buffer))

    # ---- what is recorded ----

    def _decode_greedily(self, buffer: PackedBuffer) -> GenerationBatchResult:
        step = self.worker.begin(*buffer.device)
        output = self.worker.decode_forward(step, topk=1)
        self.worker.future_map.stash(step.req_pool_indices, output.topk_index[:, 0])
        return GenerationBatchResult(output.topk_index, output.topk_p[:, 0]).pack()

    def _decode_logits(self, buffer: PackedBuffer) -> tuple[DecodeStep, LogitsProcessorOutput]:
        step = self.worker.begin(*buffer.device)
        output = self.worker.decode_forward(step, topk=None)
        size = len(step.seq_lens)
        output.next_token_logits = self.graphs.shared("next_token_logits", size, output.next_token_logits)
        return step, output

    # ---- one step ----

    def run(self, size: int, batch: ModelWorkerBatch, on_publish: OnPublish) -> GenerationBatchResult:
        bs = len(batch.req_pool_indices)
        self._send(size, batch.decode_inputs, batch.seq_lens_cpu)
        if not batch.needs_logits and not batch.return_hidden_states:
            result = self._replay_greedy(size)
        else:
            step, output = self.graphs.replay(("decode_logits", size))
            rows = replace(
                output,
                next_token_logits=output.next_token_logits[:bs],
                hidden_states=output.hidden_states[:bs],
            )
            result = self.worker.sample(batch, rows, step.output_positions[:bs])
            self.worker.future_map.stash(step.req_pool_indices[:bs], result.next_token_ids[:, 0])
        on_publish()
        return result

    def idle(self, size: int) -> GenerationBatchResult:
        """A step of padding rows, for the collectives that the other ranks' graphs hold."""
        self._send(size, self.inputs[size].no_rows(), np.empty(0, np.int64))
        return self._replay_greedy(size)

    def _replay_greedy(self, size: int) -> GenerationBatchResult:
        """A result of this step's own, on its way to the host: the graph's will be the next step's."""
        return replace(self.graphs.replay(("decode", size))).start_read(next(self.readbacks[size]))

    def _send(self, size: int, arrays: Sequence[np.ndarray], seq_lens_cpu: np.ndarray | None) -> None:
        self.inputs[size].send(*arrays)
        if seq_lens_cpu is not None:
            backend = self.model_runner.attn_backend
            backend.init_forward_metadata_replay_cuda_graph(ForwardMode.DECODE, size, seq_lens_cpu + 1)
