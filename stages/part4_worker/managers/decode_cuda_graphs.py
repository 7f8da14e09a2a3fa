"""A plain decode step as a CUDA graph, greedy or with its logits for whoever samples.

Restates the decoding half of sglang/srt/model_executor/cuda_graph_runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..layers.logits_processor import LogitsProcessorOutput
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..model_executor.device_io import Readback
from ..model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from ..model_executor.packed_buffer import PackedBuffer
from .generation_result import GenerationBatchResult
from .schedule_batch import ModelWorkerBatch

if TYPE_CHECKING:
    from .tp_worker import TpModelWorker

# Fields of a ModelWorkerBatch, [bs] each, that a decode step of fixed size takes from the host.
_DECODE_INPUTS = (
    "input_ids",
    "req_pool_indices",
    "prefix_lens",
    "seq_lens",
    "out_cache_loc",
    "output_positions",
)
_decode_inputs = attrgetter(*_DECODE_INPUTS)


class DecodeCudaGraphs:
    def __init__(self, worker: TpModelWorker, graphs: CudaGraphRunner):
        self.worker, self.graphs = worker, graphs
        self.inputs: dict[int, PackedBuffer] = {}
        self.model_runner = worker.model_runner
        self.model_runner.attn_backend.init_cuda_graph_state(max(graphs.sizes, default=0), 1)
        graphs.register(self._capture)

    def _capture(self, size: int) -> None:
        buffer = self.inputs[size] = PackedBuffer(self.worker.device, [(size,)] * len(_DECODE_INPUTS))
        self.graphs.capture(("decode", size), partial(self._decode_greedily, buffer, Readback()))
        self.graphs.capture(("decode_logits", size), partial(self._decode_logits, buffer))

    # ---- what is recorded ----

    def _decode_greedily(self, buffer: PackedBuffer, readback: Readback) -> GenerationBatchResult:
        _, output = self._decode(buffer, topk=1)
        return GenerationBatchResult(output.topk_index, output.topk_p[:, 0]).start_read(readback)

    def _decode_logits(self, buffer: PackedBuffer) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        output_positions, output = self._decode(buffer, topk=None)
        size = len(output_positions)
        output.next_token_logits = self.graphs.shared("next_token_logits", size, output.next_token_logits)
        return output_positions, output

    def _decode(self, buffer: PackedBuffer, topk: int | None) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        """One token for each row of static inputs. Also returns output positions."""
        buffer.send()
        fields = dict(zip(_DECODE_INPUTS, buffer.device, strict=True))
        bs = len(fields["seq_lens"])
        self.worker.kernels.assign_req_to_token(
            self.model_runner.req_to_token_pool.req_to_token,
            fields["req_pool_indices"],
            fields["prefix_lens"],
            fields["out_cache_loc"][:, None],
        )
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            positions=fields["prefix_lens"],
            q_start_loc=self.worker.first_rows(bs, 1),
            max_q_len=1,
            attn_backend=self.model_runner.attn_backend,
            capture_hidden_mode=CaptureHiddenMode.LAST,
            topk=topk,
            **fields,
        )
        return forward_batch.output_positions, self.model_runner.forward(forward_batch)

    # ---- one step ----

    def run(self, size: int, batch: ModelWorkerBatch) -> GenerationBatchResult:
        self._fill(size, _decode_inputs(batch))
        if not batch.needs_logits and not batch.return_hidden_states:
            return self._replay_greedy(size)
        bs = len(batch.req_pool_indices)
        positions, output = self.graphs.replay(("decode_logits", size))
        rows = replace(
            output, next_token_logits=output.next_token_logits[:bs], hidden_states=output.hidden_states[:bs]
        )
        return self.worker.sample(batch, rows, positions[:bs])

    def idle(self, size: int) -> None:
        """A step of padding rows, for the collectives that the other ranks' graphs hold."""
        self._fill(size, self.inputs[size].no_rows())
        self._replay_greedy(size).read()  # waiting keeps the pinned inputs until they are sent

    def _fill(self, size: int, arrays: Sequence[np.ndarray]) -> None:
        self.inputs[size].fill(*arrays)
        backend, seq_lens = self.model_runner.attn_backend, arrays[_DECODE_INPUTS.index("seq_lens")]
        backend.init_forward_metadata_replay_cuda_graph(ForwardMode.DECODE, size, seq_lens)

    def _replay_greedy(self, size: int) -> GenerationBatchResult:
        result = self.graphs.replay(("decode", size))
        result.readback.launched()
        return result
