"""A Llama model of a few thousand weights as a GGUF file, and what must come out of it, by loops alone."""

import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 64, 4, 2, 16, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
HF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass
class TinyModel:
    """The file, and each tensor by its Hugging Face name as the float32 values that the file stands for."""

    path: Path
    expected: dict[str, np.ndarray]
    tokens: list[str]


def vocabulary() -> list[str]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return SPECIAL + letters + [merge.replace(" ", "") for merge in MERGES]


def half(raw: bytes) -> float:
    return struct.unpack("<e", raw)[0]


def dequantise_row(raw: bytes, kind: Type) -> list[float]:
    """One row of a quantised tensor, block by block and weight by weight."""
    values = []
    if kind == Type.Q8_0:  # 32 weights: a scale, then 32 signed bytes
        for start in range(0, len(raw), 34):
            scale = half(raw[start : start + 2])
            values += [scale * byte for byte in struct.unpack("<32b", raw[start + 2 : start + 34])]
    else:  # Q4_1, 32 weights: a scale, a minimum, 16 bytes with weight i below and weight i + 16 above
        for start in range(0, len(raw), 20):
            scale, least = half(raw[start : start + 2]), half(raw[start + 2 : start + 4])
            packed = raw[start + 4 : start + 20]
            values += [scale * (byte & 15) + least for byte in packed]
            values += [scale * (byte >> 4) + least for byte in packed]
    return values


def to_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp keeps row pair (2j, 2j + 1) of a head for rotary pair j; elsewhere it is (j, j + d/2)."""
    out = np.empty_like(rows)
    size = rows.shape[0] // heads
    for head in range(heads):
        for j in range(size // 2):
            out[head * size + j] = rows[head * size + 2 * j]
            out[head * size + j + size // 2] = rows[head * size + 2 * j + 1]
    return out


def write_tiny_gguf(
    path: Path, untied: bool = False, architecture: str = "llama", kind: Type = Type.Q4_1
) -> TinyModel:
    """Write the model; all matrices are stored as `kind`, the embedding as Q8_0, norms as F32."""
    tokens = vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

    random = np.random.default_rng(7)
    expected: dict[str, np.ndarray] = {}

    def add(name: str, hf_name: str, shape: tuple[int, ...], stored: Type, heads: int = 0) -> None:
        values = random.normal(size=shape).astype(np.float32)
        if stored == Type.F32:
            writer.add_tensor(name, values)
            expected[hf_name] = values
            return
        raw = gguf.quants.quantize(values, stored)
        writer.add_tensor(name, raw, raw_dtype=stored)
        if stored in (Type.Q8_0, Type.Q4_1):
            values = np.array([dequantise_row(row.tobytes(), stored) for row in raw], dtype=np.float32)
            expected[hf_name] = to_halves(values, heads) if heads else values

    add("token_embd.weight", "model.embed_tokens.weight", (len(tokens), HIDDEN), Type.Q8_0)
    for layer in range(LAYERS):
        for name, shape, heads in [
            ("attn_q", (HEADS * HEAD_DIM, HIDDEN), HEADS),
            ("attn_k", (KV_HEADS * HEAD_DIM, HIDDEN), KV_HEADS),
            ("attn_v", (KV_HEADS * HEAD_DIM, HIDDEN), 0),
            ("attn_output", (HIDDEN, HEADS * HEAD_DIM), 0),
            ("ffn_gate", (MLP, HIDDEN), 0),
            ("ffn_up", (MLP, HIDDEN), 0),
            ("ffn_down", (HIDDEN, MLP), 0),
            ("attn_norm", (HIDDEN,), 0),
            ("ffn_norm", (HIDDEN,), 0),
        ]:
            stored = Type.F32 if len(shape) == 1 else kind
            hf_name = f"model.layers.{layer}.{HF_LAYER[name]}.weight"
            add(f"blk.{layer}.{name}.weight", hf_name, shape, stored, heads)
    add("output_norm.weight", "model.norm.weight", (HIDDEN,), Type.F32)
    if untied:
        add("output.weight", "lm_head.weight", (len(tokens), HIDDEN), Type.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyModel(path, expected, tokens)


def write_wheel(path: Path, member: str, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
