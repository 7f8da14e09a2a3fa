"""Fills a model from safetensors files. Restates sglang/srt/model_loader/loader.py.

Strict both ways: a tensor that the model has and the files lack would stay unwritten memory, and one that
the files have and the model lacks means that this is not the model they were trained as. Neither changes
an output enough to be noticed in a draft head, so both are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..configs.model_config import ModelConfig, open_weights
from ..layers.dp_attention import get_dp_group
from .llama import LlamaForCausalLM
from .llama_eagle import LlamaForCausalLMEagle
from .llama_eagle3 import LlamaForCausalLMEagle3
from .multi_layer_eagle import MultiLayerEagle

MODEL_CLASSES: dict[str, type[nn.Module]] = {
    c.__name__: c for c in (LlamaForCausalLM, LlamaForCausalLMEagle, LlamaForCausalLMEagle3)
}


def load_model(config: ModelConfig, kernels: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Build the model of `config` on `device` and fill every parameter.

    Raises:
        ValueError: no safetensors files, or a missing, surplus or misshapen tensor, by name.
    """
    files = sorted(config.path.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{config.path} has no .safetensors file; "
            "`fledge models convert-head` converts a published pytorch_model.bin"
        )
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model_class = MODEL_CLASSES[config.architecture]
            if config.is_multi_layer_eagle:
                model = MultiLayerEagle(config, kernels, model_class)
            else:
                model = model_class(config, kernels)
    finally:
        torch.set_default_dtype(default)
    targets = model.checkpoint_views()
    surplus, filled = [], set()
    for file in files:
        with open_weights(file, device) as weights:
            for name in weights.keys():  # noqa: SIM118 - a safetensors handle is not a dict
                if name.endswith("rotary_emb.inv_freq"):
                    continue
                if model.borrows(name):
                    _check_borrowed(config, name, weights.get_slice(name).get_shape(), file)
                    continue
                if name not in targets:
                    surplus.append(name)
                    continue
                _copy(targets[name], weights.get_tensor(name), name, file)
                filled.add(name)
    missing = sorted(targets.keys() - filled - set(getattr(model, "optional", ())))
    problems = [f"{what} {', '.join(names[:4])}{' …' if len(names) > 4 else ''}" for what, names in
                (("lacks", missing), ("has the unknown", surplus)) if names]  # fmt: skip
    if problems:
        raise ValueError(f"{config.path} does not fit {config.architecture}: it {' and '.join(problems)}")
    return model.eval()


def _check_borrowed(config: ModelConfig, name: str, shape: list[int], file: Path) -> None:
    """A copy of what the target lends may be left out; a matrix of another size is no copy of it."""
    wanted = [config.vocab_size, config.hidden_size]
    if list(shape) != wanted:
        raise ValueError(
            f"{file}: {name} is {list(shape)}, the target's own is {wanted}: a head with a vocabulary of its "
            "own drafts other token ids than the target's"
        )


def _copy(target: torch.Tensor, tensor: torch.Tensor, name: str, file: Path) -> None:
    wanted, dim, group = list(target.shape), getattr(target, "shard_dim", None), get_dp_group()
    is_shard = group is not None and dim is not None and dim < len(wanted)  # a bias has no inputs
    if is_shard:
        wanted[dim] *= group.size
    if list(tensor.shape) != wanted:
        raise ValueError(
            f"{file}: {name} is {list(tensor.shape)}, config.json asks for {wanted}: "
            "the weights and the config belong to different models"
        )
    if is_shard:
        tensor = tensor.chunk(group.size, dim)[group.rank]
    with torch.no_grad():
        target.copy_(tensor)
