"""The draft head in plain PyTorch, as the trainer and the evaluation need it, and its frozen target.

The layout is upstream's `models/llama_eagle.py`: `fc` joins a token's embedding with the hidden state of the
position before it, one Llama decoder layer without its input norm follows, and nothing norms the result. The
embedding and the LM head are the target's. No stage imports this file and it imports no stage, so that the
two can check one another.
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

ARCHITECTURE = "LlamaForCausalLMEagle"
# The file's tensor names are the module's parameter names, so the file needs no table of its own.
LAYER = "layers.0."
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

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], fc_bias: bool | None = None) -> "HeadConfig":
        """Read a `config.json`. `fc_bias` is what the weights say; else the key `bias` (absent: true).

        Raises ModelError for a layer this file cannot build.
        """
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
        )

    @classmethod
    def for_target(cls, target: Mapping[str, Any], intermediate_size: int | None = None) -> "HeadConfig":
        """The head of a target's width and heads; `intermediate_size` may differ from the target's."""
        config = {key: target[key] for key in COPIED if key in target}
        config["rope_theta"] = target.get("rope_theta") or (target.get("rope_parameters") or {}).get(
            "rope_theta"
        )
        config |= {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "intermediate_size": intermediate_size or target["intermediate_size"],
            "num_hidden_layers": 1,
            # One tensor would be deleted twice by upstream's loader if this were true.
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "attention_bias": False,
            "mlp_bias": False,
        }
        return cls.from_dict({key: value for key, value in config.items() if value is not None}, fc_bias=True)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the file with its shape; `fc.bias` only where this head has one."""
        h, m, d = self.hidden_size, self.intermediate_size, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, 2 * h),
            LAYER + "self_attn.q_proj.weight": (self.num_attention_heads * d, h),
            LAYER + "self_attn.k_proj.weight": (self.num_key_value_heads * d, h),
            LAYER + "self_attn.v_proj.weight": (self.num_key_value_heads * d, h),
            LAYER + "self_attn.o_proj.weight": (h, self.num_attention_heads * d),
            LAYER + "post_attention_layernorm.weight": (h,),
            LAYER + "mlp.gate_proj.weight": (m, h),
            LAYER + "mlp.up_proj.weight": (m, h),
            LAYER + "mlp.down_proj.weight": (h, m),
        }
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

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        self.names = {name: name.replace(".", "__") for name in config.shapes()}
        for name, shape in config.shapes().items():
            self.register_parameter(self.names[name], nn.Parameter(torch.zeros(shape)))

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
        short = {name: name.removeprefix(LAYER).removesuffix(".weight") for name in self.names}
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
            f"The draft head in {where} does not have the tensors of {ARCHITECTURE}: "
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
    if raw.get("architectures") != [ARCHITECTURE]:
        raise ModelError(
            f"{folder} holds {raw.get('architectures')}, not a head of the architecture {ARCHITECTURE}."
        )
    config = HeadConfig.from_dict(raw, fc_bias="fc.bias" in tensors)
    check_tensors(config, tensors, str(folder))
    head = Head(config).to(device)
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
    save_file(tensors, partial, metadata={"format": "pt"})
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
        return self.model.model(input_ids=tokens, use_cache=False).last_hidden_state

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


def head_for(target: FrozenTarget, intermediate_size: int | None, seed: int) -> Head:
    """A fresh head for a target, on its device, whose two inputs weigh alike at first."""
    # A state leaves the final norm, so the norm's weight tells its size without any text.
    state, embedding = target.model.model.norm.weight.float(), target.embedding.float()
    gain = (state.square().mean() / embedding.square().mean()).sqrt().item()
    config = HeadConfig.for_target(target.config, intermediate_size)
    return Head(config).reset(seed, embed_gain=gain).to(target.device)
