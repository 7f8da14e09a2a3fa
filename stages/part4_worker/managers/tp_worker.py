"""A model and the pools it runs over. Restates sglang/srt/managers/tp_worker.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

import numpy as np
import torch

from ..configs.model_config import ModelConfig
from ..layers.dp_attention import GlobalStep
from ..layers.logits_processor import LogitsProcessorOutput
from ..layers.logprobs import LogprobRows
from ..layers.sampler import Sampler
from ..mem_cache.allocator import TokenToKVPoolAllocator
from ..mem_cache.memory_pool import ReqToTokenPool
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..model_executor.device_io import Readback
from ..model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from ..model_executor.model_runner import ModelRunner
from ..model_executor.packed_buffer import PackedBuffer
from ..server_args import ServerArgs
from .schedule_batch import ModelWorkerBatch

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


@dataclass
class GenerationBatchResult:
    """What one step gives each request: on the device until `read`, on the host after it.

    Request i gets tokens next_token_ids[i, j] for every j with accept_index[i, j] ≥ 0; all columns (one)
    where nothing was drafted. Rows of the flat fields are i · width + j.
    """

    next_token_ids: torch.Tensor | np.ndarray  # [bs, width]
    # [bs] on the device a number, finite only where the target's logits held no NaN or infinity; on the host
    # a list of bool
    is_finite: torch.Tensor | list[bool]
    # [bs, width] node of the tree, −1 behind the accepted
    accept_index: torch.Tensor | np.ndarray | None = None
    logprobs: LogprobRows | None = None  # rows: [bs · width]
    hidden_states: torch.Tensor | np.ndarray | None = None  # [bs · width, hidden] float32
    input_logprobs: LogprobRows | None = None  # rows as in ModelWorkerBatch.input_logprobs
    readback: Readback | None = field(default=None, repr=False)
    tokens: list[list[int]] = field(default_factory=list)  # on the host: each request's tokens

    _PLAIN = ("next_token_ids", "is_finite", "accept_index", "hidden_states")
    _SCORED = ("logprobs", "input_logprobs")

    def start_read(self, readback: Readback | None = None) -> GenerationBatchResult:
        """Send everything on its way to the host; whatever is launched from now on need not be waited for."""
        self.readback = readback or Readback()
        plain = [getattr(self, n) for n in self._PLAIN if getattr(self, n) is not None]
        scored = [t for n in self._SCORED if getattr(self, n) is not None for t in getattr(self, n)]
        self.readback.copy(*plain, *scored)
        return self

    def read(self) -> GenerationBatchResult:
        """The same on the host: the one blocking read of a step."""
        arrays = iter(self.readback.wait())
        fields = {n: next(arrays) for n in self._PLAIN if getattr(self, n) is not None}
        for n in self._SCORED:
            if getattr(self, n) is not None:
                fields[n] = LogprobRows(*(next(arrays) for _ in LogprobRows._fields))
        result = GenerationBatchResult(**fields)
        # Every request asks for its own: a list answers faster than an array.
        result.is_finite = np.isfinite(result.is_finite).tolist()
        result.tokens = fields["next_token_ids"].tolist()
        if self.accept_index is not None:
            paths = fields["accept_index"].tolist()
            result.tokens = [
                row if path[-1] >= 0 else row[: path.index(-1)]
                for row, path in zip(result.tokens, paths, strict=True)
            ]
        return result


class TpModelWorker:
    """The target model's worker, and the base of the draft's."""

    def __init__(self, server_args: ServerArgs, model_config: ModelConfig):
        self.server_args = server_args
        self.model_config = model_config
        self.model_runner = ModelRunner(server_args, model_config)
        self.device = self.model_runner.device
        self.kernels = self.model_runner.kernels
        self.sampler = Sampler(self.kernels)
        self._first_rows: dict[int, torch.Tensor] = {}

    def first_rows(self, bs: int, width: int) -> torch.Tensor:
        """The first row of each request where every request has `width` rows, [bs + 1]; made only once."""
        if width not in self._first_rows:
            end = (self.server_args.max_running_requests + 1) * width
            self._first_rows[width] = torch.arange(0, end, width, device=self.device)
        return self._first_rows[width][: bs + 1]

    def init_memory_pool(self, req_to_token_pool: ReqToTokenPool, allocator: TokenToKVPoolAllocator) -> None:
        """Take the shared table and slot numbers; allocate this model's own KV tensors."""
        self.model_runner.init_memory_pool(req_to_token_pool, allocator)

    def init_cuda_graphs(self, graphs: CudaGraphRunner) -> None:
        """Have a decode step of each size recorded, with and without logits."""
        self.graphs = graphs
        self.static_inputs: dict[int, PackedBuffer] = {}
        self.model_runner.attn_backend.init_cuda_graph_state(max(graphs.sizes, default=0), 1)
        graphs.register(self._capture_decode)
        self.model_runner.init_extend_graphs(graphs)

    def _capture_decode(self, size: int) -> None:
        buffer = self.static_inputs[size] = PackedBuffer(self.device, [(size,)] * len(_DECODE_INPUTS))
        self.graphs.capture(("decode", size), partial(self._decode_greedily, buffer, Readback()))
        self.graphs.capture(("decode_logits", size), partial(self._decode_logits, buffer))

    def forward_batch_generation(self, batch: ModelWorkerBatch) -> GenerationBatchResult:
        """Run the model over a step's rows and sample one token per request."""
        size = None
        if not batch.forward_mode.is_extend():
            size = self.graphs.padded_size(len(batch.req_pool_indices), batch.global_step)
        if size is None:
            return self.forward_and_sample(batch, ForwardBatch.init_new(batch, self.model_runner))
        return self._replay_decode(batch, size)

    def _replay_decode(self, batch: ModelWorkerBatch, size: int) -> GenerationBatchResult:
        self._fill(size, _decode_inputs(batch))
        if not batch.needs_logits and not batch.return_hidden_states:
            return self._replay_greedy(size)
        bs = len(batch.req_pool_indices)
        positions, output = self.graphs.replay(("decode_logits", size))
        rows = replace(
            output, next_token_logits=output.next_token_logits[:bs], hidden_states=output.hidden_states[:bs]
        )
        return self._sample(batch, rows, positions[:bs])

    def _fill(self, size: int, arrays: Sequence[np.ndarray]) -> None:
        self.static_inputs[size].fill(*arrays)
        backend, seq_lens = self.model_runner.attn_backend, arrays[_DECODE_INPUTS.index("seq_lens")]
        backend.init_forward_metadata_replay_cuda_graph(ForwardMode.DECODE, size, seq_lens)

    def _replay_greedy(self, size: int) -> GenerationBatchResult:
        result = self.graphs.replay(("decode", size))
        result.readback.launched()
        return result

    def _decode_greedily(self, buffer: PackedBuffer, readback: Readback) -> GenerationBatchResult:
        _, output = self._decode(buffer, topk=1)
        return GenerationBatchResult(output.topk_index, output.topk_p[:, 0]).start_read(readback)

    def _decode_logits(self, buffer: PackedBuffer) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        output_positions, output = self._decode(buffer, topk=None)
        size = len(output_positions)
        output.next_token_logits = self.graphs.shared("next_token_logits", size, output.next_token_logits)
        return output_positions, output

    def _decode(self, buffer: PackedBuffer, topk: int | None) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        """One token for each row of static inputs: what a graph records. Also returns output positions."""
        buffer.send()
        fields = dict(zip(_DECODE_INPUTS, buffer.device, strict=True))
        bs = len(fields["seq_lens"])
        self.kernels.assign_req_to_token(
            self.model_runner.req_to_token_pool.req_to_token,
            fields["req_pool_indices"],
            fields["prefix_lens"],
            fields["out_cache_loc"][:, None],
        )
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            positions=fields["prefix_lens"],
            q_start_loc=self.first_rows(bs, 1),
            max_q_len=1,
            attn_backend=self.model_runner.attn_backend,
            capture_hidden_mode=CaptureHiddenMode.LAST,
            topk=topk,
            **fields,
        )
        return forward_batch.output_positions, self.model_runner.forward(forward_batch)

    def forward_idle(self, step: GlobalStep) -> None:
        """A step without requests, so that the gathers of the ranks that have some are whole."""
        size = self.graphs.padded_size(0, step)
        if size is None:
            self.model_runner.forward_idle(step.target_rows)
        else:
            self._fill(size, self.static_inputs[size].no_rows())
            self._replay_greedy(size).read()  # waiting keeps the pinned inputs until they are sent

    def forward_and_sample(
        self, batch: ModelWorkerBatch, forward_batch: ForwardBatch
    ) -> GenerationBatchResult:
        """The same over tensors on the device; `forward_batch` keeps what a draft model needs of them."""
        forward_batch.topk = None if batch.needs_logits else 1
        output = self.model_runner.forward(forward_batch)
        forward_batch.hidden_states = output.hidden_states
        if batch.return_hidden_states:
            output.hidden_states = forward_batch.last_hidden_states()
        return self._sample(batch, output, forward_batch.output_positions, forward_batch.known_next_tokens)

    def _sample(
        self,
        batch: ModelWorkerBatch,
        output: LogitsProcessorOutput,
        output_positions: torch.Tensor,
        known: torch.Tensor | None = None,
    ) -> GenerationBatchResult:
        """One token per request, unless it is `known` (≥ 0); `output` has a row for each request."""
        info, logits = batch.sampling_info, output.next_token_logits  # [bs, vocab]
        if logits is None:
            next_token_ids, is_finite = output.topk_index[:, 0], output.topk_p[:, 0]
        else:
            biased = info.apply_logits_bias(logits, output_positions, row_to_req=None)
            next_token_ids = self.sampler.forward(biased, info, output_positions)
            is_finite = logits.sum(-1)
        is_new = torch.ones_like(next_token_ids)
        if known is not None:
            is_new = (known < 0).long()
            next_token_ids = torch.where(known < 0, next_token_ids, known)
        info.append_tokens(next_token_ids[:, None], is_new)
        return GenerationBatchResult(
            next_token_ids=next_token_ids[:, None],
            is_finite=is_finite,
            logprobs=batch.score(logits, next_token_ids, self.kernels),
            hidden_states=output.hidden_states.float() if batch.return_hidden_states else None,
            input_logprobs=output.input_logprobs,
        ).start_read()
