"""The draft head in plain PyTorch, as the trainer and the evaluation need it, and its frozen target.

The layout is upstream's `models/llama_eagle.py`: `fc` joins a token's embedding with the hidden state of the
position before it, one Llama decoder layer without its input norm follows, and nothing norms the result. The
embedding and the LM head are the target's. `head_eagle3` has the same for EAGLE-3. No stage imports these
files and they import no stage, so that the two can check one another.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .cache import ModelError, write_json

ARCHITECTURES = {"EAGLE": "LlamaForCausalLMEagle", "EAGLE3": "LlamaForCausalLMEagle3"}
COPIED = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps",
    "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    "rope_scaling", "rope_parameters",
)  # fmt: skip


@dataclass(frozen=True)
class HeadConfig:
    """The numbers a head is built from; `raw` keeps the JSON they came from."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    fc_bias: bool
    raw: dict
    draft_vocab_size: int | None = None  # EAGLE-3's own LM head; None in an EAGLE head, which borrows one

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], fc_bias: bool | None = None) -> "HeadConfig":
        """Read a `config.json`. `fc_bias` is what the weights say; else the key `bias` (absent: true).

        Raises ModelError for a layer this file cannot build.
        """
        is_eagle3 = config.get("architectures") == [ARCHITECTURES["EAGLE3"]]
        unsupported = {
            "num_hidden_layers": config.get("num_hidden_layers", 1) != 1,
            "hidden_act": config.get("hidden_act", "silu") != "silu",
            "attention_bias": bool(config.get("attention_bias")),
            "mlp_bias": bool(config.get("mlp_bias")),
        }
        if any(unsupported.values()):
            wrong = ", ".join(f"{key}={config[key]!r}" for key, bad in unsupported.items() if bad)
            raise ModelError(
                f"A draft head here is one SiLU Llama layer without biases; the config says {wrong}."
            )
        heads = config["num_attention_heads"]
        theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta") or 10000.0
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(theta),
            fc_bias=bool(config.get("bias", True)) if fc_bias is None else fc_bias,
            raw=dict(config),
            draft_vocab_size=(config.get("draft_vocab_size") or config["vocab_size"]) if is_eagle3 else None,
        )

    @classmethod
    def for_target(
        cls,
        target: Mapping[str, Any],
        intermediate_size: int | None = None,
        draft_vocab_size: int | None = None,
    ) -> "HeadConfig":
        """The head of a target's width and heads; `intermediate_size` may differ from the target's.

        With `draft_vocab_size` it is an EAGLE-3 head, else an EAGLE head.
        """
        config = {key: target[key] for key in COPIED if key in target}
        config["rope_theta"] = target.get("rope_theta") or (target.get("rope_parameters") or {}).get(
            "rope_theta"
        )
        config |= {
            "architectures": [ARCHITECTURES["EAGLE3" if draft_vocab_size else "EAGLE"]],
            "model_type": "llama",
            "draft_vocab_size": draft_vocab_size,
            "intermediate_size": intermediate_size or target["intermediate_size"],
            "num_hidden_layers": 1,
            # One tensor would be deleted twice by upstream's loader if this were true.
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "attention_bias": False,
            "mlp_bias": False,
        }
        config = {key: value for key, value in config.items() if value is not None}
        return cls.from_dict(config, fc_bias=draft_vocab_size is None)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every trained tensor of the file with its shape; `fc.bias` only where this head has one."""
        h, m, d = self.hidden_size, self.intermediate_size, self.head_dim
        is_eagle3 = self.draft_vocab_size is not None
        layer, read = ("midlayer.", 2 * h) if is_eagle3 else ("layers.0.", h)
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, (3 if is_eagle3 else 2) * h),
            layer + "self_attn.q_proj.weight": (self.num_attention_heads * d, read),
            layer + "self_attn.k_proj.weight": (self.num_key_value_heads * d, read),
            layer + "self_attn.v_proj.weight": (self.num_key_value_heads * d, read),
            layer + "self_attn.o_proj.weight": (h, self.num_attention_heads * d),
            layer + "post_attention_layernorm.weight": (h,),
            layer + "mlp.gate_proj.weight": (m, h),
            layer + "mlp.up_proj.weight": (m, h),
            layer + "mlp.down_proj.weight": (h, m),
        }
        if is_eagle3:
            shapes |= {layer + f"{name}.weight": (h,) for name in ("input_layernorm", "hidden_norm")}
            shapes |= {"norm.weight": (h,), "lm_head.weight": (self.draft_vocab_size, h)}
        return shapes | ({"fc.bias": (h,)} if self.fc_bias else {})


def rotary_table(config: HeadConfig, length: int, device: torch.device | str) -> Tensor:
    """cos and sin of positions 0..length-1, float32 `[2, length, head_dim]`, scaled as the config says.

    transformers works out the frequencies, llama3 scaling included.
    """
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    llama = LlamaConfig(**{key: value for key, value in config.raw.items() if key != "architectures"})
    positions = torch.arange(length, device=device)[None]
    cos, sin = LlamaRotaryEmbedding(llama).to(device)(torch.zeros((), device=device), positions)
    return torch.stack([cos[0], sin[0]])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary embedding, half against half. x `[..., heads, length, D]`, table `[2, ..., length, D]`."""
    first, second = x.chunk(2, dim=-1)
    return x * table[0] + torch.cat((-second, first), dim=-1) * table[1]


