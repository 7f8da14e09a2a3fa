"""R0 and friends: the same models in plain float32 PyTorch, one sequence at a time, no cache, no engine code.

`RefTarget` and `RefHead` read the safetensors folders themselves. On top of them stand plain greedy decoding
with the stop rules, and a simulation of the whole speculative loop that says what every round must accept.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F

from .models import read_tensors


def _inv_freq(config: dict) -> torch.Tensor:
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = float(
        config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    )
    freq = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    scaling = config.get("rope_scaling")
    if not scaling or scaling.get("rope_type") == "default":
        return freq
    assert scaling["rope_type"] == "llama3", scaling
    old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    scaled = []
    for value in freq.tolist():
        wavelength = 2 * math.pi / value
        if wavelength < old / high:
            scaled.append(value)
        elif wavelength > old / low:
            scaled.append(value / factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * value / factor + smooth * value)
    return torch.tensor(scaled)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class _Layer:
    """Attention and MLP of one Llama layer on weights named `prefix`…"""

    def __init__(self, tensors: dict[str, torch.Tensor], prefix: str, config: dict):
        self.t = {
            name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
        }
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps, self.freq = config["rms_norm_eps"], _inv_freq(config)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.t[name + ".weight"], self.t.get(name + ".bias"))

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = positions[:, None].float() * self.freq[None]  # [rows, D/2]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def kv(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [rows, h] (normed if the layer norms) -> rotated keys and values [rows, Hk, D]."""
        k = self.linear(x, "self_attn.k_proj").view(len(x), self.kv_heads, self.dim)
        v = self.linear(x, "self_attn.v_proj").view(len(x), self.kv_heads, self.dim)
        return self.rotate(k, positions), v

    def attend(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """Rows x over keys k, v [keys, Hk, D] where visible [rows, keys] -> [rows, h]."""
        q = self.rotate(self.linear(x, "self_attn.q_proj").view(len(x), self.heads, self.dim), positions)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.dim**-0.5
        scores = scores.masked_fill(~visible[None], float("-inf")).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", scores, v).reshape(len(x), -1)
        return self.linear(out, "self_attn.o_proj")

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(
            F.silu(self.linear(x, "mlp.gate_proj")) * self.linear(x, "mlp.up_proj"), "mlp.down_proj"
        )


@dataclass
class TargetPass:
    """One full pass: logits [L, V], hidden [L, h] after the final norm, keys and values
    [layers, L, Hk, D], and what each layer was given [layers, L, h].
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    inputs: torch.Tensor


class RefTarget:
    """A Llama target read from `folder` and run in float32 without any cache."""

    def __init__(self, folder: Path):
        self.config = json.loads((Path(folder) / "config.json").read_text())
        tensors = read_tensors(folder)
        self.embed = tensors["model.embed_tokens.weight"]
        self.lm_head = tensors.get("lm_head.weight", self.embed)
        self.norm, self.eps = tensors["model.norm.weight"], self.config["rms_norm_eps"]
        self.layers = [
            _Layer(tensors, f"model.layers.{i}.", self.config)
            for i in range(self.config["num_hidden_layers"])
        ]
        eos = self.config.get("eos_token_id")
        self.eos = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self.vocab = self.config["vocab_size"]
        self._pass = lru_cache(maxsize=4096)(self._compute)
        self._long: list[tuple[int, ...]] = []

    def remember(self, tokens) -> None:
        """Answer for every prefix of `tokens` from one pass over all of it (a later token changes no earlier
        row).
        """
        self._long.append(tuple(tokens))

    def covering(self, tokens: tuple[int, ...]) -> tuple[int, ...] | None:
        return next((whole for whole in self._long if whole[: len(tokens)] == tokens), None)

    def run(self, tokens) -> TargetPass:
        """One pass over `tokens` (a sequence of ids)."""
        tokens, n = tuple(tokens), len(tokens)
        if (whole := self.covering(tokens)) is not None:
            made = self._pass(whole)
            return TargetPass(
                made.logits[:n], made.hidden[:n], made.k[:, :n], made.v[:, :n], made.inputs[:, :n]
            )
        return self._pass(tokens)

    @torch.inference_mode()
    def _compute(self, tokens: tuple[int, ...]) -> TargetPass:
        positions = torch.arange(len(tokens))
        visible = positions[:, None] >= positions[None]
        x, keys, values, inputs = self.embed[torch.tensor(tokens)], [], [], []
        for layer in self.layers:
            inputs.append(x)
            normed = _norm(x, layer.t["input_layernorm.weight"], self.eps)
            k, v = layer.kv(normed, positions)
            x = x + layer.attend(normed, positions, k, v, visible)
            x = x + layer.mlp(_norm(x, layer.t["post_attention_layernorm.weight"], self.eps))
            keys.append(k)
            values.append(v)
        hidden = _norm(x, self.norm, self.eps)
        stacked = (torch.stack(part) for part in (keys, values, inputs))
        return TargetPass(hidden @ self.lm_head.T, hidden, *stacked)


@dataclass
class Continuation:
    """Output ids, why they end ("length" or the matching id), the smallest top-two gap met on the way."""

    tokens: list[int] = field(default_factory=list)
    matched: int | None = None
    gap: float = float("inf")
    logprobs: list[float] = field(default_factory=list)


def adjust(logits: torch.Tensor, prompt: list[int], output: list[int], params: dict, forbidden: set[int]):
    """Penalties and bias of one request, spelled out token by token on one row of logits [V]."""
    logits = logits.clone()
    for token in range(len(logits)):
        count = output.count(token)
        logits[token] -= params.get("frequency_penalty", 0.0) * count
        logits[token] -= params.get("presence_penalty", 0.0) * (count > 0)
        logits[token] += params.get("logit_bias", {}).get(str(token), 0.0)
        if params.get("repetition_penalty", 1.0) != 1.0 and (count or token in prompt):
            factor = params["repetition_penalty"]
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    if len(output) < params.get("min_new_tokens", 0):
        for token in forbidden:
            logits[token] = float("-inf")
    return logits


def greedy(target: RefTarget, prompt: list[int], params: dict | None = None) -> Continuation:
    """R0: greedy decoding with one full pass per token, under the stop rules of `params`."""
    params = params or {}
    out = Continuation()
    forbidden = set(params.get("stop_token_ids") or ()) | target.eos
    stops = set() if params.get("ignore_eos") else forbidden  # upstream's meaning: no token ends the text
    plain = not (
        {"frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "min_new_tokens"}
        & params.keys()
    )
    while len(out.tokens) < params.get("max_new_tokens", 128):
        logits = target.run([*prompt, *out.tokens]).logits[-1]
        if not plain:
            logits = adjust(logits, prompt, out.tokens, params, forbidden)
        top = torch.topk(logits, 2).values
        out.gap = min(out.gap, float(top[0] - top[1]))
        token = int(torch.argmax(logits))
        out.logprobs.append(float(torch.log_softmax(logits, -1)[token]))
        out.tokens.append(token)
        if token in stops:
            out.matched = token
            break
    return out


class RefHead:
    """An EAGLE head (fc, one layer without input norm) with the target's embedding and head.

    `hot`, ascending: the only tokens that it proposes.
    """

    prefix = "layers.0."

    def __init__(
        self,
        config: dict,
        tensors: dict[str, torch.Tensor],
        target: RefTarget,
        hot: torch.Tensor | None = None,
    ):
        self.config, self.tensors, self.target = config, tensors, target
        self.hot = torch.arange(target.vocab) if hot is None else hot
        self.layer, self.eps = _Layer(tensors, self.prefix, config), config["rms_norm_eps"]
        self._forced = lru_cache(maxsize=4096)(self._teacher_forced)
        self._grown = lru_cache(maxsize=8192)(self._grow)

    @classmethod
    def read(cls, folder: Path, target: RefTarget, **more) -> RefHead:
        config = json.loads((Path(folder) / "config.json").read_text())
        return cls(config, read_tensors(folder), target, **more)

    def fed(self, tokens) -> torch.Tensor:
        """What the target gives the head at every token, [L, any]."""
        return self.target.run(tokens).hidden

    def fuse(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pairs (token, feature) -> what attention reads, and the residual [rows, h]."""
        pairs = torch.cat([self.target.embed[tokens], hidden], dim=-1)
        x = F.linear(pairs, self.tensors["fc.weight"], self.tensors.get("fc.bias"))
        return x, x

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """[rows, h] -> [rows, hot]"""
        return features @ self.target.lm_head[self.hot].T

    def propose(self, features: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities and tokens of the topk likeliest, [..., topk]."""
        prob, index = _top(torch.softmax(self.logits(features), -1), topk)
        return prob, self.hot[index]

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + attended
        return x + self.layer.mlp(_norm(x, self.layer.t["post_attention_layernorm.weight"], self.eps))

    def teacher_forced(self, tokens: list[int]):
        """One pass over the pairs (tokens[p+1], target hidden[p]), p = 0 … len-2.

        Returns:
            keys, values [L-1, Hk, D] and the head's features [L-1, h]; feature p speaks of token p+2.
        """
        tokens, n = tuple(tokens), len(tokens) - 1
        if (whole := self.target.covering(tokens)) is not None:
            return tuple(part[:n] for part in self._forced(whole))
        return self._forced(tokens)

    @torch.inference_mode()
    def _teacher_forced(self, tokens: tuple[int, ...]):
        hidden = self.fed(tokens)[:-1]
        positions = torch.arange(len(tokens) - 1)
        x, residual = self.fuse(torch.tensor(tokens[1:]), hidden)
        k, v = self.layer.kv(x, positions)
        visible = positions[:, None] >= positions[None]
        return k, v, self.finish(residual, self.layer.attend(x, positions, k, v, visible))

    def grow(self, tokens: list[int], steps: int, topk: int, draft_tokens: int, ancestors_only: bool = True):
        """The tree drafted after `tokens` (the last of them is the root): lists of node token and node
        parent.

        With `ancestors_only` a branch attends to its own ancestors; without, branch k reads whatever stands
        in column k, as upstream's layout did.
        """
        return self._grown(tuple(tokens), steps, topk, draft_tokens, ancestors_only)

    @torch.inference_mode()
    def _grow(self, tokens: tuple[int, ...], steps: int, topk: int, draft_tokens: int, ancestors_only: bool):
        k, v, feature = self.teacher_forced(tokens)
        start, feature = len(k), feature[-1]
        prob, index = self.propose(feature, topk)
        scores, beam_tokens, features = prob, index, feature.expand(topk, -1)
        flat_scores, flat_tokens = [prob], [index]
        parents_of = [-1] * topk  # flat index of each candidate's parent, -1 is the root
        beam_flat = list(range(topk))
        seen = [set() for _ in range(topk)]  # rows of the scratch visible to each beam
        for step in range(steps - 1):
            positions = torch.full((topk,), start + step)
            x, residual = self.fuse(beam_tokens, features)
            new_k, new_v = self.layer.kv(x, positions)
            k, v = torch.cat([k, new_k]), torch.cat([v, new_v])
            visible = torch.zeros(topk, len(k), dtype=torch.bool)
            visible[:, :start] = True
            for beam in range(topk):
                seen[beam] = seen[beam] | {start + step * topk + beam}
                mine = seen[beam] if ancestors_only else {start + s * topk + beam for s in range(step + 1)}
                visible[beam, sorted(mine)] = True
            features = self.finish(residual, self.layer.attend(x, positions, k, v, visible))
            prob, index = self.propose(features, topk)
            children = scores[:, None] * prob  # [topk, topk]
            base = topk + topk * topk * step
            flat_scores.append(children.flatten())
            flat_tokens.append(index.flatten())
            parents_of += [beam_flat[i // topk] for i in range(topk * topk)]
            scores, chosen = _top(children.flatten(), topk)
            beam_tokens, beam_flat = index.flatten()[chosen], [base + int(c) for c in chosen]
            features = features[chosen // topk]
            seen = [set(seen[int(c) // topk]) for c in chosen]
        _, best = _top(torch.cat(flat_scores), draft_tokens - 1)
        best = sorted(best.tolist())
        all_tokens = torch.cat(flat_tokens).tolist()
        rows = {flat: row + 1 for row, flat in enumerate(best)}
        rows[-1] = 0
        return [tokens[-1]] + [all_tokens[c] for c in best], [-1] + [rows[parents_of[c]] for c in best]


class Eagle3RefHead(RefHead):
    """An EAGLE-3 head: pairs that are normed, features of three layers through fc, an LM head of its own."""

    prefix = "midlayer."

    def __init__(self, config: dict, tensors: dict[str, torch.Tensor], target: RefTarget):
        offsets = tensors["d2t"].long()
        super().__init__(config, tensors, target, offsets + torch.arange(len(offsets)))

    def fed(self, tokens) -> torch.Tensor:
        inputs = self.target.run(tokens).inputs
        return torch.cat([inputs[2], inputs[len(inputs) // 2], inputs[-3]], dim=-1)

    def fuse(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if hidden.shape[-1] != self.target.embed.shape[1]:
            hidden = F.linear(hidden, self.tensors["fc.weight"], self.tensors.get("fc.bias"))
        embeds = _norm(self.target.embed[tokens], self.layer.t["input_layernorm.weight"], self.eps)
        return torch.cat([embeds, _norm(hidden, self.layer.t["hidden_norm.weight"], self.eps)], -1), hidden

    def normed(self, features: torch.Tensor) -> torch.Tensor:
        return _norm(features, self.tensors["norm.weight"], self.eps)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return self.normed(features) @ self.tensors["lm_head.weight"].T


@dataclass
class ModulesPass:
    """Of each module: keys and values of all rows [L − 1, Hk, D], what it gives there [L − 1, h], and the
    token that it proposes after the text.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    features: list[torch.Tensor]
    proposals: list[int]


class MultiLayerRefHead:
    """A head for each step. Module i has token p + 1 + i in row p, and what module i − 1 gave there. Behind
    the text it takes what the modules before it have proposed.
    """

    def __init__(self, heads: list[RefHead]):
        self.heads, self.target = heads, heads[0].target
        self._run = lru_cache(maxsize=8192)(self._all_modules)

    @classmethod
    def read(cls, folder: Path, target: RefTarget, modules: int) -> MultiLayerRefHead:
        config = json.loads((Path(folder) / "config.json").read_text())
        tensors = read_tensors(folder)
        return cls([RefHead(config, _under(tensors, f"mtp.{i}."), target) for i in range(modules)])

    def run(self, tokens: list[int]) -> ModulesPass:
        return self._run(tuple(tokens))

    @torch.inference_mode()
    def _all_modules(self, tokens: tuple[int, ...]) -> ModulesPass:
        rows, made = range(len(tokens) - 1), ModulesPass([], [], [], [])
        states = self.heads[0].fed(tokens)[:-1]
        positions = torch.arange(len(rows))
        visible = positions[:, None] >= positions[None]
        for i, head in enumerate(self.heads):
            text = [*tokens, *made.proposals]
            x, residual = head.fuse(torch.tensor([text[p + 1 + i] for p in rows]), states)
            k, v = head.layer.kv(x, positions)
            states = head.finish(residual, head.layer.attend(x, positions, k, v, visible))
            made.k.append(k)
            made.v.append(v)
            made.features.append(states)
            made.proposals.append(int(head.propose(states[-1], 1)[1]))
        return made

    def teacher_forced(self, tokens: list[int]):
        """Keys and values [modules, L − 1, Hk, D], and what the last module gives. Until the text goes on,
        the last i rows of module i are over proposals.
        """
        made = self.run(tokens)
        return torch.stack(made.k), torch.stack(made.v), made.features[-1]

    def grow(self, tokens: list[int], steps: int, topk: int, draft_tokens: int):
        """As RefHead.grow: a chain."""
        assert (steps, topk, draft_tokens) == (len(self.heads), 1, len(self.heads) + 1)
        return [tokens[-1], *self.run(tokens).proposals], list(range(-1, steps))


def _under(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(prefix): tensor for n, tensor in tensors.items() if n.startswith(prefix)}


class StandaloneRefDraft:
    """A whole model as the draft: nothing is cached, each node of a tree is a pass over all before it."""

    def __init__(self, draft: RefTarget, target: RefTarget):
        self.draft, self.target = draft, target
        self._grown = lru_cache(maxsize=8192)(self._grow)

    def teacher_forced(self, tokens: list[int]):
        """Keys and values [layers, L - 1, Hk, D] of all tokens but the last, and the states [L - 1, h]."""
        made = self.draft.run(tokens[:-1])
        return made.k, made.v, made.hidden

    def grow(self, tokens: list[int], steps: int, topk: int, draft_tokens: int):
        """As RefHead.grow."""
        return self._grown(tuple(tokens), steps, topk, draft_tokens)

    @torch.inference_mode()
    def _grow(self, tokens: tuple[int, ...], steps: int, topk: int, draft_tokens: int):
        found: list[tuple[float, int, int]] = []  # score, token and parent of every candidate
        beams = [(1.0, (), -1)]  # score, path, candidate
        for _ in range(steps):
            level = []
            for score, path, candidate in beams:
                probs = torch.softmax(self.draft.run((*tokens, *path)).logits[-1], -1)
                for prob, index in zip(*(t.tolist() for t in _top(probs, topk)), strict=True):
                    level.append((score * prob, (*path, index), len(found)))
                    found.append((score * prob, index, candidate))
            beams = sorted(level, key=lambda beam: -beam[0])[:topk]
        best = sorted(sorted(range(len(found)), key=lambda i: -found[i][0])[: draft_tokens - 1])
        rows = {candidate: row + 1 for row, candidate in enumerate(best)} | {-1: 0}
        return [tokens[-1]] + [found[i][1] for i in best], [-1] + [rows[found[i][2]] for i in best]


def _top(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of the last dimension, ties to the lowest index."""
    if values.dim() > 1:
        rows = [_top(row, k) for row in values]
        return torch.stack([v for v, _ in rows]), torch.stack([i for _, i in rows])
    candidates = torch.nonzero(values >= torch.topk(values, k).values[-1]).flatten()  # ascending
    order = torch.sort(values[candidates], descending=True, stable=True).indices[:k]
    return values[candidates[order]], candidates[order]


def walk(node_tokens: list[int], parents: list[int], truth: list[int], limit: int) -> int:
    """How many draft tokens of the tree agree with `truth` (the tokens after the root), at most `limit`."""
    node, depth = 0, 0
    while depth < limit and depth < len(truth):
        child = next((i for i, p in enumerate(parents) if p == node and node_tokens[i] == truth[depth]), None)
        if child is None:
            break
        node, depth = child, depth + 1
    return depth


def simulate(
    head: RefHead, prompt: list[int], output: list[int], steps: int, topk: int, draft_tokens: int, **grow
) -> list[int]:
    """Tokens committed by every round of the greedy loop whose result is `output` (the first one is the
    prefill's).
    """
    rounds, done = [], 1
    beyond = greedy(head.target, [*prompt, *output], {"max_new_tokens": 1, "ignore_eos": True}).tokens
    truth = output + beyond  # what the target says after the last token never matters: the run ends there
    while done < len(output):
        tokens, parents = head.grow([*prompt, *output[:done]], steps, topk, draft_tokens, **grow)
        committed = min(1 + walk(tokens, parents, truth[done:], steps), len(output) - done)
        rounds.append(committed)
        done += committed
    return rounds


def filtered_probs(logits: torch.Tensor, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """The law of one token: temperature, then top-k, top-p, min-p, renormalised; float64 [V]."""
    probs = torch.softmax(logits.double() / temperature, -1)
    order = torch.sort(probs, descending=True, stable=True).indices
    keep = torch.ones_like(probs, dtype=torch.bool)
    if 0 < top_k < len(probs):
        keep[order[top_k:]] = False
    probs = probs * keep / (probs * keep).sum()
    if top_p < 1:
        before = probs[order].cumsum(0) - probs[order]
        probs[order[before >= top_p]] = 0
        probs /= probs.sum()
    if min_p > 0:
        probs[probs < min_p * probs.max()] = 0
        probs /= probs.sum()
    return probs
