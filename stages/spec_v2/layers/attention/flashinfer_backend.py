"""Attention by FlashInfer's wrappers. Restates sglang/srt/layers/attention/flashinfer_backend.py.

A wrapper wants to know before the first layer how long every request is, on the host. So the host reads what
the last verification published, and a forward has two halves:

    plan      on the host, outside of any graph: flashinfer_plan.py
    lay out   on the device, inside the graph: the table of requests → a flat list of slots, the tree's
              bits → a flat mask

A plan may be longer than what exists: the draft loop plans once for all its levels, the draft extend as if
everything had been accepted. Which entries exist is known on the device; what is behind them nobody sees.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...model_executor.forward_batch_info import ForwardBatch, ForwardMode
from .base_backend import AttentionBackend
from .flashinfer_plan import CAUSAL, DECODE, MASKED, GraphBuffers, GraphPlan, Planner, load_flashinfer

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
    records_prefills = False
    needs_cpu_seq_lens = True

    def __init__(self, model_runner: ModelRunner):
        super().__init__(model_runner)
        config = model_runner.model_config
        q_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.planner = Planner(q_heads, kv_heads, config.head_dim, model_runner.dtype, model_runner.device)
        self.decode_kind = DECODE if q_heads <= MAX_DECODE_GROUP * kv_heads else CAUSAL
        speculates = model_runner.server_args.speculative_algorithm is not None
        self._warm_up(CAUSAL, *([] if speculates else [self.decode_kind]))

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Lay slots and mask out on the device; plan first if the batch does not bring its plan along."""
        if forward_batch.attn_metadata is None and forward_batch.seq_lens_cpu is None:
            forward_batch.attn_metadata = self._graph_plan(forward_batch)
        elif forward_batch.attn_metadata is None:
            forward_batch.attn_metadata = self.planner.eager(
                self._kind(forward_batch), _q_lens(forward_batch), forward_batch.seq_lens_cpu
            )
        plan = forward_batch.attn_metadata
        self.kernels.create_kv_indices(
            self.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            plan.kv_indptr,
            plan.kv_indices,
            self.page_size,
        )
        if forward_batch.tree_mask is not None:
            self.kernels.create_custom_mask(
                forward_batch.tree_mask,
                forward_batch.prefix_lens,
                plan.kv_indptr,
                plan.custom_mask,
                plan.max_kv_len,
            )

    def forward(self, q: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        forward_batch.attn_metadata.wrapper.run(q, self._paged(layer.layer_id), out=out)
        return out

    # ---- graphs ----

    def init_cuda_graph_state(self, max_bs: int, max_q_len: int) -> None:
        self.graph_plans: dict[tuple[ForwardMode, int, int], GraphPlan] = {}
        self.graph_buffers = GraphBuffers(self.planner, max_bs, max_q_len, self.req_to_token.shape[1])

    def init_forward_metadata_replay_cuda_graph(
        self, forward_mode: ForwardMode, bs: int, seq_lens_cpu: np.ndarray, max_q_len: int = 1
    ) -> None:
        self.planner.replan(self.graph_plans[forward_mode, bs, max_q_len], seq_lens_cpu)

    def _graph_plan(self, forward_batch: ForwardBatch) -> GraphPlan:
        """The plan of what is being recorded; made when its function is called for the first time."""
        bs, q_len = len(forward_batch.req_pool_indices), forward_batch.max_q_len
        key = (forward_batch.forward_mode, bs, q_len)
        if key not in self.graph_plans:
            self.graph_plans[key] = self.planner.graph(
                self._kind(forward_batch), bs, q_len, self.graph_buffers
            )
        return self.graph_plans[key]

    # ---- parts ----

    def _kind(self, forward_batch: ForwardBatch) -> str:
        if forward_batch.tree_mask is not None:
            return MASKED
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
