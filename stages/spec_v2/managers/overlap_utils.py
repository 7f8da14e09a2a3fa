"""What one step leaves on the device for the next. Restates sglang/srt/managers/overlap_utils.py.

The scheduler prepares a step before it knows what the step before has accepted. So lengths, last tokens and
what a method drafts from stay on the device, in a row for each row of the request table (#25862), and
requests may come, go and change places in the batch without any of it being touched. Row 0 is that of padding
rows: its length stays 0.

A step publishes lengths as soon as its verification is through (#25879), so that whoever needs them on the
host waits for no draft extend. All the rest it stashes at its end. Jobs of one stream read what earlier ones
have written; nothing else guards the rows, and nothing else may touch them. All of it may be recorded in a
CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..layers.dp_attention import GlobalStep
from ..mem_cache.memory_pool import ReqToTokenPool
from .forward_stream import ForwardStream

_ALONE = GlobalStep()

OnPublish = Callable[[], None]


class FutureMap:
    """
    Args:
        size: rows of the request table, the padding row left out.
        device: where forwards run.
        forward_stream: and on which stream.
        needs_cpu_seq_lens: an attention backend plans with lengths on the host.
    """

    def __init__(
        self, size: int, device: torch.device, forward_stream: ForwardStream, needs_cpu_seq_lens: bool
    ):
        self.forward_stream = forward_stream
        self.rows, self.device = size + 1, device
        # KV entries once the last step has written its own: S of the next.
        self.new_seq_lens_buf = torch.zeros(self.rows, dtype=torch.int64, device=device)
        self.output_tokens_buf = torch.zeros(self.rows, dtype=torch.int64, device=device)
        self.draft_state: dict[str, torch.Tensor] = {}
        self.publish_ready = forward_stream.event()
        self.publish_ready.record()
        self._seq_lens_host = None
        if needs_cpu_seq_lens:
            self._seq_lens_host = torch.zeros(self.rows, dtype=torch.int64, pin_memory=device.type == "cuda")

    def add_draft_state(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """One more buffer, `shape` for each row, for what a method drafts from. Zeros are a valid token."""
        self.draft_state[name] = torch.zeros(self.rows, *shape, dtype=dtype, device=self.device)

    # ---- in a job ----

    def publish(self, req_pool_indices: torch.Tensor, new_seq_lens: torch.Tensor) -> None:
        """Tell the lengths [bs] of the requests in rows `req_pool_indices` [bs]; row 0 keeps its 0."""
        self.new_seq_lens_buf[req_pool_indices] = new_seq_lens
        self.new_seq_lens_buf[:1].zero_()

    def stash(
        self, req_pool_indices: torch.Tensor, output_tokens: torch.Tensor, **draft_state: torch.Tensor
    ) -> None:
        """Keep the last token [bs] of each request and what its next round drafts from."""
        self.output_tokens_buf[req_pool_indices] = output_tokens
        for name, tensor in draft_state.items():
            self.draft_state[name][req_pool_indices] = tensor

    # ---- beside a job ----

    def next_publish(self) -> OnPublish:
        """What the step that is launched next calls once, when it has published or replayed what does."""
        if self._seq_lens_host is None:
            return _nobody_waits
        self.publish_ready = event = self.forward_stream.event()

        def on_publish() -> None:
            self._seq_lens_host.copy_(self.new_seq_lens_buf, non_blocking=True)
            event.record()

        return on_publish

    def resolve_seq_lens_cpu(self, req_pool_indices: np.ndarray) -> np.ndarray | None:
        """The lengths on the host, [bs]; None where no backend needs them.

        The one wait of a launch: for the end of the last step's verification.
        """
        if self._seq_lens_host is None:
            return None
        self.publish_ready.synchronize()
        return self._seq_lens_host.numpy()[req_pool_indices]


def _nobody_waits() -> None:
    pass


@dataclass
class DecodeStep:
    """The requests of a decode step on the device, with what the step before has left of them."""

    req_pool_indices: torch.Tensor  # [bs]
    seq_lens: torch.Tensor  # [bs] S
    output_positions: torch.Tensor  # [bs] output tokens so far
    output_tokens: torch.Tensor  # [bs] the last of them, which has no KV yet
    seq_lens_cpu: np.ndarray | None = None  # [bs] S on the host, where a backend needs it; None in a graph
    global_step: GlobalStep = _ALONE  # what the ranks of DP attention agreed on; nothing in a graph

    @staticmethod
    def input_shapes(bs: int, new_slots: int) -> list[tuple[int, ...]]:
        """Of ModelWorkerBatch.decode_inputs: what `resolve` takes from the host."""
        each = (bs,)
        return [each, each, each, (bs, new_slots), each]

    @classmethod
    def resolve(
        cls,
        future_map: FutureMap,
        req_to_token_pool: ReqToTokenPool,
        req_pool_indices: torch.Tensor,
        prompt_lens: torch.Tensor,
        start: torch.Tensor,
        slots: torch.Tensor,
        lens: torch.Tensor,
        seq_lens_cpu: np.ndarray | None = None,
        global_step: GlobalStep = _ALONE,
    ) -> DecodeStep:
        """Begin a step: enter its new slots into the table, and read what the step before has left.

        The requests stand in rows `req_pool_indices` [bs], and their prompts have `prompt_lens` [bs] tokens.
        The first lens[i] of `slots` [bs, width] are those of positions start[i] on; padding rows have none.
        """
        req_to_token_pool.assign(req_pool_indices, start, slots, lens)
        seq_lens = future_map.new_seq_lens_buf[req_pool_indices]
        tokens = future_map.output_tokens_buf[req_pool_indices]
        positions = seq_lens - prompt_lens + 1
        return cls(req_pool_indices, seq_lens, positions, tokens, seq_lens_cpu, global_step)

    def moved(self, entries: int) -> DecodeStep:
        """The same requests with S that much larger, as a model has it that is ahead of the target.

        Or smaller, but not below 0, as it is for one that runs over some of its past again.
        """
        if not entries:
            return self
        seq_lens, seq_lens_cpu = self.seq_lens + entries, self.planned(entries)
        if entries < 0:
            seq_lens = seq_lens.clamp(min=0)
            seq_lens_cpu = None if seq_lens_cpu is None else seq_lens_cpu.clip(0)
        return replace(self, seq_lens=seq_lens, seq_lens_cpu=seq_lens_cpu)

    def planned(self, entries: int) -> np.ndarray | None:
        """ForwardBatch.seq_lens_cpu where every request gets `entries` more than S."""
        return None if self.seq_lens_cpu is None else self.seq_lens_cpu + entries

    def request_of_rows(self, width: int) -> torch.Tensor:
        """The request that each row belongs to, [bs · width]."""
        bs, device = len(self.seq_lens), self.seq_lens.device
        return torch.arange(bs, device=device).repeat_interleave(width, output_size=bs * width)

    def rows(self, bs: int) -> DecodeStep:
        """Views of the first `bs` requests."""
        fields = {name: t[:bs] for name, t in vars(self).items() if isinstance(t, (torch.Tensor, np.ndarray))}
        return replace(self, **fields)
