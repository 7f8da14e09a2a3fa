"""What the trainer feeds on: batches of similar length, the loss mask, and the target's hidden states.

The mask is one position earlier than one might think: at the last prompt position the head already sees the
first answer token, and what it predicts there is the second.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .head_data import Text
from .head_model import FrozenTarget

WIDTH = 64  # batches are padded to a multiple of this many tokens


def loss_mask(prompt_lengths: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    """Loss weight of the first pass at each index, float32 `[sequences, width]`.

    1 from the last prompt position on, as long as the label, the token 2 further on, exists; 0 elsewhere.
    """
    index = np.arange(width)[None]
    return ((index >= prompt_lengths[:, None] - 1) & (index + 2 < lengths[:, None])).astype(np.float32)


def epoch_batches(
    lengths: np.ndarray, tokens_per_batch: int, seed: int, epoch: int
) -> list[tuple[int, np.ndarray]]:
    """One epoch: `(width, sequence numbers)` in random order, each at most `tokens_per_batch` with padding.

    What does not fill a batch moves to the next width, so only the widest can hold a small batch. The same
    arguments give the same epoch, which is what makes a resumed run go on as if nothing had happened.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    widths = -(-lengths[order] // WIDTH) * WIDTH
    batches, left = [], order[:0]
    for width in np.unique(widths):
        rows = max(1, tokens_per_batch // int(width))
        waiting = np.concatenate([left, order[widths == width]])
        full = len(waiting) // rows * rows
        batches += [(int(width), part) for part in waiting[:full].reshape(-1, rows)]
        left = waiting[full:]
    if len(left):
        batches.append((int(widths.max()), left))
    return [batches[i] for i in random.permutation(len(batches))]


@dataclass
class Batch:
    """One training step's input, on the device.

    tokens `[B, T]`; fed `[B, T, any]`, what the head reads of the target; hidden `[B, T, h]`, what enters the
    target's LM head; targets int64 `[n]`, numbers `b·T + j` of the positions
    whose distribution is to be learned; depth int64 `[n]`, 1 for the position of the first answer token, and
    so on: pass k has something to say where depth >= k.
    """

    tokens: Tensor
    fed: Tensor
    hidden: Tensor
    targets: Tensor
    depth: Tensor


def free_memory(device: torch.device) -> int:
    """Free bytes of a GPU; elsewhere all of the machine's memory, its free part being no portable number."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Feed:
    """Turns sequence numbers into batches; keeps the target's hidden states if they fit `cache_bytes`.

    `layers` are those whose inputs the head is fed; none: what enters the LM head is all there is.
    Rows run past the end of their sequence into the next one: nothing that is used looks to the right.
    """

    def __init__(self, text: Text, target: FrozenTarget, cache_bytes: int, layers: tuple[int, ...] = ()):
        self.text, self.target, self.layers = text, target, layers
        self.device = target.device
        self.tokens = torch.from_numpy(text.tokens.astype(np.int32)).to(self.device)
        self.hidden_size = target.lm_head.shape[1]
        columns = self.hidden_size * (len(layers) + 1)
        size = len(text.tokens) * columns * target.lm_head.element_size()
        self.cache = (
            torch.empty(len(text.tokens), columns, dtype=target.dtype, device=self.device)
            if size <= cache_bytes
            else None
        )
        self.known = np.zeros(len(text), dtype=bool)

    def batch(self, width: int, sequences: np.ndarray) -> Batch:
        """The batch of these sequences, padded to `width`."""
        starts = self.text.starts[sequences]
        lengths, prompts = self.text.lengths[sequences], self.text.prompt_lengths[sequences]
        row, index = np.nonzero(loss_mask(prompts, lengths, width))
        host = torch.from_numpy(np.concatenate([starts, row * width + index + 1, index + 2 - prompts[row]]))
        if self.device.type == "cuda":
            host = host.pin_memory()
        packed = host.to(self.device, non_blocking=True)
        rows, n = len(sequences), len(row)
        where = packed[:rows, None] + torch.arange(width, device=self.device)  # [B, T]
        where = where.clamp_(max=len(self.tokens) - 1)
        tokens = self.tokens[where].long()
        states = self._states(tokens, where, sequences)
        hidden = states[..., -self.hidden_size :]
        fed = states[..., : -self.hidden_size] if self.layers else hidden
        return Batch(tokens, fed, hidden, packed[rows : rows + n], packed[rows + n :])

    def _states(self, tokens: Tensor, where: Tensor, sequences: np.ndarray) -> Tensor:
        if self.cache is None:
            return self.target.states(tokens, self.layers)
        if not self.known[sequences].all():
            states = self.target.states(tokens, self.layers)
            width = tokens.shape[1]
            own = np.arange(width)[None] < self.text.lengths[sequences][:, None]
            own = torch.from_numpy(own).to(self.device)
            self.cache[where[own]] = states[own]
            self.known[sequences] = True
            return states
        return self.cache[where]


def endless(lengths: np.ndarray, tokens_per_batch: int, seed: int, epoch: int, done: int) -> Iterator:
    """`(epoch, number in the epoch, width, sequences)` from a place onwards, for ever."""
    while True:
        for number, (width, sequences) in enumerate(epoch_batches(lengths, tokens_per_batch, seed, epoch)):
            if number >= done:
                yield epoch, number, width, sequences
        epoch, done = epoch + 1, 0
