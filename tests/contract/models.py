"""Tiny Llama targets, random but useful, written as real safetensors folders with EAGLE and EAGLE-3 heads.

A target is almost a bigram model: its layers add `mix` to an embedding that decides most of the next token,
so a head that reads the embedding alone is often right, and both accepted and rejected drafts occur. Norm
weights are never ones and every head tensor is non-zero, so a missing or misplaced one changes numbers.
Dimension 0 of the embedding is the same for all tokens: with it one token can be made impossible (the end
token) or loved.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EOS = 2
CONSTANT = 2.0  # value of dimension 0 in every embedding row


@dataclass(frozen=True)
class TargetSpec:
    """Shape and temper of one random target; `loved` gets about `love` added to its logit at
    every position. `hot` tokens (0: all) are those that its draft proposes: under EAGLE by a token map.
    """

    name: str = "base"
    vocab: int = 128
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 96
    mix: float = 0.2
    lm_scale: float = 3.0
    max_positions: int = 256
    seed: int = 1
    loved: int | None = None
    love: float = 0.0
    tied: bool = False
    qkv_bias: bool = False
    shards: int = 1
    rope_scaling: str | None = None
    eos_possible: bool = False
    tokenizer: bool = True
    algorithm: str = "EAGLE"
    hot: int = 0
    modules: int = 1  # heads in its draft's file, each for a step of its own

    @property
    def needs(self) -> set[str]:
        """Features of a stage that can draft for it."""
        if self.modules > 1:
            return {"multi_layer_eagle"}
        if self.algorithm != "EAGLE":
            return {self.algorithm.lower()}
        return {"token_map"} if self.hot else set()

    def hot_tokens(self) -> torch.Tensor:
        """Ascending ids; the end token is one of them."""
        others = torch.randperm(self.vocab - 3, generator=torch.Generator().manual_seed(self.seed)) + 3
        return torch.cat([torch.tensor([EOS]), others[: self.hot - 1]]).sort().values


BASE = TargetSpec()
GROUP3 = TargetSpec(name="group3", heads=6, kv_heads=2, seed=2)
TOY8 = TargetSpec(
    name="toy8",
    vocab=8,
    hidden=32,
    layers=1,
    heads=2,
    kv_heads=1,
    mlp=48,
    lm_scale=1.3,
    seed=3,
    tokenizer=False,
    eos_possible=True,
)
TOY16 = TargetSpec(
    name="toy16",
    vocab=16,
    hidden=32,
    layers=1,
    heads=2,
    kv_heads=1,
    mlp=48,
    lm_scale=1.5,
    seed=4,
    tokenizer=False,
    eos_possible=True,
)
LOVER = TargetSpec(name="lover", seed=5, loved=40, love=9.0)
TIED = TargetSpec(name="tied", seed=6, tied=True, lm_scale=1.0, mix=1.5)
BIASED = TargetSpec(name="biased", seed=7, qkv_bias=True, shards=3)
SCALED_ROPE = TargetSpec(name="scaled_rope", seed=8, rope_scaling="llama3")
TOKEN_MAP = TargetSpec(name="token_map", seed=9, hot=96)
# Seven layers are the fewest of which three are captured; wide heads, for what its head makes of them.
EAGLE3 = TargetSpec(name="eagle3", seed=10, layers=7, head_dim=32, mix=0.08, algorithm="EAGLE3", hot=96)
TOY8_EAGLE3 = TargetSpec(
    name="toy8_eagle3",
    vocab=8,
    hidden=32,
    layers=7,
    heads=2,
    kv_heads=1,
    mlp=48,
    mix=0.08,
    lm_scale=1.3,
    seed=11,
    tokenizer=False,
    eos_possible=True,
    algorithm="EAGLE3",
    hot=6,
)
METHODS = (EAGLE3, TOKEN_MAP)  # beside plain EAGLE
STANDALONE = TargetSpec(name="standalone", algorithm="STANDALONE", layers=3, seed=52)
MULTI_LAYER = TargetSpec(name="multi_layer", modules=3, seed=60)
TOY8_STANDALONE = replace(TOY8, name="toy8-standalone", layers=2, algorithm="STANDALONE")

HEAD_TENSORS = (
    "fc.weight",
    "fc.bias",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "layers.0.post_attention_layernorm.weight",
)


def _config(spec: TargetSpec, **more) -> dict:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.mlp,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied,
        "attention_bias": spec.qkv_bias,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    if spec.rope_scaling == "llama3":
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    config.update(more)
    return config


def _layer(spec: TargetSpec, prefix: str, draw, strength: float) -> dict[str, torch.Tensor]:
    """One decoder layer whose attention and MLP outputs have a standard deviation of about `strength`."""
    hidden, q_size, kv_size = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    tensors = {
        "self_attn.q_proj.weight": draw(q_size, hidden, scale=1.3 * hidden**-0.5),
        "self_attn.k_proj.weight": draw(kv_size, hidden, scale=1.3 * hidden**-0.5),
        "self_attn.v_proj.weight": draw(kv_size, hidden, scale=1.5 * hidden**-0.5),
        "self_attn.o_proj.weight": draw(hidden, q_size, scale=strength * q_size**-0.5),
        "mlp.gate_proj.weight": draw(spec.mlp, hidden, scale=hidden**-0.5),
        "mlp.up_proj.weight": draw(spec.mlp, hidden, scale=hidden**-0.5),
        "mlp.down_proj.weight": draw(hidden, spec.mlp, scale=2 * strength * spec.mlp**-0.5),
        "input_layernorm.weight": 0.7 + 0.6 * torch.rand(hidden, generator=draw.generator),
        "post_attention_layernorm.weight": 0.7 + 0.6 * torch.rand(hidden, generator=draw.generator),
    }
    if spec.qkv_bias:
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            tensors[f"self_attn.{name}_proj.bias"] = draw(size, scale=0.5)
        tensors["self_attn.o_proj.bias"] = draw(hidden, scale=0.1)
    return {prefix + name: tensor for name, tensor in tensors.items()}


class _Draw:
    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * scale


def target_tensors(spec: TargetSpec) -> dict[str, torch.Tensor]:
    """All tensors of a target by their Hugging Face names, float32."""
    draw = _Draw(1000 + spec.seed)
    embed = draw(spec.vocab, spec.hidden)
    embed[:, 0] = CONSTANT
    tensors = {"model.embed_tokens.weight": embed}
    for index in range(spec.layers):
        tensors.update(_layer(spec, f"model.layers.{index}.", draw, spec.mix))
    norm = 0.7 + 0.6 * torch.rand(spec.hidden, generator=draw.generator)
    tensors["model.norm.weight"] = norm
    if spec.tied:
        # A tied head echoes its own token; the scale of the final norm keeps the logits at a useful size.
        tensors["model.norm.weight"] = norm * 3.0 * spec.hidden**-0.5
        return tensors
    lm_head = draw(spec.vocab, spec.hidden, scale=spec.lm_scale * spec.hidden**-0.5)
    lm_head[:, 0] = 0.0
    if not spec.eos_possible:
        lm_head[EOS] = 0.0
        lm_head[EOS, 0] = -12.0
    if spec.loved is not None:
        lm_head[spec.loved, 0] = spec.love / CONSTANT
    tensors["lm_head.weight"] = lm_head
    return tensors


def write_target(folder: Path, spec: TargetSpec) -> Path:
    """Write the target as a folder (sharded with an index when `spec.shards` > 1) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in target_tensors(spec).items()}
    if spec.shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        names = sorted(tensors)
        weight_map = {}
        for shard in range(spec.shards):
            file = f"model-{shard + 1:05d}-of-{spec.shards:05d}.safetensors"
            part = {name: tensors[name] for name in names[shard :: spec.shards]}
            weight_map.update(dict.fromkeys(part, file))
            save_file(part, folder / file, metadata={"format": "pt"})
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(_config(spec)))
    if spec.tokenizer:
        write_tokenizer(folder, spec.vocab)
    return folder


