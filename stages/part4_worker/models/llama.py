"""Llama for decoding over cached slots. Restates sglang/srt/models/llama.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..configs.model_config import ModelConfig
from ..layers.activation import SiluAndMul
from ..layers.layernorm import RMSNorm
from ..layers.linear import MergedLinear
from ..layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from ..layers.radix_attention import RadixAttention
from ..layers.rotary_embedding import RotaryEmbedding
from ..model_executor.forward_batch_info import ForwardBatch


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig, kernels: Any):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedLinear(hidden, {"gate_proj": inner, "up_proj": inner}, config.mlp_bias)
        self.down_proj = MergedLinear(inner, {"down_proj": hidden}, config.mlp_bias)
        self.act_fn = SiluAndMul(kernels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, config.attention_bias)
        self.o_proj = MergedLinear(q_size, {"o_proj": config.hidden_size}, config.attention_bias)
        self.rotary_emb = rotary_emb
        self.attn = RadixAttention(self.head_dim, layer_id)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        qkv = self.qkv_proj(hidden_states).view(len(positions), -1, self.head_dim)
        q, k, v = qkv.split(
            [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1
        )  # [rows, heads, head_dim]
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v, forward_batch).flatten(1))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, kernels: Any):
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_id, rotary_emb)
        self.mlp = LlamaMLP(config, kernels)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        forward_batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both in and out, the layer's stream is hidden_states + residual: each norm adds the two itself."""
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states, forward_batch)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        views = self.self_attn.qkv_proj.checkpoint_views(attention) | self.self_attn.o_proj.checkpoint_views(
            attention
        )
        views |= self.mlp.gate_up_proj.checkpoint_views(mlp) | self.mlp.down_proj.checkpoint_views(mlp)
        for name in ("input_layernorm", "post_attention_layernorm"):
            if isinstance(norm := getattr(self, name), RMSNorm):
                views[f"{prefix}{name}.weight"] = norm.weight
        return views


class LlamaModel(nn.Module):
    def __init__(self, config: ModelConfig, kernels: Any):
        super().__init__()
        self.embed_tokens = nn.Parameter(
            torch.empty(config.vocab_size, config.hidden_size), requires_grad=False
        )
        rotary_emb = RotaryEmbedding(config, kernels)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, i, rotary_emb, kernels) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        hidden_states, residual = F.embedding(input_ids, self.embed_tokens), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual, forward_batch)
        return self.norm(hidden_states, residual)[0]


class LlamaForCausalLM(nn.Module):
    def __init__(self, config: ModelConfig, kernels: Any):
        super().__init__()
        self.model = LlamaModel(config, kernels)
        tied = config.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else nn.Parameter(
            torch.empty(config.vocab_size, config.hidden_size), requires_grad=False
        )  # fmt: skip
        self.logits_processor = LogitsProcessor(kernels)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        hidden_states = self.model(input_ids, positions, forward_batch)
        return self.logits_processor(hidden_states, self.lm_head, forward_batch)

    def get_embed_and_head(self) -> tuple[nn.Parameter, nn.Parameter]:
        """What a draft model borrows."""
        return self.model.embed_tokens, self.lm_head

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Checkpoint name → tensor to fill, for every parameter."""
        views = {
            "model.embed_tokens.weight": self.model.embed_tokens,
            "model.norm.weight": self.model.norm.weight,
        }
        if self.lm_head is not self.model.embed_tokens:
            views["lm_head.weight"] = self.lm_head
        for i, layer in enumerate(self.model.layers):
            views |= layer.checkpoint_views(f"model.layers.{i}.")
        return views

    def borrows(self, name: str) -> bool:
        """Whether a checkpoint tensor is not needed: a tied head that is stored all the same."""
        return name == "lm_head.weight" and self.lm_head is self.model.embed_tokens
