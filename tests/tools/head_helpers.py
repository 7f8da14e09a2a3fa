"""Tiny targets, heads and texts for the tests of the head tools."""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tools.models.head_data import HELD_OUT, MANIFEST, Text, _describe, _save
from tools.models.head_model import FrozenTarget, Head, HeadConfig, head_for

VOCAB, HIDDEN = 61, 48  # neither a power of two; three query heads to one key head, as in the embedded model


def tiny_target(folder: Path, seed: int = 0, sharpness: float = 6.0, layers: int = 2) -> Path:
    """A random Llama whose logits are sharp enough to have a clear best token."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=3,
        head_dim=16, num_key_value_heads=1, vocab_size=VOCAB, max_position_embeddings=512, rms_norm_eps=1e-5,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness / 10)
    model.save_pretrained(folder)
    # transformers 5 writes rope_parameters; published configs of this age say rope_theta.
    raw = json.loads((folder / "config.json").read_text())
    raw["rope_theta"] = 10000.0
    raw.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def tiny_head(folder: Path, seed: int = 1, std: float = 0.15) -> Head:
    """A random head for the target in `folder`."""
    raw = json.loads((folder / "config.json").read_text())
    return Head(HeadConfig.for_target(raw, 56)).reset(seed, std)


def tiny_setting(folder: Path, algorithm: str, seed: int = 1, std: float = 0.15) -> tuple[FrozenTarget, Head]:
    """A target and a random head for it; EAGLE-3's proposes two tokens of three."""
    if algorithm == "EAGLE":
        return FrozenTarget(tiny_target(folder)), tiny_head(folder, seed, std)
    target = FrozenTarget(tiny_target(folder, layers=7))
    head = head_for(target, 56, seed, torch.arange(VOCAB)[torch.arange(VOCAB) % 3 > 0])
    with torch.no_grad():
        for name, tensor in head.tensors().items():
            if "proj" in name:
                tensor.mul_(2.5 * std / 0.02)
            if name.endswith("norm.weight"):
                tensor.mul_(0.5 + torch.rand(tensor.shape))
    return target, head


def fed_states(head: Head, target: FrozenTarget, tokens: torch.Tensor) -> torch.Tensor:
    """What the head reads of the target, `[B, L, any]`."""
    layers = head.fed_layers(target)
    states = target.states(tokens, layers)
    return states[..., :-HIDDEN] if layers else states


def random_text(sequences: int, seed: int = 0, low: int = 12, high: int = 90) -> Text:
    """Random conversations of different lengths."""
    random = np.random.default_rng(seed)
    lengths = random.integers(low, high, sequences)
    rows = [random.integers(3, VOCAB, n) for n in lengths]
    prompts = [int(random.integers(3, n - 4)) for n in lengths]
    return Text.from_rows(rows, prompts, [0] * sequences)


def write_folder(folder: Path, text: Text, held_out: Text | None = None) -> Path:
    """Lay a text out as `write_text` does."""
    folder.mkdir(parents=True, exist_ok=True)
    _save(folder / "shard-00000.npz", text)
    if held_out is not None:
        _save(folder / HELD_OUT, held_out)
    manifest = {"target": "tiny", "settings": {}, "shards": [_describe("shard-00000.npz", text)]}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder
