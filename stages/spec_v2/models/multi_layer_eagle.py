"""A draft of several heads, one for each step; upstream loads one model for each (draft_model_idx).

Head i reads token p+1+i at p and speaks of token p+2+i. A file may bring all of them (`mtp.i.` before the
names of each), or one, which then serves every step: it should have been trained on what it says itself, pass
i being head i. Weights are shared then; KV never is.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..configs.model_config import ModelConfig
from ..layers.logits_processor import LogitsProcessorOutput
from ..layers.radix_attention import RadixAttention
from ..model_executor.forward_batch_info import ForwardBatch


class MultiLayerEagle(nn.Module):
    """`config.num_hidden_layers` models of `head_class`; head i has layer i of the KV pool."""

    def __init__(self, config: ModelConfig, kernels: Any, head_class: type[nn.Module]):
        super().__init__()
        one = replace(config, num_hidden_layers=1)
        heads = [head_class(one, kernels) for _ in range(config.num_nextn_predict_layers)]
        self.has_one_for_all = len(heads) == 1
        if self.has_one_for_all:
            kept = {id(t): t for t in (kernels, *heads[0].parameters(), *heads[0].buffers())}
            heads += [copy.deepcopy(heads[0], dict(kept)) for _ in range(1, config.num_hidden_layers)]
        self.heads = nn.ModuleList(heads)
        for i, head in enumerate(heads):
            for module in head.modules():
                if isinstance(module, RadixAttention):
                    module.layer_id = i

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Head `spec_info.module` over its rows: spec_info is an EagleDraftInput."""
        return self.heads[forward_batch.spec_info.module](input_ids, positions, forward_batch)

    # ---- what one head has ----

    @property
    def lm_head(self) -> torch.Tensor:
        return self.heads[0].lm_head

    @property
    def hot_token_id(self) -> torch.Tensor | None:
        return self.heads[0].hot_token_id

    @hot_token_id.setter
    def hot_token_id(self, token_ids: torch.Tensor) -> None:
        for head in self.heads:
            head.hot_token_id = token_ids

    def set_embed(self, embed: torch.Tensor) -> None:
        for head in self.heads:
            head.set_embed(embed)

    def set_embed_and_head(self, embed: torch.Tensor, lm_head: torch.Tensor) -> None:
        for head in self.heads:
            head.set_embed_and_head(embed, lm_head)

    # ---- the file ----

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        return {name: view for i in self._in_file() for name, view in self._named(i)}

    @property
    def optional(self) -> list[str]:
        optional = getattr(self.heads[0], "optional", ())
        return [self._prefix(i) + name for i in self._in_file() for name in optional]

    def borrows(self, name: str) -> bool:
        return self.heads[0].borrows(name)

    def _in_file(self) -> range:
        return range(1 if self.has_one_for_all else len(self.heads))

    def _prefix(self, i: int) -> str:
        return "" if self.has_one_for_all else f"mtp.{i}."

    def _named(self, i: int) -> list[tuple[str, torch.Tensor]]:
        views = self.heads[i].checkpoint_views()
        return [(self._prefix(i) + name, view) for name, view in views.items()]