class Head(nn.Module):
    """A draft head. Parameters are float32 and bear the names of the file; a pass runs on `weights(dtype)`.

    The parts of a pass are separate methods because the trainer, the evaluation and the engine's checks
    attend to different things between `qkv` and `finish`.
    """

    algorithm = "EAGLE"
    layer_prefix = "layers.0."
    hot_token_id: Tensor | None  # the tokens that the rows of its LM head are for; None: all, in order

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        self.register_buffer("hot_token_id", None)
        self.names = {name: name.replace(".", "__") for name in config.shapes()}
        for name, shape in config.shapes().items():
            self.register_parameter(self.names[name], nn.Parameter(torch.zeros(shape)))

    def fed_layers(self, target: "FrozenTarget") -> tuple[int, ...]:
        """The target's layers whose inputs this head is fed; none: it is fed what enters the LM head."""
        return ()

    def maps(self) -> dict[str, Tensor]:
        """Tensors of the file that are not trained."""
        return {}

    def set_maps(self, maps: Mapping[str, Tensor], where: str) -> None:
        """Take over those of a file."""

    def head_input(self, w: Mapping[str, Tensor], states: Tensor) -> Tensor:
        """What enters the LM head where this head's state is `states` `[..., h]`."""
        return states

    def lm_head(self, w: Mapping[str, Tensor], target: "FrozenTarget") -> Tensor:
        """`[V, h]`, or fewer rows."""
        return target.lm_head

    def tensors(self) -> dict[str, Tensor]:
        """The parameters under the names of the file."""
        return {name: getattr(self, attribute) for name, attribute in self.names.items()}

    def reset(self, seed: int, std: float = 0.02, embed_gain: float = 1.0) -> "Head":
        """Draw new weights: normal, but `fc` passes the hidden state through, a good first guess of the next.

        embed_gain widens the columns of `fc` that read the embedding, often far smaller than a state.
        """
        generator = torch.Generator().manual_seed(seed)
        h = self.config.hidden_size
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                if name.endswith("layernorm.weight"):
                    tensor.fill_(1.0)
                elif name == "fc.bias":
                    tensor.zero_()
                else:
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
            self.tensors()["fc.weight"][:, :h] *= embed_gain
            self.tensors()["fc.weight"][:, h:] += torch.eye(h)
        return self

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The parameters in `dtype`, cast once for a whole step; gradients flow to the float32 originals."""
        short = {name: name.removeprefix(self.layer_prefix).removesuffix(".weight") for name in self.names}
        return {short[name]: tensor.to(dtype) for name, tensor in self.tensors().items()}

    def fuse(self, w: Mapping[str, Tensor], embeds: Tensor, hidden: Tensor) -> Tensor:
        """`fc` over embedding and hidden state, both `[..., h]` → `[..., h]`."""
        return F.linear(torch.cat((embeds, hidden), dim=-1), w["fc"], w.get("fc.bias"))

    def qkv(self, w: Mapping[str, Tensor], x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries `[B, Hk, G, T, D]` (G heads share a key head) and keys, and values `[B, Hk, T, D]`.

        x is `[B, T, h]`; table holds cos and sin of each row's position, `[2, T, D]` or `[2, B, 1, T, D]`.
        """
        bs, length, _ = x.shape
        c = self.config
        heads = (bs, length, -1, c.head_dim)
        q = F.linear(x, w["self_attn.q_proj"]).view(heads).transpose(1, 2)
        k = F.linear(x, w["self_attn.k_proj"]).view(heads).transpose(1, 2)
        v = F.linear(x, w["self_attn.v_proj"]).view(heads).transpose(1, 2)
        q, k = rotate(q, table), rotate(k, table)
        return q.reshape(bs, c.num_key_value_heads, -1, length, c.head_dim), k, v

    def finish(self, w: Mapping[str, Tensor], x: Tensor, attended: Tensor) -> Tensor:
        """Everything after attention. x `[B, T, h]` entered the layer; attended is `[B, Hk, G, T, D]`."""
        bs, length, _ = x.shape
        flat = attended.flatten(1, 2).transpose(1, 2).reshape(bs, length, -1)
        x = x + F.linear(flat, w["self_attn.o_proj"])
        norm = F.rms_norm(x, (x.shape[-1],), w["post_attention_layernorm"], self.config.rms_norm_eps)
        gated = F.silu(F.linear(norm, w["mlp.gate_proj"])) * F.linear(norm, w["mlp.up_proj"])
        return x + F.linear(gated, w["mlp.down_proj"])


