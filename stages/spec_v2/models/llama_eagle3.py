"""EAGLE-3's draft model for Llama targets. Restates sglang/srt/models/llama_eagle3.py (#4247).

One Llama layer whose attention reads two things side by side: the embedding of token p+1 and a hidden state
at p, each normed by itself. After a forward of the target that state is made by `fc` from what entered three
of the target's layers; while a tree grows it is what this model gave for the token before, taken ahead of the
final norm. The embedding is the target's, the LM head its own, over a smaller vocabulary: row i speaks of
token i + d2t[i].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..configs.model_config import ModelConfig
from ..layers.layernorm import RMSNorm, norm_pair
from ..layers.linear import MergedLinear, QKVLinear
from ..layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from ..layers.rotary_embedding import RotaryEmbedding
from ..model_executor.forward_batch_info import ForwardBatch
from .llama import LlamaDecoderLayer


class LlamaDecoderLayerEagle3(LlamaDecoderLayer):
    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding, kernels: Any):
        super().__init__(config, 0, rotary_emb, kernels)
        narrow = self.self_attn.qkv_proj
        bias = narrow.bias is not None
        self.self_attn.qkv_proj = QKVLinear(2 * config.hidden_size, narrow.parts, bias, kernels)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)

    def forward(
        self,
        positions: torch.Tensor,
        input_ids: torch.Tensor,
        embed_tokens: torch.Tensor,
        hidden_states: torch.Tensor,
        hidden_rows: torch.Tensor | None,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """hidden_states [any, hidden], row hidden_rows[i] for input_ids[i] → [rows, hidden]."""
        pairs, residual = norm_pair(
            input_ids, embed_tokens, self.input_layernorm, hidden_states, hidden_rows, self.hidden_norm
        )
        hidden_states = self.self_attn(positions, pairs, forward_batch, None, residual)
        return self.mlp(hidden_states, self.post_attention_layernorm, forward_batch.dp_rows)

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        return super().checkpoint_views(prefix) | {f"{prefix}hidden_norm.weight": self.hidden_norm.weight}


class LlamaForCausalLMEagle3(nn.Module):
    embed_tokens: torch.Tensor
    hot_token_id: torch.Tensor
    optional = ("t2d",)  # says again what d2t says, so not every checkpoint has it

    def __init__(self, config: ModelConfig, kernels: Any):
        super().__init__()
        hidden = config.hidden_size
        self.fc = MergedLinear(config.fed_hidden_size, {"fc": hidden}, config.fc_bias, kernels)
        self.midlayer = LlamaDecoderLayerEagle3(config, RotaryEmbedding(config), kernels)
        self.norm = RMSNorm(hidden, config.rms_norm_eps, kernels)
        self.lm_head = nn.Parameter(torch.empty(config.draft_vocab_size, hidden), requires_grad=False)
        self.register_buffer("d2t", torch.empty(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.logits_processor = LogitsProcessor(kernels)

    def set_embed(self, embed: torch.Tensor) -> None:
        """Borrow the target's embedding; what `d2t` says of its vocabulary is checked here.

        Raises:
            ValueError: `d2t` names a token twice, one that the target does not have, or others than `t2d`.
        """
        self.embed_tokens = embed
        self.hot_token_id = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        ids, marked = self.hot_token_id.cpu(), self.t2d.cpu().nonzero().squeeze(-1)
        ascends = 0 <= int(ids[0]) and int(ids[-1]) < len(embed) and bool((ids.diff() > 0).all())
        if not ascends or (len(marked) and not torch.equal(ids, marked)):
            raise ValueError(
                "d2t of the draft head does not lead from draft ids, by offsets, to the ascending token ids "
                f"below {len(embed)} that t2d marks: the head is damaged, or made for another vocabulary"
            )

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """`forward_batch.spec_info`, an EagleDraftInput, has the hidden states for input_ids [rows]."""
        paired = forward_batch.spec_info
        hidden_states, hidden_rows = paired.hidden_states, paired.hidden_rows
        if hidden_states.shape[1] != self.embed_tokens.shape[1]:  # the target's, of three layers
            hidden_states = self.fc(hidden_states if hidden_rows is None else hidden_states[hidden_rows])
            hidden_rows = None
        hidden_states = self.midlayer(
            positions, input_ids, self.embed_tokens, hidden_states, hidden_rows, forward_batch
        )
        return self.logits_processor(
            self.norm(hidden_states), self.lm_head, forward_batch, hidden_states, self.hot_token_id
        )

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        views = self.fc.checkpoint_views("") | self.midlayer.checkpoint_views("midlayer.")
        return (
            views
            | {"norm.weight": self.norm.weight, "lm_head.weight": self.lm_head}
            | {
                "d2t": self.d2t,
                "t2d": self.t2d,
            }
        )

    def borrows(self, name: str) -> bool:
        """Published heads may carry a copy of the embedding that the target lends; it is not loaded."""
        return "embed_tokens" in name
