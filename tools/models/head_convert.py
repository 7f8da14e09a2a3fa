"""`convert-head`: a published EAGLE or EAGLE-3 head (`pytorch_model.bin`) becomes a folder that engines load.

Published heads name their tensors as upstream's loader expects them, with or without a leading `model.`, some
carry a copy of the embedding, and their configs say `LlamaForCausalLM`. EAGLE-3's are told by their tensors.
"""

import json
import os
import pickle
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from .cache import ModelError
from .head_model import ARCHITECTURES, HeadConfig, check_tensors, new_head, save_head

# The target lends these, whatever the file holds; rotary frequencies are worked out.
BORROWED = ("embed_tokens.weight", "rotary_emb.inv_freq")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of `model.safetensors` or `pytorch_model.bin`; what a pickle would run is not run."""
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if safe.is_file():
        return load_file(safe)
    if not pickled.is_file():
        raise ModelError(f"{folder} holds neither pytorch_model.bin nor model.safetensors.")
    try:
        tensors = torch.load(pickled, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ModelError(f"{pickled} is not a file of plain tensors: {error}") from None
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ModelError(f"{pickled} does not hold a table of tensors.")
    return tensors


def is_eagle3(config: dict, tensors: dict[str, Tensor]) -> bool:
    """Whether this is an EAGLE-3 head: it says so, or it has that layout's own tensors."""
    said = any("Eagle3" in name for name in config.get("architectures") or [])
    return said or any(name in ("d2t", "t2d") or name.startswith("midlayer.") for name in tensors)


def convert_head(
    source: str | os.PathLike, out: str | os.PathLike, target_config: dict | None = None
) -> Path:
    """Convert the head in folder `source` into folder `out`, in the dtype it was stored in.

    Args: target_config, a target's `config.json`, fills in what a head's config may leave to its target and
    is checked against it. Returns `out`. Raises ModelError naming what does not fit.
    """
    source = Path(source)
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{source} holds no config.json that can be read: {error}") from None
    stored = {name.removeprefix("model."): tensor for name, tensor in read_tensors(source).items()}
    eagle3 = is_eagle3(config, stored)
    borrowed = BORROWED if eagle3 else (*BORROWED, "lm_head.weight")
    kept = {name: tensor for name, tensor in stored.items() if not name.endswith(borrowed)}
    maps = {name: kept.pop(name) for name in ("d2t", "t2d") if name in kept}
    wide = {"hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"}
    if missing := sorted(wide - config.keys()):
        raise ModelError(f"{source / 'config.json'} lacks {', '.join(missing)}.")
    if target_config is not None:
        for key in ("hidden_size", "vocab_size"):
            if config[key] != target_config[key]:
                raise ModelError(f"The head's {key} is {config[key]}, its target's {target_config[key]}.")
        config = {
            **{k: target_config[k] for k in ("rope_theta", "rope_scaling") if k in target_config},
            **config,
        }
    has_bias = "fc.bias" in kept
    normal = {key: value for key, value in config.items() if key not in ("bias", "torch_dtype", "dtype")}
    normal |= {
        "architectures": [ARCHITECTURES["EAGLE3" if eagle3 else "EAGLE"]],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        # True is what a loader assumes that finds no such key.
        **({} if has_bias else {"bias": False}),
    }
    if config.get("num_hidden_layers", 1) != 1:
        raise ModelError(
            f"{source / 'config.json'} says {config['num_hidden_layers']} layers; a head here has one."
        )
    head_config = HeadConfig.from_dict(normal, fc_bias=has_bias)
    check_tensors(head_config, kept, str(source))
    head = new_head(head_config)
    head.set_maps(maps, str(source))
    with torch.no_grad():
        for name, parameter in head.tensors().items():
            parameter.copy_(kept[name])
    return save_head(head, out, kept["fc.weight"].dtype)
