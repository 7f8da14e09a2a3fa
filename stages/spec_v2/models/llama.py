"""Llama for decoding over cached slots. Restates sglang/srt/models/llama.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..configs.model_config import ModelConfig
from ..layers.dp_attention import shard_size
from ..layers.layernorm import RMSNorm
from ..layers.linear import GateUpLinear, MergedLinear, QKVLinear, RowParallelLinear
from ..layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from ..layers.radix_attention import RadixAttention
from ..layers.rotary_embedding import RotaryEmbedding
from ..model_executor.forward_batch_info import ForwardBatch


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig, kernels: Any):
        super().__init__()
        hidden, inner, bias = config.hidden_size, shard_size(config.intermediate_size), config.mlp_bias
        self.gate_up_proj = GateUpLinear(hidden, {"gate_proj": inner, "up_proj": inner}, bias, kernels)
        self.down_proj = RowParallelLinear(inner, {"down_proj": hidden}, bias, kernels)

    def forward(self, hidden_states: torch.Tensor, norm: RMSNorm, dp_rows: int | None) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(hidden_states, norm, dp_rows), residual=hidden_states)


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, kernels: Any):
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = QKVLinear(hidden, parts, bias, kernels)
        self.o_proj = MergedLinear(q_size, {"o_proj": hidden}, bias, kernels)
        self.rotary_emb = rotary_emb
        self.attn = RadixAttention(config.head_dim, layer_id)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: ForwardBatch,
        norm: RMSNorm | None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`residual` [rows, hidden] is what the result is added to: by itself hidden_states."""
        kv_buffer = forward_batch.attn_backend.kv_pool.get_kv_buffer(self.attn.layer_id)
        q = self.qkv_proj(
            hidden_states, norm, self.rotary_emb, positions, kv_buffer, forward_batch.out_cache_loc
        )
        residual = hidden_states if residual is None else residual
        return self.o_proj(self.attn(q, forward_batch).flatten(1), residual=residual)


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, rotary_emb: RotaryEmbedding, kernels: Any):
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_id, rotary_emb, kernels)
        self.mlp = LlamaMLP(config, kernels)
        self.input_layernorm: RMSNorm | None = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """hidden_states [rows, hidden] is the residual stream, in and out."""
        hidden_states = self.self_attn(positions, hidden_states, forward_batch, self.input_layernorm)
        return self.mlp(hidden_states, self.post_attention_layernorm, forward_batch.dp_rows)

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        views = self.self_attn.qkv_proj.checkpoint_views(attention) | self.self_attn.o_proj.checkpoint_views(
            attention
        )
        views |= self.mlp.gate_up_proj.checkpoint_views(mlp) | self.mlp.down_proj.checkpoint_views(mlp)
        for name in ("input_layernorm", "post_attention_layernorm"):
            if (norm := getattr(self, name)) is not None:
                views[f"{prefix}{name}.weight"] = norm.weight
        return views


class LlamaModel(nn.Module):
    def __init__(self, config: ModelConfig, kernels: Any):
        super().__init__()
        self.embed_tokens = nn.Parameter(
            torch.empty(config.vocab_size, config.hidden_size), requires_grad=False
        )
        rotary_emb = RotaryEmbedding(config)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, i, rotary_emb, kernels) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.layers_to_capture: tuple[int, ...] = ()

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The normed states [rows, hidden], and side by side what entered each of `layers_to_capture`."""
        hidden_states, captured = F.embedding(input_ids, self.embed_tokens), []
        for i, layer in enumerate(self.layers):
            if i in self.layers_to_capture:
                captured.append(hidden_states)
            hidden_states = layer(positions, hidden_states, forward_batch)
        return self.norm(hidden_states), torch.cat(captured, dim=-1) if captured else None


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
        hidden_states, aux_hidden_states = self.model(input_ids, positions, forward_batch)
        return self.logits_processor(hidden_states, self.lm_head, forward_batch, aux_hidden_states)

    def set_eagle3_layers_to_capture(self, layer_ids: tuple[int, ...] | None = None) -> None:
        """Have forwards capture what an EAGLE-3 head reads instead of what enters the LM head.

        That is what layers 2, n // 2 and n - 3 of n are given, or, for a head that names `layer_ids`, what
        those layers give.

        Raises:
            ValueError: these are not three layers.
        """
        count = len(self.model.layers)
        layers = (2, count // 2, count - 3) if layer_ids is None else tuple(i + 1 for i in layer_ids)
        if len(layers) != 3 or not 0 < layers[0] < layers[1] < layers[2] < count:
            raise ValueError(
                f"EAGLE3 reads what enters three layers of the target, and {list(layers)} are no three of "
                f"its layers 1 to {count - 1} in ascending order: use EAGLE, or a head made for this target"
            )
        self.model.layers_to_capture = layers

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
