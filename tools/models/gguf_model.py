"""From a GGUF file of a Llama model to a Hugging Face folder: weights in bf16, config and tokenizer.

Two things in such a file are llama.cpp's own: its names, and the order of the rows of q and k, which puts the
two rows of each rotary pair side by side. Both are undone here. The `gguf` package does the reading.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .cache import ModelError, write_json

if TYPE_CHECKING:
    from gguf import GGUFReader

CONVERTER = 1  # raised when the same file would be converted to something else
READABLE_TYPES = ("F32", "F16", "Q8_0", "Q4_1")
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def open_gguf(path: Path) -> "GGUFReader":
    """Open a GGUF file of a Llama model; raises ModelError if it is something else."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise ModelError(f"{path} cannot be read as a GGUF file: {error}") from error
    architecture = field(reader, "general.architecture")
    if architecture != "llama":
        raise ModelError(
            f"{path} holds a model of architecture {architecture!r}; only 'llama' can be converted."
        )
    return reader


def field(reader: "GGUFReader", name: str, default: Any = None) -> Any:
    """One metadata value as a plain Python object, `default` where the file has none."""
    entry = reader.fields.get(name)
    return default if entry is None else entry.contents()


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; raises ModelError for one that a Llama model does not have."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    prefix, layer, rest = (name.split(".", 2) + ["", ""])[:3]
    if prefix == "blk" and layer.isdigit() and rest in LAYER_NAMES:
        return f"model.layers.{int(layer)}.{LAYER_NAMES[rest]}"
    raise ModelError(f"The GGUF file has a tensor {name!r} that a Llama model does not have.")


def undo_rotary_order(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Bring rows of q or k, [heads * head_dim, hidden], from the order (0, d/2, 1, d/2 + 1, …) to halves."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])  # [heads, head_dim / 2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def read_config(reader: "GGUFReader") -> dict[str, Any]:
    """The `config.json` of the model: what Hugging Face, SGLang and our own loader read."""

    def value(key: str, default: Any = None) -> Any:
        found = field(reader, f"llama.{key}", default)
        if found is None:
            raise ModelError(f"The GGUF file does not say 'llama.{key}'.")
        # Floats are stored with 32 bits; the shortest decimal that reads back the same is what was meant.
        return float(str(np.float32(found))) if isinstance(found, float) else found

    heads = value("attention.head_count")
    head_dim = value("rope.dimension_count", value("embedding_length") // heads)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": len(field(reader, "tokenizer.ggml.tokens", [])),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base", 10000.0),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": field(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def read_weights(reader: "GGUFReader") -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, float32 array in Hugging Face's row order) for each tensor of the file."""
    from gguf.quants import dequantize

    config = read_config(reader)
    heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        if tensor.tensor_type.name not in READABLE_TYPES:
            raise ModelError(
                f"The tensor {tensor.name!r} is stored as {tensor.tensor_type.name}; "
                f"what can be read is {', '.join(READABLE_TYPES)}."
            )
        values = dequantize(tensor.data, tensor.tensor_type)
        suffix = tensor.name.split(".", 2)[-1]
        yield name, undo_rotary_order(values, heads[suffix]) if suffix in heads else values


def write_weights(reader: "GGUFReader", folder: Path, advance: Callable[[], None] = lambda: None) -> None:
    """Write `model.safetensors` (bf16) into `folder`; `advance` is called once per tensor."""
    import torch
    from safetensors.torch import save_file

    weights: dict[str, torch.Tensor] = {}
    for name, values in read_weights(reader):
        weights[name] = torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
        advance()
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library leaves it to its owner alone; a cache may be shared


def write_config(reader: "GGUFReader", folder: Path) -> None:
    """Write `config.json` and `generation_config.json` into `folder`."""
    config = read_config(reader)
    write_json(folder / "config.json", config)
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **tokens})


def write_tokenizer(reader: "GGUFReader", folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (with the chat template) into `folder`.

    Not through `AutoTokenizer(gguf_file=…)`: that drops this vocabulary's digit rule (each digit is a piece
    of its own), takes the start of a turn for its end, and cleans up spaces, so that decoding would not give
    back what was encoded.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = field(reader, "tokenizer.ggml.model"), field(reader, "tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ModelError(
            f"The GGUF file has a tokenizer of kind {kind}; only ('gpt2', 'smollm') can be converted."
        )
    tokens = field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in field(reader, "tokenizer.ggml.merges")]
    control = [i for i, kind in enumerate(field(reader, "tokenizer.ggml.token_type")) if kind == 3]

    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    def named(role: str) -> str | None:
        i = field(reader, f"tokenizer.ggml.{role}_token_id")
        return None if i is None else tokens[i]

    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": named("bos"),
            "eos_token": named("eos"),
            "pad_token": named("padding"),
            "unk_token": named("unknown"),
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": field(reader, "llama.context_length"),
            "chat_template": field(reader, "tokenizer.chat_template"),
        },
    )
