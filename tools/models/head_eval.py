"""How many tokens a round of speculation would give: the loop played on answers that are already written.

Greedy verification compares tokens, and a greedy answer is known, so the target runs once over each whole
answer and every round after that is drafting alone. The rounds follow upstream's EAGLE worker (v0.4.6,
`eagle_worker.py`, `eagle_utils.py`): committed positions hold keys made from the target's hidden states,
drafting starts at S, a beam attends to the prefix and its own ancestors, the best n-1 of all scored
candidates are verified. Written apart from the engines, to check them: all in float32.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..bench.configurations import Shape
from .head_data import Text, without_loop
from .head_model import FrozenTarget, Head, rotary_table

CHAINS: tuple[Shape, ...] = tuple((steps, 1, steps + 1) for steps in range(1, 6))
TREES: tuple[Shape, ...] = ((3, 4, 8), (5, 4, 8), (5, 8, 32))


@dataclass
class Rounds:
    """What a shape would do: rounds and the tokens made in them, by sequence; rounds by accepted count."""

    shape: Shape
    rounds: np.ndarray
    tokens: np.ndarray
    histogram: np.ndarray

    @property
    def tokens_per_round(self) -> float:
        """Tokens of all rounds over the number of rounds (the first answer token is the prefill's)."""
        return float(self.tokens.sum() / max(1, self.rounds.sum()))

    def acceptance(self) -> list[float]:
        """For each depth: of the rounds that accepted all before it, the part that accepted it too."""
        reached = self.histogram[::-1].cumsum()[::-1]
        return [float(reached[d + 1] / reached[d]) if reached[d] else 0.0 for d in range(len(reached) - 1)]

    def summary(self) -> dict[str, Any]:
        """For a JSON file."""
        return {
            "steps": self.shape[0],
            "topk": self.shape[1],
            "draft_tokens": self.shape[2],
            "tokens_per_round": round(self.tokens_per_round, 4),
            "acceptance": [round(rate, 4) for rate in self.acceptance()],
            "rounds": int(self.rounds.sum()),
            "tokens": int(self.tokens.sum()),
        }


class Simulation:
    """A batch of answers ready for rounds: tokens, the target's states, the head's first pass over them."""

    def __init__(self, head: Head, target: FrozenTarget, rows: list[np.ndarray], prompt_lengths: np.ndarray):
        self.head, self.target = head, target
        device = target.device
        self.w = head.weights(torch.float32)
        lengths = np.array([len(row) for row in rows])
        width = int(lengths.max())
        padded = np.full((len(rows), width + 16), -1, dtype=np.int64)
        for i, row in enumerate(rows):
            padded[i, : len(row)] = row
        self.truth = torch.from_numpy(padded).to(device)  # [B, width + 16]; nothing matches -1
        self.lengths = torch.from_numpy(lengths).to(device)
        self.prompts = torch.from_numpy(np.asarray(prompt_lengths, dtype=np.int64)).to(device)
        tokens = self.truth[:, :width].clamp(min=0)
        self.table = rotary_table(head.config, width + 16, device)
        states = target.states(tokens, layers := head.fed_layers(target)).float()
        hidden = states[..., : -target.lm_head.shape[1]] if layers else states  # [B, T, h], or 3 h
        embeds = F.embedding(F.pad(tokens[:, 1:], (0, 1)), target.embedding).float()
        x = head.fuse(self.w, embeds, hidden)
        q, self.keys, self.values = head.qkv(self.w, x, self.table[:, :width])
        attended = F.scaled_dot_product_attention(
            q.flatten(1, 2), self.keys, self.values, is_causal=True, enable_gqa=True
        )
        self.first = head.finish(self.w, x, attended.view_as(q))  # [B, T, h]

    def _propose(self, hidden: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """Probabilities and tokens of the topk best, `[..., topk]`; a tie goes to the lower token."""
        lm_head = self.head.lm_head(self.w, self.target).float()
        probs = F.linear(self.head.head_input(self.w, hidden), lm_head).softmax(dim=-1)
        if topk == 1:
            best = probs.argmax(dim=-1, keepdim=True)
            probs = probs.gather(-1, best)
        else:
            probs, best = probs.topk(topk, dim=-1)
        return probs, best if self.head.hot_token_id is None else self.head.hot_token_id[best]

    def _forward(
        self, rows: Tensor, start: Tensor, depth: int, tokens: Tensor, hidden: Tensor, path: list
    ) -> tuple:
        """Run the head on a level of beams; returns its output `[A, K, h]` and that level in the path.

        Beams sit at position start + depth. path holds, for each earlier level, keys and values `[A, Hk, K,
        D]` of the ancestors of these beams.
        """
        c = self.head.config
        x = self.head.fuse(self.w, F.embedding(tokens, self.target.embedding).float(), hidden)
        table = self.table[:, start + depth][:, :, None, None]  # [2, A, 1, 1, D]: the same for all beams
        q, k, v = self.head.qkv(self.w, x, table)
        path = [*path, (k, v)]
        scores = q.flatten(2, 3) @ self.keys[rows].mT  # [A, Hk, G·K, T]
        scores = scores.view(*q.shape[:4], -1)
        hides = torch.arange(scores.shape[-1], device=rows.device)[None] >= start[:, None]
        scores = scores.masked_fill(hides[:, None, None, None], float("-inf"))
        own = torch.stack([(q * key[:, :, None]).sum(-1) for key, _ in path], dim=-1)  # [A, Hk, G, K, levels]
        probs = (torch.cat([scores, own], dim=-1) * c.head_dim**-0.5).softmax(dim=-1)
        prefix, own = probs.split([scores.shape[-1], len(path)], dim=-1)
        attended = (prefix.flatten(2, 3) @ self.values[rows]).view_as(q)
        for level, (_, value) in enumerate(path):
            attended = attended + own[..., level, None] * value[:, :, None]
        return self.head.finish(self.w, x, attended), path

    def round(self, rows: Tensor, start: Tensor, shape: Shape) -> Tensor:
        """Accepted draft tokens of a round, int64 `[A]`, for sequences `rows` with S = `start`."""
        steps, topk, draft_tokens = shape
        at = torch.arange(len(rows), device=rows.device)
        root = self.first[rows, start - 1]  # [A, h]
        scores, tokens = self._propose(root, topk)  # [A, K]
        right = tokens == self.truth[rows, start + 1][:, None]
        all_scores, all_right = [scores], [right]
        hidden, path = root[:, None].expand(-1, topk, -1), []
        for depth in range(steps - 1):
            out, path = self._forward(rows, start, depth, tokens, hidden, path)
            probs, children = self._propose(out, topk)  # [A, K, K]
            scores = (scores[..., None] * probs).flatten(1)  # [A, K²]
            next_token = self.truth[rows, start + 2 + depth][:, None, None]
            right = (right[..., None] & (children == next_token)).flatten(1)
            all_scores.append(scores)
            all_right.append(right)
            scores, kept = scores.sort(dim=-1, descending=True, stable=True)
            scores, kept = scores[:, :topk], kept[:, :topk]
            tokens, right = children.flatten(1).gather(1, kept), right.gather(1, kept)
            parents = kept // topk  # [A, K]
            hidden = out[at[:, None], parents]
            index = parents[:, None, :, None].expand(-1, self.keys.shape[1], -1, self.keys.shape[3])
            path = [(k.gather(2, index), v.gather(2, index)) for k, v in path]
        scores, right = torch.cat(all_scores, dim=1), torch.cat(all_right, dim=1)
        chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, : draft_tokens - 1]
        # Candidates that are right from the root on form one path, and a chosen one's ancestors are chosen.
        return right.gather(1, chosen).sum(dim=1)

    @torch.no_grad()
    def play(self, shape: Shape) -> Rounds:
        """Rounds from the first answer token to the last, all sequences side by side."""
        count = len(self.lengths)
        position = self.prompts.clone()  # S: the token at S is the round's root
        rounds = torch.zeros(count, dtype=torch.int64, device=position.device)
        histogram = torch.zeros(shape[0] + 1, dtype=torch.int64, device=position.device)
        while len(rows := torch.nonzero(position < self.lengths - 1).flatten()):
            accepted = self.round(rows, position[rows], shape)
            histogram += torch.bincount(accepted, minlength=len(histogram))
            rounds[rows] += 1
            position[rows] = torch.minimum(position[rows] + accepted + 1, self.lengths[rows] - 1)
        tokens = self.lengths - 1 - self.prompts
        return Rounds(shape, rounds.cpu().numpy(), tokens.cpu().numpy(), histogram.cpu().numpy())


def rows_of(
    text: Text, max_tokens: int | None, limit: int | None, cut_loops: bool = False
) -> tuple[list[np.ndarray], np.ndarray]:
    """The first `limit` conversations of a text, answers cut to `max_tokens`, and their prompts' lengths.

    `cut_loops` first cuts answers that end by repeating themselves, as training text is cut.
    """
    rows, prompts = [], []
    for number in range(len(text) if limit is None else min(limit, len(text))):
        row, prompt = text.row(number), int(text.prompt_lengths[number])
        answer = without_loop(row[prompt:].tolist()) if cut_loops else row[prompt:]
        rows.append(row[: prompt + min(len(answer), max_tokens or len(answer))])
        prompts.append(prompt)
    return rows, np.array(prompts)


def simulate(
    head: Head,
    target: FrozenTarget,
    rows: list[np.ndarray],
    prompt_lengths: np.ndarray,
    shapes: Iterable[Shape] = CHAINS + TREES,
    batch_tokens: int = 262144,
    on_played: Callable[[int], None] = lambda tokens: None,
) -> list[Rounds]:
    """Play each shape on all rows (prompt and greedy answer, at least two answer tokens each).

    Rows are taken in batches of at most `batch_tokens` with padding; `on_played` hears the tokens of each
    that one shape is through with. The target must be in float32.
    """
    order = np.argsort([-len(row) for row in rows], kind="stable")
    order = order[[len(rows[i]) - prompt_lengths[i] >= 2 for i in order]] if len(order) else order
    results: dict[Shape, list[Rounds]] = {shape: [] for shape in shapes}
    while len(order):
        take = max(1, batch_tokens // len(rows[order[0]]))
        batch, order = order[:take], order[take:]
        with torch.no_grad():
            simulation = Simulation(head, target, [rows[i] for i in batch], prompt_lengths[batch])
        for shape, parts in results.items():
            parts.append(simulation.play(shape))
            on_played(sum(len(rows[i]) for i in batch))
    return [
        Rounds(
            shape,
            np.concatenate([p.rounds for p in parts]),
            np.concatenate([p.tokens for p in parts]),
            np.sum([p.histogram for p in parts], axis=0),
        )
        for shape, parts in results.items()
        if parts
    ]
