"""A checkpoint's config.json, as far as the engine needs it. Restates sglang/srt/configs/model_config.py."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..models.paths import resolve_model_path

TARGET_ARCHITECTURES = ("LlamaForCausalLM",)
DRAFT_ARCHITECTURES = {
    "EAGLE": "LlamaForCausalLMEagle",
    "EAGLE3": "LlamaForCausalLMEagle3",
    "STANDALONE": "LlamaForCausalLM",
}

LLAMA3_ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class ModelConfig:
    path: Path
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None
    context_len: int
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    torch_dtype: str
    fc_bias: bool  # draft heads only
    # EAGLE-3 heads only: rows of their own LM head, and the target's layers that they read, where named
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...] | None
    num_nextn_predict_layers: int  # draft modules in the file, each for a step of its own
    is_multi_layer_eagle: bool = False  # run as such; num_hidden_layers then counts the steps

    @classmethod
    def from_path(
        cls, model_path: str, context_length: int | None = None, is_draft_model: bool = False
    ) -> ModelConfig:
        """Read a model folder, a name in the cache or a hub id.

        `context_length` overrides the checkpoint's own (a draft always gets its target's).

        Raises:
            ValueError: no such model, an architecture that is not supported here, or a key that is missing.
        """
        path = resolve_model_path(model_path)
        raw = _read_json(path / "config.json")
        architectures = raw.get("architectures") or ["(none named)"]
        supported = tuple(DRAFT_ARCHITECTURES.values()) if is_draft_model else TARGET_ARCHITECTURES
        if architectures[0] not in supported:
            role = "draft" if is_draft_model else "target"
            raise ValueError(
                f"{path}: architecture {architectures[0]} is not supported as a {role} model here, "
                f"only {', '.join(supported)}"
            )
        missing = [
            k
            for k in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
            if k not in raw
        ]
        if missing:
            raise ValueError(f"{path / 'config.json'} lacks {', '.join(missing)}")
        rope = {
            k: v
            for k, v in (raw.get("rope_parameters") or raw.get("rope_scaling") or {}).items()
            if v is not None
        }
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", "llama3"):
            raise ValueError(
                f"{path}: rotary scaling {rope_type!r} is not supported here, only 'llama3' or none"
            )
        if rope_type == "llama3" and (lacking := [k for k in LLAMA3_ROPE_KEYS if k not in rope]):
            raise ValueError(f"{path}: the rotary scaling of config.json lacks {', '.join(lacking)}")
        # Each would load without a complaint and give other numbers than the model's.
        for key, expected in (
            ("hidden_act", "silu"),
            ("quantization_config", None),
            ("partial_rotary_factor", 1.0),
        ):
            if raw.get(key, expected) not in (expected, None):
                raise ValueError(
                    f"{path}: {key}={raw[key]!r} in config.json is not supported here, only {expected!r}"
                )
        trained_for = raw.get("max_position_embeddings", 2048)
        if context_length is not None and context_length > trained_for and not is_draft_model:
            raise ValueError(
                f"context_length {context_length} is more than the {trained_for} positions that {path.name} "
                "was trained for: lower it"
            )
        eos = _generation_config(path).get("eos_token_id", raw.get("eos_token_id"))
        eos = [eos] if isinstance(eos, int) else eos or []
        heads = raw["num_attention_heads"]
        return cls(
            path=path,
            architecture=architectures[0],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw.get("num_hidden_layers", 1),
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads", heads),
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            vocab_size=raw["vocab_size"],
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
            rope_scaling=rope if rope_type == "llama3" else None,
            context_len=context_length or trained_for,
            attention_bias=raw.get("attention_bias", False),
            mlp_bias=raw.get("mlp_bias", False),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            eos_token_ids=frozenset(t for t in eos if t < raw["vocab_size"]),
            torch_dtype=str(raw.get("torch_dtype") or raw.get("dtype") or "float32"),
            fc_bias=raw["bias"] if "bias" in raw else _has_tensor(path, "fc.bias", "mtp.0.fc.bias"),
            draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
            aux_layer_ids=tuple(ids) if (ids := _aux_layer_ids(raw)) is not None else None,
            num_nextn_predict_layers=raw.get("num_nextn_predict_layers") or 1,
        )

    @property
    def fed_hidden_size(self) -> int:
        """Columns of the target's hidden states that a draft of this config reads; 0 for a whole model."""
        per_architecture = {"EAGLE": 1, "EAGLE3": 3, "STANDALONE": 0}
        return self.hidden_size * next(
            count
            for name, count in per_architecture.items()
            if DRAFT_ARCHITECTURES[name] == self.architecture
        )


