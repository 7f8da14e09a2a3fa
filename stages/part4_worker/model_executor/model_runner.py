"""Holds one model with its KV tensors and runs it. Restates sglang/srt/model_executor/model_runner.py."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..configs.model_config import ModelConfig
from ..kernels import load_kernels
from ..layers.attention.base_backend import AttentionBackend
from ..layers.dp_attention import local_device
from ..layers.logits_processor import LogitsProcessorOutput
from ..mem_cache.allocator import TokenToKVPoolAllocator
from ..mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from ..models.loader import load_model
from ..server_args import ServerArgs
from .cuda_graph_runner import CudaGraphRunner
from .extend_cuda_graphs import ExtendCudaGraphs
from .forward_batch_info import CaptureHiddenMode, ForwardBatch

# FlashInfer brings attention alone, so everything else is ours.
KERNELS_OF_BACKEND = {"torch_native": "native", "triton": "triton", "flashinfer": "triton"}


class ModelRunner:
    def __init__(self, server_args: ServerArgs, model_config: ModelConfig):
        self.server_args = server_args
        self.model_config = model_config
        self.device = local_device(server_args.device)
        self.dtype = _resolve_dtype(server_args.dtype, model_config, self.device)
        if server_args.attention_backend == "flashinfer":
            from ..layers.attention.flashinfer_backend import check_flashinfer

            check_flashinfer(self.dtype, model_config.head_dim)
        self.kernels = load_kernels(KERNELS_OF_BACKEND[server_args.attention_backend])
        self.model = load_model(model_config, self.kernels, self.dtype, self.device)
        self.extend_graphs: ExtendCudaGraphs | None = None
        self.forward_ct = 0

    def kv_bytes_per_token(self) -> int:
        config = self.model_config
        return MHATokenToKVPool.bytes_per_token(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, self.dtype
        )

    def init_memory_pool(self, req_to_token_pool: ReqToTokenPool, allocator: TokenToKVPoolAllocator) -> None:
        """Allocate KV for every slot the allocator can hand out, and the padding page before them."""
        config = self.model_config
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = MHATokenToKVPool(
            allocator.size + allocator.page_size,
            config.num_hidden_layers,
            config.num_key_value_heads,
            config.head_dim,
            self.dtype,
            self.device,
        )
        self.attn_backend = self._make_attn_backend()

    def init_extend_graphs(
        self,
        graphs: CudaGraphRunner,
        capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
        topk: int = 1,
        is_draft: bool = False,
    ) -> None:
        """Have short prompts replayed, for callers that ask for these captures; see ExtendCudaGraphs."""
        # Ranks of DP attention agree on the size of a decode step alone.
        if graphs.sizes and self.attn_backend.records_prefills and self.server_args.dp_size == 1:
            self.extend_graphs = ExtendCudaGraphs(self, graphs, capture_hidden_mode, topk, is_draft)

    def forward(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        if self.extend_graphs is not None and forward_batch.forward_mode.is_extend():
            output = self.extend_graphs.run(forward_batch)
            if output is not None:
                return output
        return self.forward_eagerly(forward_batch)

    @torch.inference_mode()
    def forward_eagerly(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        self.forward_ct += 1
        if not forward_batch.forward_mode.is_idle():
            self.attn_backend.init_forward_metadata(forward_batch)
        return self.model(forward_batch.input_ids, forward_batch.positions, forward_batch)

    def forward_idle(self, dp_rows: int, spec_info: Any = None) -> None:
        """Take part in a forward of the other ranks of DP attention, which bring `dp_rows` rows each."""
        self.forward_eagerly(ForwardBatch.idle(self, dp_rows, spec_info))

    def _make_attn_backend(self) -> AttentionBackend:
        if self.server_args.attention_backend == "triton":
            from ..layers.attention.triton_backend import TritonAttnBackend

            return TritonAttnBackend(self)
        if self.server_args.attention_backend == "flashinfer":
            from ..layers.attention.flashinfer_backend import FlashInferAttnBackend

            return FlashInferAttnBackend(self)
        from ..layers.attention.torch_native_backend import TorchNativeAttnBackend

        return TorchNativeAttnBackend(self)


def profile_max_num_tokens(server_args: ServerArgs, runners: list[ModelRunner]) -> int:
    """How many slots fit beside the weights, in whole pages: target and draft have a row each for every slot.

    Raises:
        ValueError: nothing fits, or not what was asked for.
    """
    page, context = server_args.page_size, runners[0].model_config.context_len
    per_token, device = sum(r.kv_bytes_per_token() for r in runners), runners[0].device
    free, total = _memory(device)
    asked = {"max_total_tokens": per_token, "max_running_requests": 4 * context}  # a row of req_to_token
    for name, each in asked.items():
        if (size := (getattr(server_args, name) or 0) * each) > free:
            raise ValueError(
                f"{name}={getattr(server_args, name)} takes {size / 1e9:,.1f} GB and the {device.type} has "
                f"{free / 1e9:,.1f} GB: give at most {free // each}"
            )
    if server_args.max_total_tokens is not None:
        tokens = server_args.max_total_tokens
    else:
        # A CPU's memory belongs to everybody: stay modest unless told otherwise.
        share = server_args.mem_fraction_static or (0.85 if device.type == "cuda" else 0.1)
        most = server_args.max_running_requests * (context + page)
        tokens = min(int(free - total * (1 - share)) // per_token, most)
    tokens = tokens // page * page
    if tokens < page:
        raise ValueError(
            f"no room for a single page of {page} KV slots: raise max_total_tokens "
            f"({server_args.max_total_tokens}) or mem_fraction_static ({server_args.mem_fraction_static})"
        )
    return tokens


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes of the device that are free beside the weights, and all; a CPU's count as free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total


def _resolve_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """ "auto": float32 on a CPU, the checkpoint's own dtype elsewhere."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else config.torch_dtype.removeprefix("torch.")
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "half": torch.float16,
    }[name]
