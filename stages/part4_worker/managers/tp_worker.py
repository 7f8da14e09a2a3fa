"""A model and the pools it runs over. Restates sglang/srt/managers/tp_worker.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..configs.model_config import ModelConfig
from ..layers.logprobs import LogprobRows
from ..layers.sampler import Sampler
from ..mem_cache.allocator import TokenToKVPoolAllocator
from ..mem_cache.memory_pool import ReqToTokenPool
from ..model_executor.device_io import download
from ..model_executor.forward_batch_info import ForwardBatch
from ..model_executor.model_runner import ModelRunner
from ..server_args import ServerArgs
from .schedule_batch import ModelWorkerBatch


@dataclass
class GenerationBatchResult:
    """What one step gives each request: on the device until `read`, on the host after it.

    Request i gets tokens next_token_ids[i, j] for every j with accept_index[i, j] ≥ 0; all columns (one)
    where nothing was drafted. Rows of the flat fields are i · width + j.
    """

    next_token_ids: torch.Tensor | np.ndarray  # [bs, width]
    is_finite: torch.Tensor | np.ndarray  # [bs] bool: the target's logits held no NaN or infinity
    # [bs, width] node of the tree, −1 behind the accepted
    accept_index: torch.Tensor | np.ndarray | None = None
    logprobs: LogprobRows | None = None  # rows: [bs · width]
    hidden_states: torch.Tensor | np.ndarray | None = None  # [bs · width, hidden] float32
    input_logprobs: LogprobRows | None = None  # rows as in ModelWorkerBatch.input_logprobs

    def read(self) -> GenerationBatchResult:
        """The same on the host: the one blocking read of a step."""
        plain = [
            n
            for n in ("next_token_ids", "is_finite", "accept_index", "hidden_states")
            if getattr(self, n) is not None
        ]
        scored = [n for n in ("logprobs", "input_logprobs") if getattr(self, n) is not None]
        arrays = iter(
            download(*(getattr(self, n) for n in plain), *(t for n in scored for t in getattr(self, n)))
        )
        fields = {n: next(arrays) for n in plain}
        fields |= {n: LogprobRows(*(next(arrays) for _ in LogprobRows._fields)) for n in scored}
        return replace(self, **fields)


class TpModelWorker:
    """The target model's worker, and the base of the draft's."""

    def __init__(self, server_args: ServerArgs, model_config: ModelConfig):
        self.server_args = server_args
        self.model_config = model_config
        self.model_runner = ModelRunner(server_args, model_config)
        self.device = self.model_runner.device
        self.kernels = self.model_runner.kernels
        self.sampler = Sampler(self.kernels)

    def init_memory_pool(self, req_to_token_pool: ReqToTokenPool, allocator: TokenToKVPoolAllocator) -> None:
        """Take the shared table and slot numbers; allocate this model's own KV tensors."""
        self.model_runner.init_memory_pool(req_to_token_pool, allocator)

    def forward_batch_generation(self, batch: ModelWorkerBatch) -> GenerationBatchResult:
        """Run the model over a step's rows and sample one token per request."""
        return self.forward_and_sample(batch, ForwardBatch.init_new(batch, self.model_runner))

    def forward_and_sample(
        self, batch: ModelWorkerBatch, forward_batch: ForwardBatch
    ) -> GenerationBatchResult:
        """The same over tensors on the device; `forward_batch` keeps what a draft model needs of them."""
        output = self.model_runner.forward(forward_batch)
        forward_batch.hidden_states = output.hidden_states
        info, logits = batch.sampling_info, output.next_token_logits  # [bs, vocab]
        positions, known = forward_batch.output_positions, forward_batch.known_next_tokens
        sampled = self.sampler.forward(
            info.apply_logits_bias(logits, positions, row_to_req=None), info, positions
        )
        next_token_ids = torch.where(known < 0, sampled, known)  # [bs]
        info.append_tokens(next_token_ids[:, None], (known < 0).long())
        return GenerationBatchResult(
            next_token_ids=next_token_ids[:, None],
            is_finite=torch.isfinite(logits.sum(-1)),
            logprobs=batch.score(logits, next_token_ids, self.kernels),
            hidden_states=forward_batch.last_hidden_states().float() if batch.return_hidden_states else None,
            input_logprobs=output.input_logprobs,
        )
