"""Data-parallel attention: every rank attends for its own requests, all ranks together run each MLP.

Restates sglang/srt/layers/dp_attention.py. A rank holds its requests and their KV, and 1/N of the rows of
every MLP. Around an MLP the ranks' hidden rows are gathered, and each rank gets back the sum for its own: two
collectives a layer, which all ranks have to enter in the same order with the same shapes, a rank without
requests too. How many rows that is, they tell one another on the host before each step (see GlobalStep).
"""

from __future__ import annotations

import collections
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

# Newer names of the same two functions; the old ones warn from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_LOG_LENGTH = 4096


class DPGroup:
    """The ranks of one engine, as one of them sees them.

    Args:
        rank, size: which of how many.
        device_group: carries hidden rows (NCCL, or gloo on a CPU).
        cpu_group: carries what the ranks tell one another on the host (gloo).
    """

    def __init__(self, rank: int, size: int, device_group=None, cpu_group=None):
        self.rank, self.size = rank, size
        self.device_group, self.cpu_group = device_group, cpu_group
        # The last collectives entered: name, shape, dtype. Where two ranks' differ, one is about to hang.
        self.log: collections.deque[tuple] = collections.deque(maxlen=_LOG_LENGTH)
        self.count = 0

    def gather(self, x: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        """All ranks' rows, in their order: x [≤ rows, hidden], padded with zeros → [size · rows, hidden].

        Without `rows` every rank has as many as this one, as in a graph.
        """
        rows = len(x) if rows is None else rows
        if len(x) > rows:  # it would hang, or mix up rows
            raise RuntimeError(f"rank {self.rank} has {len(x)} rows where it announced at most {rows}")
        if len(x) < rows:
            x = F.pad(x, (0, 0, 0, rows - len(x)))
        gathered = x.new_empty(self.size * rows, x.shape[1])
        self._run("all_gather", _all_gather, gathered, x.contiguous(), self.device_group)
        return gathered

    def scatter(self, partial: torch.Tensor, count: int) -> torch.Tensor:
        """The sum of all ranks' `partial` [size · rows, hidden]: this rank's own first `count` rows of it."""
        mine = partial.new_empty(len(partial) // self.size, partial.shape[1])
        self._run("reduce_scatter", _reduce_scatter, mine, partial, self.device_group)
        return mine[:count]

    def exchange(self, *numbers: int) -> np.ndarray:
        """Tell the other ranks a few numbers and hear theirs, int64 [size, len(numbers)]; waits for all."""
        heard = torch.empty(self.size, len(numbers), dtype=torch.int64)
        mine = torch.tensor([numbers], dtype=torch.int64)
        self._run("exchange", _all_gather, heard, mine, self.cpu_group)
        return heard.numpy()

    def record(self, entries: Sequence[tuple]) -> None:
        """Write down collectives about to be entered: one, or those that a graph holds."""
        self.count += len(entries)
        self.log.extend(entries)

    def since(self, count: int) -> list[tuple]:
        """What was entered after the first `count` collectives."""
        log = list(self.log)
        return log[len(log) - (self.count - count) :]

    def _run(self, name: str, collective: Callable, out: torch.Tensor, own: torch.Tensor, group) -> None:
        self.record([(name, tuple(own.shape), str(own.dtype).removeprefix("torch."))])
        collective(out, own, group=group)


_group: DPGroup | None = None


def get_dp_group() -> DPGroup | None:
    """The ranks this process is one of, or None: then every model is whole and nothing is gathered."""
    return _group


def initialize_dp_attention(
    rank: int, size: int, device: torch.device, init_file: str, timeout: float
) -> DPGroup:
    """Make this process rank `rank` of `size`; returns once all have met at `init_file`, a path of their own.

    `timeout` [s] is the last resort: whoever started the ranks watches them and should lose patience before.
    """
    global _group
    limit = datetime.timedelta(seconds=timeout)
    store = dist.FileStore(init_file, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    cpu_group = device_group = dist.group.WORLD
    if device.type == "cuda":
        torch.cuda.set_device(rank)
        device_group = dist.new_group(backend="nccl", timeout=limit)
    _group = DPGroup(rank, size, device_group, cpu_group)
    # Connections are made by the first collective: here, and not while a graph is captured.
    _group.scatter(_group.gather(torch.zeros(1, 1, device=device), 1), 1)
    return _group


def local_device(name: str) -> torch.device:
    """This process's device of that kind: of several GPUs, its rank's own."""
    return torch.device(name, _group.rank) if _group is not None and name == "cuda" else torch.device(name)


def shard_size(size: int) -> int:
    """How many of `size` rows of an MLP one rank holds.

    Raises:
        ValueError: the ranks do not divide `size`.
    """
    ranks = _group.size if _group is not None else 1
    check_shards(size, ranks)
    return size // ranks


def check_shards(intermediate_size: int, ranks: int) -> None:
    """Raise ValueError, with the way out, if the MLPs cannot be shared out evenly."""
    if intermediate_size % ranks:
        raise ValueError(
            f"dp_size={ranks} does not divide the MLP's {intermediate_size} rows (intermediate_size), of "
            "which every rank holds an equal part: choose a dp_size that does"
        )


@dataclass(frozen=True)
class GlobalStep:
    """What one step is for all ranks together, and so the same on each of them.

    Rows are what every rank brings to a gather: as many as the rank with the most has, so that shapes are
    equal. They count tokens, not requests: a prefill's tokens, or one token of each request.

    Rows are None in a graph, where all ranks have the same padded rows, and without DP attention.
    """

    target_rows: int | None = None
    extends: bool = False  # some rank prefills: nobody replays a graph
    max_decode_bs: int = 0  # the most requests that one rank decodes: the size of all ranks' graphs

    @classmethod
    def agree(cls, group: DPGroup, *, extend_tokens: int, decode_bs: int) -> GlobalStep | None:
        """Exchange what each rank has to run; None if none has anything.

        Args:
            extend_tokens: rows of this rank's prefill, 0 if it does not prefill.
            decode_bs: requests that this rank decodes, 0 if it prefills.
        """
        heard = group.exchange(extend_tokens, decode_bs)
        tokens, bs = int(heard[:, 0].max()), int(heard[:, 1].max())
        if not tokens and not bs:
            return None
        return cls(
            target_rows=max(tokens, bs),
            extends=tokens > 0,
            max_decode_bs=bs,
        )
