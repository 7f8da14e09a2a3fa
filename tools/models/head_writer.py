"""Writes much text fast: a fixed number of slots, one token each per step, every step one CUDA graph.

It exists for training text only, where nothing streams and order does not matter: no scheduler, no prefill (a
prompt is fed like an answer, its tokens forced), no pools. A slot that ends is refilled every few steps; the
keys of the prefix that all prompts share are already there. The engine's Python cannot keep thousands of
requests busy; this can.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .head_data import Generate
from .head_model import FrozenTarget, HeadConfig, rotary_table, rotate

CHECK_EVERY = 16  # steps between two looks at which slots have ended


def decode_attention_native(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> Tensor:
    """The twin of `head_writer_triton.decode_attention`."""
    slots, heads, dim = q.shape
    group = heads // k_cache.shape[2]
    keys = k_cache.repeat_interleave(group, dim=2).transpose(1, 2)  # [slots, H, length, D]
    values = v_cache.repeat_interleave(group, dim=2).transpose(1, 2)
    seen = torch.arange(k_cache.shape[1], device=q.device)[None] < lengths[:, None]
    return F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=seen[:, None, None])[:, :, 0]


class SlotWriter:
    """A `Generate` function over a target. Memory: slots × length × (bytes of a token's keys and values)."""

    def __init__(self, target: FrozenTarget, end: int, slots: int, length: int, seed: int = 0):
        self.target, self.end, self.slots, self.length = target, end, slots, length
        self.device = target.device
        config = HeadConfig.from_dict(target.config | {"num_hidden_layers": 1})
        self.config = config
        self.layers = target.model.model.layers
        self.table = rotary_table(config, length, self.device).to(target.dtype)  # [2, length, D]
        kv = (len(self.layers), 2, slots, length, config.num_key_value_heads, config.head_dim)
        self.cache = torch.zeros(kv, dtype=target.dtype, device=self.device)
        whole = {"dtype": torch.int64, "device": self.device}
        self.tokens = torch.zeros(slots, length, **whole)
        self.position, self.prompt, self.limit = (torch.zeros(slots, **whole) for _ in range(3))
        self.limit += 1
        self.ignore = torch.zeros(slots, dtype=torch.bool, device=self.device)
        self.active = torch.zeros(slots, dtype=torch.bool, device=self.device)
        self.inverse = torch.ones(slots, dtype=torch.float32, device=self.device)  # 1 / temperature
        self.noise = torch.zeros(slots, dtype=torch.float32, device=self.device)  # 0 where greedy, else 1
        self.rows = torch.arange(slots, device=self.device)
        self.attention = decode_attention_native
        torch.manual_seed(seed)
        self.run: Callable[[], None] = self._step
        if self.device.type == "cuda":
            from .head_writer_triton import decode_attention

            self.attention = decode_attention
            self.run = self._capture()

    def _capture(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay

    @torch.no_grad()
    def _step(self) -> None:
        """One more token in every active slot: the prompt's next, or a sampled one."""
        c, at = self.config, self.position
        x = self.target.embedding[self.tokens[self.rows, at]]  # [slots, h]
        table = self.table[:, at, None]  # [2, slots, 1, D]
        lengths = at + 1
        for layer, (k_cache, v_cache) in zip(self.layers, self.cache, strict=True):
            norm = layer.input_layernorm
            y = F.rms_norm(x, (x.shape[-1],), norm.weight, c.rms_norm_eps)
            attention = layer.self_attn
            q = rotate(attention.q_proj(y).view(self.slots, -1, c.head_dim), table)
            k_cache[self.rows, at] = rotate(attention.k_proj(y).view(self.slots, -1, c.head_dim), table)
            v_cache[self.rows, at] = attention.v_proj(y).view(self.slots, -1, c.head_dim)
            x = x + attention.o_proj(self.attention(q, k_cache, v_cache, lengths).flatten(1))
            y = F.rms_norm(x, (x.shape[-1],), layer.post_attention_layernorm.weight, c.rms_norm_eps)
            x = x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
        x = F.rms_norm(x, (x.shape[-1],), self.target.model.model.norm.weight, c.rms_norm_eps)
        logits = F.linear(x, self.target.lm_head).float() * self.inverse[:, None]
        # The best of logits plus Gumbel noise is a draw from their softmax.
        gumbel = torch.empty_like(logits).exponential_().clamp_min_(1e-30).log_().neg_()
        chosen = logits.addcmul_(gumbel, self.noise[:, None]).argmax(dim=-1)
        after = (at + 1).clamp(max=self.length - 1)
        forced = after < self.prompt
        self.tokens[self.rows, after] = torch.where(
            forced | ~self.active, self.tokens[self.rows, after], chosen
        )
        stopped = (chosen == self.end) & ~self.ignore
        ended = ~forced & (stopped | (after + 1 >= self.limit))
        self.position.copy_(torch.where(self.active, after, at))
        self.active &= ~ended

    def _fill(self, free: list[int], requests: list[tuple[list[int], dict[str, Any]]], shared: int) -> None:
        """Put requests into slots; `shared` leading positions already hold the right keys and values."""
        width = max(len(prompt) for prompt, _ in requests)
        tokens = np.zeros((len(free), width), dtype=np.int64)
        numbers = np.zeros((4, len(free)), dtype=np.int64)
        heat = np.ones((2, len(free)), dtype=np.float32)
        for i, (prompt, parameters) in enumerate(requests):
            if len(prompt) >= self.length:
                raise ValueError(f"A prompt of {len(prompt)} tokens does not fit a slot of {self.length}.")
            tokens[i, : len(prompt)] = prompt
            room = min(self.length, len(prompt) + parameters["max_new_tokens"])
            numbers[:, i] = (
                min(shared, len(prompt) - 1),
                len(prompt),
                room,
                parameters.get("ignore_eos", False),
            )
            temperature = parameters["temperature"]
            heat[:, i] = (1 / temperature, 1.0) if temperature else (1.0, 0.0)
        where = torch.tensor(free, device=self.device)
        self.tokens[where, :width] = torch.from_numpy(tokens).to(self.device)
        numbers, heat = torch.from_numpy(numbers).to(self.device), torch.from_numpy(heat).to(self.device)
        self.position[where], self.prompt[where], self.limit[where] = numbers[0], numbers[1], numbers[2]
        self.ignore[where], self.inverse[where], self.noise[where] = numbers[3].bool(), heat[0], heat[1]
        self.active[where] = True

    def __call__(
        self, prompts: list[list[int]], parameters: list[dict[str, Any]], on_finished: Callable[[int], None]
    ) -> list[list[int]]:
        """See `head_data.Generate`. `sampling_seed` is not honoured: the slots share one stream of
        numbers."""
        answers: list[list[int]] = [[] for _ in prompts]
        shared = 0
        while all(len(p) > shared + 1 and p[shared] == prompts[0][shared] for p in prompts):
            shared += 1
        owner: list[int | None] = [None] * self.slots
        following, finished, first = 0, 0, True
        while finished < len(prompts):
            free = [slot for slot, request in enumerate(owner) if request is None][: len(prompts) - following]
            if free:
                taken = range(following, following + len(free))
                self._fill(free, [(prompts[i], parameters[i]) for i in taken], 0 if first else shared)
                for slot, i in zip(free, taken, strict=True):
                    owner[slot] = i
                following, first = following + len(free), False
            for _ in range(CHECK_EVERY):
                self.run()
            active = self.active.cpu().numpy()
            ended = [slot for slot, request in enumerate(owner) if request is not None and not active[slot]]
            if not ended:
                continue
            where = torch.tensor(ended, device=self.device)
            stops = self.position[where].cpu().numpy()
            tokens = self.tokens[where, : int(stops.max()) + 1].cpu().numpy()
            for slot, stop, row in zip(ended, stops, tokens, strict=True):
                answers[owner[slot]] = row[len(prompts[owner[slot]]) : stop + 1].tolist()
                owner[slot] = None
            finished += len(ended)
            on_finished(len(ended))
        return answers


def engine_writer(engine, end: int) -> Generate:
    """A `Generate` function over an engine (`stages.part4_worker.Engine` or SGLang's, same call)."""

    def generate(prompts, parameters, on_finished):
        results = engine.generate(input_ids=prompts, sampling_params=parameters)
        answers = [list(result["output_ids"]) for result in results]
        for answer, result in zip(answers, results, strict=True):
            stopped = result["meta_info"]["finish_reason"]["type"] == "stop"
            if stopped and (not answer or answer[-1] != end):
                answer.append(end)
        on_finished(len(answers))
        return answers

    return generate