def head_tensors(spec: TargetSpec, folder: Path, seed: int = 0, skill: float = 1.0, bias: bool = True):
    """Tensors by name of a one-layer EAGLE head for the target in `folder`: fc, a layer without input norm.

    fc is a least-squares fit of the next feature from (next token's embedding, this feature) on random
    sequences, so the head is often right; `skill` 0 gives one that knows nothing. The layer adds a little of
    everything.
    """
    from .reference import RefTarget  # the independent forward gives the features to fit

    draw, target = _Draw(2000 + 17 * seed + spec.seed), RefTarget(folder)
    pairs, wanted = [], []
    for _ in range(12):
        tokens = torch.randint(3, spec.vocab, (96,), generator=draw.generator)
        hidden = target.run(tokens.tolist()).hidden
        pairs.append(torch.cat([target.embed[tokens[1:]], hidden[:-1]], dim=1))
        wanted.append(hidden[1:])
    return _fitted_head(spec, draw, pairs, wanted, skill, bias)


def _fitted_head(spec: TargetSpec, draw, pairs, wanted, skill: float = 1.0, bias: bool = True):
    """A head whose fc is fitted to make `wanted` of `pairs`, lists of [rows, h] and [rows, 2h]."""
    x, y = torch.cat(pairs).double(), torch.cat(wanted).double()
    ridge = 3.0 * torch.eye(x.shape[1], dtype=torch.float64)
    fit = torch.linalg.solve(x.T @ x + ridge, x.T @ y).T.float()  # [h, 2h]
    tensors = _layer(spec, "layers.0.", draw, 0.12)
    tensors = {name: tensor for name, tensor in tensors.items() if "input_layernorm" not in name}
    tensors["fc.weight"] = skill * fit + draw(spec.hidden, 2 * spec.hidden, scale=0.02)
    if bias:
        tensors["fc.bias"] = draw(spec.hidden, scale=0.05)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def multi_layer_tensors(spec: TargetSpec, folder: Path):
    """Tensors by name of a head for each step: each is fitted to what the one before it makes of a text."""
    from .reference import MultiLayerRefHead, RefHead, RefTarget

    draw, target, heads, tensors = _Draw(6000 + spec.seed), RefTarget(folder), [], {}
    texts = [torch.randint(3, spec.vocab, (96,), generator=draw.generator).tolist() for _ in range(12)]
    for module in range(spec.modules):
        pairs, wanted = [], []
        for text in texts:
            hidden, before = target.run(text).hidden, len(text) - 1 - module
            made = MultiLayerRefHead(heads).run(text).features[-1] if heads else hidden
            tokens = torch.tensor(text[1 + module :])
            pairs.append(torch.cat([target.embed[tokens], made[:before]], dim=1))
            wanted.append(hidden[1 + module :])
        head = _fitted_head(spec, draw, pairs, wanted)
        heads.append(RefHead(_config(spec), head, target))
        tensors |= {f"mtp.{module}.{name}": tensor for name, tensor in head.items()}
    return tensors


