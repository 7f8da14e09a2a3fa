"""What an attention backend does, and what ours share.

Restates sglang/srt/layers/attention/base_attn_backend.py. One rule covers every mode: row i of a request
sees the first `prefix_lens` entries and, behind them, its own past (causal) or what its tree mask allows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...model_executor.forward_batch_info import ForwardBatch, ForwardMode

if TYPE_CHECKING:
    from ...model_executor.model_runner import ModelRunner
    from ..radix_attention import RadixAttention


class AttentionBackend:
    records_prefills = True  # False where each prefill is planned for its own lengths

    def __init__(self, model_runner: ModelRunner):
        self.kernels = model_runner.kernels
        self.kv_pool = model_runner.token_to_kv_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.page_size = model_runner.server_args.page_size

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan once per forward whatever its layers share."""

    def init_cuda_graph_state(self, max_bs: int, max_q_len: int) -> None:
        """Before anything is recorded: the most requests in a graph, and the most rows of one of them."""

    def init_forward_metadata_replay_cuda_graph(
        self, forward_mode: ForwardMode, bs: int, seq_lens_cpu: np.ndarray
    ) -> None:
        """Before each replay of a graph over `bs` requests: ForwardBatch.seq_lens_cpu of the real ones."""

    def forward(self, q: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch) -> torch.Tensor:
        """q [rows, heads, head_dim] → the same shape; these rows' keys and values are stored already."""
        k_cache, v_cache = self.kv_pool.get_kv_buffer(layer.layer_id)
        return self.kernels.attention(
            q,
            k_cache,
            v_cache,
            self.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.prefix_lens,
            forward_batch.seq_lens,
            forward_batch.q_start_loc,
            forward_batch.max_q_len,
            layer.scaling,
            self.page_size,
            forward_batch.tree_mask,
            **self.planned(forward_batch),
        )

    def planned(self, forward_batch: ForwardBatch) -> dict[str, Any]:
        """Further arguments of the kernel."""
        return {}