def check_tensors(config: HeadConfig, tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise ModelError naming the first missing, surplus or misshapen tensor."""
    shapes = config.shapes()
    missing = sorted(shapes.keys() - tensors.keys())
    surplus = sorted(tensors.keys() - shapes.keys())
    if missing or surplus:
        raise ModelError(
            f"The draft head in {where} does not have the tensors of {config.raw['architectures'][0]}: "
            f"missing {', '.join(missing) or 'none'}; surplus {', '.join(surplus) or 'none'}."
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ModelError(
                f"{name} in {where} has shape {tuple(tensors[name].shape)}; the config asks for {shape}."
            )


def load_head(folder: str | os.PathLike, device: torch.device | str = "cpu") -> Head:
    """Read a head folder (`config.json`, `model.safetensors`) into float32 parameters.

    Raises ModelError for a missing file, a foreign architecture, or tensors that do not fit the config.
    """
    folder = Path(folder)
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
    except OSError as error:
        raise ModelError(
            f"No draft head in {folder}: {error}. Expected config.json and model.safetensors."
        ) from None
    if raw.get("architectures") not in [[name] for name in ARCHITECTURES.values()]:
        raise ModelError(
            f"{folder} holds {raw.get('architectures')}, not a head of the architecture "
            f"{' or '.join(ARCHITECTURES.values())}."
        )
    config = HeadConfig.from_dict(raw, fc_bias="fc.bias" in tensors)
    maps = {name: tensors.pop(name) for name in ("d2t", "t2d") if name in tensors and config.draft_vocab_size}
    check_tensors(config, tensors, str(folder))
    head = new_head(config)
    head.set_maps(maps, str(folder))
    head = head.to(device)
    with torch.no_grad():
        for name, parameter in head.tensors().items():
            parameter.copy_(tensors[name])
    return head


def save_head(head: Head, folder: str | os.PathLike, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write `model.safetensors`, then `config.json`, each by renaming a finished file; returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in head.tensors().items()}
    partial = folder / "model.safetensors.partial"
    save_file(tensors | head.maps(), partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    write_json(folder / "config.json", head.config.raw | {"torch_dtype": str(dtype).removeprefix("torch.")})
    return folder


class FrozenTarget:
    """The target as the head sees it: embedding, LM head, and the hidden states that enter the LM head.

    Only `LlamaForCausalLM` folders are taken, as by the engines.
    """

    def __init__(
        self, folder: str | os.PathLike, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.device = torch.device(device)
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        if self.config.get("architectures") != ["LlamaForCausalLM"]:
            raise ModelError(
                f"{folder} holds {self.config.get('architectures')}; the target must be LlamaForCausalLM."
            )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype, attn_implementation="sdpa")
        self.model = model.to(self.device).eval().requires_grad_(False)
        self.embedding: Tensor = self.model.get_input_embeddings().weight  # [V, h]
        self.lm_head: Tensor = self.model.get_output_embeddings().weight  # [V, h]

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor) -> Tensor:
        """tokens int64 `[B, L]`, padded on the right → hidden states after the final norm, `[B, L, h]`.

        Causal attention never looks right, so the padding needs no mask; its own rows mean nothing.
        """
        return self.states(tokens, ())

    @torch.no_grad()
    def states(self, tokens: Tensor, layers: tuple[int, ...]) -> Tensor:
        """What these layers are given and, behind it, `hidden_states`: `[B, L, (layers + 1) · h]`."""
        out = self.model.model(input_ids=tokens, use_cache=False, output_hidden_states=bool(layers))
        given = [out.hidden_states[layer] for layer in layers]
        return torch.cat([*given, out.last_hidden_state], dim=-1) if given else out.last_hidden_state

    @torch.no_grad()
    def greedy(self, prompts: list[list[int]], new_tokens: int) -> list[np.ndarray]:
        """Prompts continued by `new_tokens` best tokens each, the end of turn ignored; ties to the lowest."""
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        mask, tokens, made, cache = mask.to(self.device), ids.to(self.device), [], None
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        for _ in range(new_tokens):
            out = self.model(
                input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache,
                use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            tokens, cache = out.logits[:, -1:].argmax(dim=-1), out.past_key_values
            mask, positions = F.pad(mask, (0, 1), value=1), positions[:, -1:] + 1
            made.append(tokens)
        answers = torch.cat(made, dim=1).cpu().numpy()
        return [np.array([*p, *answer]) for p, answer in zip(prompts, answers, strict=True)]


def new_head(config: HeadConfig) -> Head:
    """The module for a config, all zeros."""
    if config.draft_vocab_size is None:
        return Head(config)
    from .head_eagle3 import Eagle3Head

    return Eagle3Head(config)


def head_for(
    target: FrozenTarget, intermediate_size: int | None, seed: int, hot_token_id: Tensor | None = None
) -> Head:
    """A fresh head for a target, on its device, whose inputs weigh alike at first.

    With `hot_token_id`, ascending, it is an EAGLE-3 head over those tokens.
    """
    if hot_token_id is not None:
        head = new_head(HeadConfig.for_target(target.config, intermediate_size, len(hot_token_id)))
        head.hot_token_id.copy_(hot_token_id)
        return head.start_from(target, seed).to(target.device)
    # A state leaves the final norm, so the norm's weight tells its size without any text.
    state, embedding = target.model.model.norm.weight.float(), target.embedding.float()
    gain = (state.square().mean() / embedding.square().mean()).sqrt().item()
    config = HeadConfig.for_target(target.config, intermediate_size)
    return Head(config).reset(seed, embed_gain=gain).to(target.device)