def eagle3_head_tensors(spec: TargetSpec, folder: Path, seed: int = 0, skill: float = 1.0):
    """Tensors by name of an EAGLE-3 head for the target in `folder`, in the layout of published ones.

    All embeddings have one dimension in common. It makes attention look at its own row above all, so that the
    embedding gets through to the head's own LM head, a least-squares fit to the target's logits; `skill` 0
    gives one that knows nothing.
    """
    from .reference import Eagle3RefHead, RefTarget

    draw, hidden, dim = _Draw(3000 + 17 * seed + spec.seed), spec.hidden, spec.head_dim
    plain, attention = _layer(spec, "midlayer.", draw, 0.1), "midlayer.self_attn."
    for name, own, first in (("q", 0.3, 2.5), ("k", 0.3, 2.5), ("v", 1.0, 0.0)):
        embed, state = plain[f"{attention}{name}_proj.weight"], draw(hidden, hidden, scale=0.3 * hidden**-0.5)
        weight = torch.cat([embed, state[torch.arange(len(embed)) % hidden]], dim=1) * own
        # Turned by the rotary embedding, the same vector agrees with itself best where it was not moved.
        weight[:, 0] = first * (torch.arange(len(weight)) % (dim // 2) < 3)
        plain[f"{attention}{name}_proj.weight"] = weight
    # Random rotations lose nothing of the embedding, as random matrices would.
    size, group = spec.kv_heads * dim, spec.heads // spec.kv_heads
    plain[f"{attention}v_proj.weight"][:, :hidden] = torch.linalg.qr(draw(hidden, hidden)).Q[:size]
    out = torch.linalg.qr(draw(hidden, hidden)).Q[:, :size].view(hidden, spec.kv_heads, 1, dim) / group
    plain[f"{attention}o_proj.weight"] = out.expand(-1, -1, group, -1).reshape(hidden, -1)
    hot = spec.hot_tokens()
    marked = torch.zeros(spec.vocab, dtype=torch.bool)
    marked[hot] = True
    tensors = plain | {
        "midlayer.hidden_norm.weight": 0.7 + 0.6 * torch.rand(hidden, generator=draw.generator),
        "fc.weight": draw(hidden, 3 * hidden, scale=0.3 * (3 * hidden) ** -0.5),
        "norm.weight": 0.7 + 0.6 * torch.rand(hidden, generator=draw.generator),
        "lm_head.weight": torch.zeros(len(hot), hidden),
        "d2t": hot - torch.arange(len(hot)),
        "t2d": marked,
    }
    target, states, wanted = RefTarget(folder), [], []
    head = Eagle3RefHead(_config(spec), tensors, target)
    for _ in range(12):
        tokens = torch.randint(3, spec.vocab, (96,), generator=draw.generator).tolist()
        states.append(head.normed(head.teacher_forced(tokens)[2]))
        wanted.append(target.run(tokens).logits[1:, hot])
    x, y = torch.cat(states).double(), torch.cat(wanted).double()
    ridge = 3.0 * torch.eye(hidden, dtype=torch.float64)
    tensors["lm_head.weight"] = skill * torch.linalg.solve(x.T @ x + ridge, x.T @ (y - y.mean(0))).T.float()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def standalone_tensors(spec: TargetSpec, folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors by name of an independent draft: the target without its last layer, its head a little off."""
    draw, tensors = _Draw(5000 + 17 * seed + spec.seed), read_tensors(folder)
    last = f"model.layers.{spec.layers - 1}."
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(last)}
    noise = 0.15 * spec.lm_scale * spec.hidden**-0.5
    kept["lm_head.weight"] = kept["lm_head.weight"] + draw(spec.vocab, spec.hidden, scale=noise)
    return {name: tensor.contiguous() for name, tensor in kept.items()}


def write_token_map(file: Path, spec: TargetSpec) -> Path:
    """The map of a target's hot tokens, most frequent first as such files are."""
    torch.save(spec.hot_tokens().flip(0).tolist(), file)
    return file


def write_head(folder: Path, spec: TargetSpec, tensors: dict[str, torch.Tensor], **config) -> Path:
    """Write a draft head for `spec` as a folder; config keys can be replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kind = {"architectures": ["LlamaForCausalLMEagle"]}
    if spec.algorithm == "EAGLE3":
        kind = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": spec.hot}
    layers = 1
    if spec.algorithm == "STANDALONE":
        kind, layers = {}, spec.layers - 1
    if spec.modules > 1:
        kind["num_nextn_predict_layers"] = spec.modules
    content = _config(spec, num_hidden_layers=layers, tie_word_embeddings=False, **kind)
    content.update(config)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def copy_with_config(source: Path, folder: Path, **config) -> Path:
    """A copy of a model folder whose config.json has other values (None removes a key)."""
    shutil.copytree(source, folder)
    content = json.loads((folder / "config.json").read_text())
    content.update(config)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return folder


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model folder, float32, by name."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: tensor.float() for file in files for name, tensor in load_file(file).items()}


def token_texts(vocab: int) -> list[str]:
    """The text of each token id of the tiny tokenizer, in the byte-level alphabet where a character is one
    byte.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        alphabet.setdefault(byte, chr(256 + sum(b not in printable for b in range(byte))))
    texts = ["<pad>", "<s>", "</s>"] + [alphabet[byte] for byte in range(32, 127)]
    euro = [alphabet[byte] for byte in "€".encode()]
    acute = [alphabet[byte] for byte in "é".encode()]
    texts += euro + acute
    pairs = ["ab", "cd", "the", "END", "stop", "xyz", "12", "..", "foo", "bar"]
    texts += pairs + [f"{a}{b}{a}" for a in "qwertyu" for b in "mnb"]
    return texts[:vocab]


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level tokenizer of `vocab` pieces: printable characters, the bytes of two others,
    a few words.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    texts = token_texts(vocab)
    assert len(texts) == vocab == len(set(texts)), (len(texts), len(set(texts)))
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(texts[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
