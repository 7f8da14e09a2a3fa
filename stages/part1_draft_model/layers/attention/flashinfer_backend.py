"""Attention by FlashInfer's wrappers. Restates sglang/srt/layers/attention/flashinfer_backend.py.

A wrapper wants to know before the first layer how long every request is, on the host. The host has these
lengths anyway, so a forward has two halves and reads nothing back:

    plan      on the host: flashinfer_plan.py
    lay out   on the device: the table of requests → a flat list of slots

A plan may be longer than what exists: the draft extend is planned as if everything had been accepted. Which
entries exist is known on the device; what is behind them nobody sees.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...model_executor.forward_batch_info import ForwardBatch
from .base_backend import AttentionBackend
from .flashinfer_plan import CAUSAL, DECODE, Planner, load_flashinfer

if TYPE_CHECKING:
    from ...model_executor.model_runner import ModelRunner
    from ..radix_attention import RadixAttention

logger = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
# Query heads for each KV head; with more upstream decodes with tensor cores (from five on, since #8624 four).
MAX_DECODE_GROUP = 3


def check_flashinfer(dtype: torch.dtype, head_dim: int) -> None:
    """Refuse a model that FlashInfer has no kernels for.

    Raises:
        ValueError: the package is missing, or the model's type or head size is not supported.
    """
    load_flashinfer()
    if dtype not in DTYPES:
        raise ValueError(
            f"attention_backend='flashinfer' cannot run in {str(dtype).removeprefix('torch.')}, only in "
            "float16 and bfloat16; set dtype or use 'triton'."
        )
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"attention_backend='flashinfer' cannot run heads of {head_dim} dimensions, only of "
            f"{', '.join(map(str, HEAD_DIMS))}; use 'triton'."
        )


class FlashInferAttnBackend(AttentionBackend):
    def __init__(self, model_runner: ModelRunner):
        super().__init__(model_runner)
        config = model_runner.model_config
        q_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.planner = Planner(q_heads, kv_heads, config.head_dim, model_runner.dtype, model_runner.device)
        self.decode_kind = DECODE if q_heads <= MAX_DECODE_GROUP * kv_heads else CAUSAL
        self._warm_up(CAUSAL, self.decode_kind)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan, and lay slots out on the device."""
        plan = forward_batch.attn_metadata = self.planner.eager(
            self._kind(forward_batch), _q_lens(forward_batch), forward_batch.seq_lens_cpu
        )
        self.kernels.create_kv_indices(
            self.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            plan.kv_indptr,
            plan.kv_indices,
            self.page_size,
        )

    def forward(self, q: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        forward_batch.attn_metadata.wrapper.run(q, self._paged(layer.layer_id), out=out)
        return out

    # ---- parts ----

    def _kind(self, forward_batch: ForwardBatch) -> str:
        extends = forward_batch.forward_mode.is_extend() or forward_batch.max_q_len > 1
        return CAUSAL if extends else self.decode_kind

    def _paged(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """K and V as pages of one slot, [slots, 1, kv_heads, head_dim]."""
        return tuple(t.unsqueeze(1) for t in self.kv_pool.get_kv_buffer(layer_id))

    def _warm_up(self, *kinds: str) -> None:
        """Have kernels compiled, or found, now and not in the first request."""
        logger.info("FlashInfer compiles its kernels where that was not done before: about a minute")
        planner, one = self.planner, np.ones(1, dtype=np.int64)
        q = torch.zeros(
            1, planner.q_heads, planner.head_dim, dtype=planner.dtype, device=self.req_to_token.device
        )
        for kind in dict.fromkeys(kinds):
            plan = planner.eager(kind, one, one)
            plan.kv_indices.zero_()  # the padding slot
            plan.wrapper.run(q, self._paged(0))


def _q_lens(forward_batch: ForwardBatch) -> np.ndarray:
    if forward_batch.extend_seq_lens_cpu is not None:
        return forward_batch.extend_seq_lens_cpu
    return np.full(len(forward_batch.seq_lens_cpu), forward_batch.max_q_len)
