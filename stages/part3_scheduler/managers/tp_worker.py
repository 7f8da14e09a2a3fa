"""A model and the pools it runs over. Restates sglang/srt/managers/tp_worker.py."""

from __future__ import annotations

import torch

from ..configs.model_config import ModelConfig
from ..layers.dp_attention import GlobalStep
from ..layers.logits_processor import LogitsProcessorOutput
from ..layers.sampler import Sampler
from ..mem_cache.allocator import TokenToKVPoolAllocator
from ..mem_cache.memory_pool import ReqToTokenPool
from ..model_executor.cuda_graph_runner import CudaGraphRunner
from ..model_executor.forward_batch_info import ForwardBatch
from ..model_executor.model_runner import ModelRunner
from ..server_args import ServerArgs
from .decode_cuda_graphs import DecodeCudaGraphs
from .generation_result import GenerationBatchResult
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

    def init_cuda_graphs(self, graphs: CudaGraphRunner) -> None:
        """Have a decode step of each size recorded, with and without logits."""
        self.graphs = graphs
        self.decode_graphs = DecodeCudaGraphs(self, graphs)
        self.model_runner.init_extend_graphs(graphs)

    def forward_batch_generation(self, batch: ModelWorkerBatch) -> GenerationBatchResult:
        """Run the model over a step's rows and sample one token per request."""
        size = None
        if not batch.forward_mode.is_extend():
            size = self.graphs.padded_size(len(batch.req_pool_indices), batch.global_step)
        if size is None:
            return self.forward_and_sample(batch, ForwardBatch.init_new(batch, self.model_runner))
        return self.decode_graphs.run(size, batch)

    def forward_idle(self, step: GlobalStep) -> None:
        """A step without requests, so that the gathers of the ranks that have some are whole."""
        size = self.graphs.padded_size(0, step)
        if size is None:
            self.model_runner.forward_idle(step.target_rows)
        else:
            self.decode_graphs.idle(size)

    def forward_and_sample(
        self, batch: ModelWorkerBatch, forward_batch: ForwardBatch
    ) -> GenerationBatchResult:
        """The same over tensors on the device; `forward_batch` keeps what a draft model needs of them."""
        forward_batch.topk = None if batch.needs_logits else 1
        output = self.model_runner.forward(forward_batch)
        forward_batch.hidden_states = output.hidden_states
        if batch.return_hidden_states:
            output.hidden_states = forward_batch.last_hidden_states()
        return self.sample(batch, output, forward_batch.output_positions, forward_batch.known_next_tokens)

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
