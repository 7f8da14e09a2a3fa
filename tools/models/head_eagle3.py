"""The EAGLE-3 draft head in plain PyTorch, beside `head_model.Head`, whose methods it shares or replaces.

The layout is upstream's `models/llama_eagle3.py` and SpecForge's: `fc` makes one state out of what three of
the target's layers are given, attention reads an embedding and a state, each normed, and the head has a final
norm and an LM head over frequent tokens, with `d2t` and `t2d` between its ids and the target's.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import ModelError
from .head_model import FrozenTarget, Head, HeadConfig


class Eagle3Head(Head):
    """An EAGLE-3 head; row i of its LM head is for token `hot_token_id[i]`, ascending."""

    algorithm = "EAGLE3"
    layer_prefix = "midlayer."

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        self.hot_token_id = torch.arange(config.draft_vocab_size)

    def fed_layers(self, target: FrozenTarget) -> tuple[int, ...]:
        count = target.config["num_hidden_layers"]
        ids = (self.config.raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        layers = tuple(i + 1 for i in ids) if ids is not None else (2, count // 2, count - 3)
        if len(layers) != 3 or not 0 < layers[0] < layers[1] < layers[2] < count:
            raise ModelError(
                f"An EAGLE-3 head reads three layers of its target; {list(layers)} of {count} are no three."
            )
        return layers

    def maps(self) -> dict[str, Tensor]:
        """`d2t`, the offset from each draft id to its token, and `t2d`, which tokens there are."""
        ids = self.hot_token_id.cpu()
        marked = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        marked[ids] = True
        return {"d2t": ids - torch.arange(len(ids)), "t2d": marked}

    def set_maps(self, maps: Mapping[str, Tensor], where: str) -> None:
        """Take over `d2t`; ModelError where it does not lead to ascending tokens of the target's."""
        if "d2t" not in maps or maps["d2t"].shape != self.hot_token_id.shape:
            raise ModelError(f"The EAGLE-3 head in {where} has no d2t of {len(self.hot_token_id)} entries.")
        ids = maps["d2t"].long() + torch.arange(len(self.hot_token_id))
        if ids[0] < 0 or ids[-1] >= self.config.vocab_size or not bool((ids.diff() > 0).all()):
            raise ModelError(f"d2t in {where} does not lead to ascending tokens below the vocabulary's size.")
        self.hot_token_id.copy_(ids)

    def start_from(self, target: FrozenTarget, seed: int) -> "Eagle3Head":
        """Draw new weights that begin as the target does: its late layer's state under its own LM head.

        The three layers' states differ in size by far; the columns of `fc` make up for that.
        """
        generator, h = torch.Generator().manual_seed(seed), self.config.hidden_size
        tokens = torch.randint(len(target.lm_head), (4, 128), generator=generator).to(target.device)
        states = target.states(tokens, self.fed_layers(target))[..., : 3 * h].float()
        # The first tokens of a text are given huge states, hence the median.
        sizes = states.unflatten(-1, (3, h)).square().mean(-1).sqrt().flatten(0, 1).median(0).values.cpu()
        own = self.tensors()
        with torch.no_grad():
            for name, tensor in own.items():
                if name.endswith("norm.weight"):
                    tensor.fill_(1.0)
                elif name == "fc.bias":
                    tensor.zero_()
                else:
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.02)
            own["fc.weight"][:, 2 * h :] += torch.eye(h)
            own["fc.weight"].div_(sizes.repeat_interleave(h))
            own["norm.weight"].copy_(target.model.model.norm.weight)
            own["lm_head.weight"].copy_(target.lm_head[self.hot_token_id.to(target.device)])
        return self

    def fuse(self, w: Mapping[str, Tensor], embeds: Tensor, hidden: Tensor) -> Tensor:
        """What attention reads and, behind it, the state that it is added to: `[..., 3h]`.

        hidden is the target's `[..., 3h]`, or this head's own `[..., h]`.
        """
        if hidden.shape[-1] != self.config.hidden_size:
            hidden = F.linear(hidden, w["fc"], w.get("fc.bias"))
        return torch.cat(
            (self._norm(w, "input_layernorm", embeds), self._norm(w, "hidden_norm", hidden), hidden), dim=-1
        )

    def qkv(self, w: Mapping[str, Tensor], x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().qkv(w, x[..., : 2 * self.config.hidden_size], table)

    def finish(self, w: Mapping[str, Tensor], x: Tensor, attended: Tensor) -> Tensor:
        return super().finish(w, x[..., 2 * self.config.hidden_size :], attended)

    def head_input(self, w: Mapping[str, Tensor], states: Tensor) -> Tensor:
        return self._norm(w, "norm", states)

    def lm_head(self, w: Mapping[str, Tensor], target: FrozenTarget) -> Tensor:
        return w["lm_head"]

    def _norm(self, w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), w[name], self.config.rms_norm_eps)
