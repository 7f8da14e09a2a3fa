"""EAGLE's draft model for Llama targets. Restates sglang/srt/models/llama_eagle.py (#2640).

One Llama layer over a fused input: the embedding of token p+1 and the target's hidden state at p (what
enters its LM head), 2h wide, brought down to h by `fc`. The first layer has no input norm, there is no
final norm, and embedding and LM head are the target's own tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..configs.model_config import ModelConfig
from ..layers.linear import FusedInputLinear
from ..layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from ..layers.rotary_embedding import RotaryEmbedding
from ..model_executor.forward_batch_info import ForwardBatch
from .llama import LlamaDecoderLayer


class LlamaForCausalLMEagle(nn.Module):
    embed_tokens: torch.Tensor
    lm_head: torch.Tensor
    hot_token_id: torch.Tensor | None = None  # of a token map: which tokens the rows of lm_head are for

    def __init__(self, config: ModelConfig, kernels: Any):
        super().__init__()
        hidden = config.hidden_size
        self.fc = FusedInputLinear(2 * hidden, {"fc": hidden}, config.fc_bias, kernels)
        rotary_emb = RotaryEmbedding(config)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, i, rotary_emb, kernels) for i in range(config.num_hidden_layers)
        )
        self.layers[0].input_layernorm = None
        self.logits_processor = LogitsProcessor(kernels)

    def set_embed_and_head(self, embed: torch.Tensor, head: torch.Tensor) -> None:
        self.embed_tokens, self.lm_head = embed, head

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """`forward_batch.spec_info`, an EagleDraftInput, has the hidden states for input_ids [rows]."""
        paired = forward_batch.spec_info
        hidden_states = self.fc(input_ids, self.embed_tokens, paired.hidden_states, paired.hidden_rows)
        for layer in self.layers:
            hidden_states = layer(positions, hidden_states, forward_batch)
        return self.logits_processor(
            hidden_states, self.lm_head, forward_batch, hot_token_id=self.hot_token_id
        )

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        views = self.fc.checkpoint_views("")
        for i, layer in enumerate(self.layers):
            views |= layer.checkpoint_views(f"layers.{i}.")
        return views

    def borrows(self, name: str) -> bool:
        """Published heads may carry copies of what the target lends; they are not loaded."""
        return "lm_head" in name or "embed_tokens" in name