def draft_config(
    path: str, target: ModelConfig, algorithm: str, num_modules: int | None = None
) -> ModelConfig:
    """A draft's config, read as its target needs it; with `num_modules` it drafts with one for each step.

    Raises:
        ValueError: the draft was made for another target, or is none of `algorithm`, or has other modules.
    """
    config = ModelConfig.from_path(path, target.context_len, is_draft_model=True)
    if config.architecture != DRAFT_ARCHITECTURES[algorithm]:
        other = next(name for name, its in DRAFT_ARCHITECTURES.items() if its == config.architecture)
        raise ValueError(
            f"{config.path} is a {config.architecture}, and speculative_algorithm={algorithm!r} needs a "
            f"{DRAFT_ARCHITECTURES[algorithm]}: set it to {other!r}, or give another draft"
        )
    if algorithm == "EAGLE3" and config.num_hidden_layers != 1:
        raise ValueError(f"{config.path} has {config.num_hidden_layers} layers, an EAGLE-3 head here has one")
    if algorithm == "STANDALONE":
        _check_vocabulary(config, target)
        return replace(config, torch_dtype=target.torch_dtype)
    for name, what in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary")):
        own, wanted = getattr(config, name), getattr(target, name)
        if own != wanted:
            raise ValueError(
                f"the draft head {config.path} has {what} {own}, the target {target.path} {wanted}: "
                "a head works only with the target it was trained for"
            )
    if (own := config.num_nextn_predict_layers) not in (1, num_modules):
        raise ValueError(
            f"{config.path} has {own} modules, each for a step of its own: set enable_multi_layer_eagle and "
            f"speculative_num_steps={own}"
        )
    if num_modules is None:
        return replace(config, torch_dtype=target.torch_dtype)
    if config.num_hidden_layers != 1:
        raise ValueError(
            f"{config.path} has {config.num_hidden_layers} layers, and a module for one step has one: "
            "leave enable_multi_layer_eagle out"
        )
    modules = {"num_hidden_layers": num_modules, "is_multi_layer_eagle": True}
    return replace(config, torch_dtype=target.torch_dtype, **modules)


def _check_vocabulary(draft: ModelConfig, target: ModelConfig) -> None:
    """A token has to be the same text to both: as many tokens, and the same, where both bring a tokenizer."""
    hint = "give a draft of the target's own family"
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft model {draft.path} has a vocabulary of {draft.vocab_size} tokens, the target "
            f"{target.path} one of {target.vocab_size}: {hint}"
        )
    files = [config.path / "tokenizer.json" for config in (draft, target)]
    if all(file.exists() for file in files):
        own, wanted = ((_read_json(file).get("model") or {}).get("vocab") for file in files)
        if own != wanted:
            raise ValueError(
                f"the tokenizers of the draft model {draft.path} and the target {target.path} number their "
                f"tokens differently: {hint}"
            )


def _aux_layer_ids(raw: dict) -> list[int] | None:
    return (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")


def _generation_config(path: Path) -> dict:
    file = path / "generation_config.json"
    return _read_json(file) if file.exists() else {}


def _read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not a table")
    return content


def open_weights(file: Path, device: Any = "cpu") -> Any:
    """`safe_open` with an error that names the file."""
    try:
        return safe_open(file, framework="pt", device=str(device))
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}): fetch or convert it again") from error


def _has_tensor(path: Path, *names: str) -> bool:
    """Whether a file of the folder has one of `names`."""
    for file in path.glob("*.safetensors"):
        with open_weights(file) as weights:
            if not set(names).isdisjoint(weights.keys()):
                return True
    return False
