"""A model and the pools it runs over. Restates sglang/srt/managers/tp_worker.py."""

from __future__ import annotations

from typing import Any

import torch

from ..configs.model_config import ModelConfig
from ..layers.dp_attention import GlobalStep
from ..layers.logits_processor import LogitsProcessorOutput
from ..layers.sampler import Sampler
from ..mem_cache.allocator import TokenToKVPoolAllocator
from ..mem_cache.memory_pool import ReqToTokenPool
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..model_executor.device_io import upload
from ..model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from ..model_executor.model_runner import ModelRunner
from ..server_args import ServerArgs
from .decode_cuda_graphs import DecodeCudaGraphs
from .generation_result import GenerationBatchResult
from .overlap_utils import DecodeStep, FutureMap, OnPublish
from .schedule_batch import ModelWorkerBatch


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

    def init_future_map(self, future_map: FutureMap) -> None:
        """Take what the steps of this worker leave to one another."""
        self.future_map = future_map

    def init_cuda_graphs(self, graphs: CudaGraphRunner) -> None:
        """Have a decode step of each size recorded, with and without logits."""
        self.graphs = graphs
        self.decode_graphs = DecodeCudaGraphs(self, graphs)
        self.model_runner.init_extend_graphs(graphs)

    def alloc_len_per_decode(self) -> int:
        """The most positions behind S that a decode step writes for one request."""
        return 1

    def alloc_len_per_extend(self) -> int:
        """The positions behind a prompt that its prefill writes."""
        return 0

    def kv_lookahead(self) -> int:
        """How many tokens behind its own the KV of a position depends on."""
        return 0

    def activate_step_by_batch(self, batch_size: int) -> TpModelWorker:
        """Who runs the decode step that is launched next, over `batch_size` requests."""
        return self

    def rows_per_req(self) -> tuple[int, int, int]:
        """Rows of a decoding request in a forward of the draft loop, of the target, in the draft extend."""
        return 0, 1, 0

    def forward_batch_generation(
        self, batch: ModelWorkerBatch, on_publish: OnPublish
    ) -> GenerationBatchResult:
        """Run the model over a step's rows and sample one token per request."""
        if batch.forward_mode.is_extend():
            forward_batch = ForwardBatch.init_new(batch, self.model_runner)
            rows = forward_batch.req_pool_indices
            self.future_map.publish(rows, forward_batch.seq_lens)
            on_publish()
            result = self.forward_and_sample(batch, forward_batch)
            self.future_map.stash(rows, result.next_token_ids[:, 0])
            return result
        size = self.graphs.padded_size(len(batch.req_pool_indices), batch.global_step)
        if size is not None:
            return self.decode_graphs.run(size, batch, on_publish)
        step = self.begin(*upload(self.device, *batch.decode_inputs), batch.seq_lens_cpu, batch.global_step)
        on_publish()
        output = self.decode_forward(step, topk=None if batch.needs_logits else 1)
        result = self.sample(batch, output, step.output_positions)
        self.future_map.stash(step.req_pool_indices, result.next_token_ids[:, 0])
        return result

    def begin(self, *inputs: Any) -> DecodeStep:
        """Start a plain decode step, whose lengths are known before it has run; see DecodeStep.resolve."""
        step = DecodeStep.resolve(self.future_map, self.model_runner.req_to_token_pool, *inputs)
        self.future_map.publish(step.req_pool_indices, step.seq_lens + 1)
        return step

    def decode_forward(self, step: DecodeStep, topk: int | None) -> LogitsProcessorOutput:
        """One row for each request: its last token, at S."""
        runner = self.model_runner
        table = runner.req_to_token_pool.req_to_token
        slots = self.kernels.assign_extend_cache_locs(table, step.req_pool_indices, step.seq_lens, 1)
        return runner.forward(
            ForwardBatch(
                forward_mode=ForwardMode.DECODE,
                input_ids=step.output_tokens,
                positions=step.seq_lens,
                req_pool_indices=step.req_pool_indices,
                prefix_lens=step.seq_lens,
                seq_lens=step.seq_lens + 1,
                out_cache_loc=slots[:, 0],
                q_start_loc=self.first_rows(len(step.seq_lens), 1),
                max_q_len=1,
                attn_backend=runner.attn_backend,
                seq_lens_cpu=step.planned(1),
                capture_hidden_mode=CaptureHiddenMode.LAST,
                topk=topk,
                dp_rows=step.global_step.target_rows,
            )
        )

    def forward_idle(self, step: GlobalStep) -> GenerationBatchResult | None:
        """A step without requests, so that the gathers of the ranks that have some are whole.

        Returns what has to be read before a second step is launched after it, if there is anything.
        """
        size = self.graphs.padded_size(0, step)
        if size is not None:
            return self.decode_graphs.idle(size)
        self.model_runner.forward_idle(step.target_rows)
        return None

    def forward_and_sample(
        self, batch: ModelWorkerBatch, forward_batch: ForwardBatch
    ) -> GenerationBatchResult:
        """The same over tensors on the device; `forward_batch` keeps what a draft model needs of them."""
        forward_batch.topk = None if batch.needs_logits else 1
        output = self.model_runner.forward(forward_batch)
        forward_batch.hidden_states = output.hidden_states
        if batch.return_hidden_states:
            output.hidden_states = forward_batch.last_hidden_states()
        return self.sample(
            batch, output, forward_batch.output_positions, forward_batch.known_next_tokens[:, 0]
        )

    def sample(
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
