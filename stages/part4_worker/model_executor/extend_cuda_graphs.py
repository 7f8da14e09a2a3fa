"""Short prompts in CUDA graphs: one graph for each of some numbers of rows.

Launched kernel by kernel, reading a prompt of fifty tokens takes as long as decoding twenty. A batch of a few
requests is padded to the next number of rows: rows behind the last write to the padding slot, and requests
behind the last have no rows. Longer prompts and larger batches run eagerly; there the GPU has enough to do.
Upstream records decode steps only at v0.4.6.
"""

from __future__ import annotations

import bisect
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..layers.logits_processor import LogitsProcessorOutput
from .cuda_graph_runner import CudaGraphRunner
from .forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

if TYPE_CHECKING:
    from .model_runner import ModelRunner

_ROWS = (16, 32, 48, 64, 96, 128, 192, 256)
_REQUESTS = 8

_PER_ROW = ("input_ids", "positions", "out_cache_loc")
_PER_REQUEST = ("req_pool_indices", "prefix_lens", "seq_lens", "last_rows")


class HiddenStates(NamedTuple):
    """What a draft model takes of its `spec_info`."""

    hidden_states: torch.Tensor  # [rows, hidden]
    hidden_rows: torch.Tensor | None = None  # which of them goes with each row; None: its own


class ExtendCudaGraphs:
    """Prefills of one model.

    Args:
        model_runner: whose model runs.
        graphs: where the graphs are kept.
        capture_hidden_mode: what callers ask for; a batch that asks for something else runs eagerly.
        topk: likewise.
        takes_hidden_states: whether the model is a draft, fed with the target's hidden states.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        graphs: CudaGraphRunner,
        capture_hidden_mode: CaptureHiddenMode,
        topk: int,
        takes_hidden_states: bool = False,
    ):
        self.model_runner, self.graphs, self.topk = model_runner, graphs, topk
        self.capture_hidden_mode = capture_hidden_mode
        self.name = "draft_prefill" if takes_hidden_states else "prefill"
        widths = [_ROWS[-1]] * len(_PER_ROW) + [_REQUESTS] * len(_PER_REQUEST)
        device = model_runner.device
        self.packed = torch.zeros(sum(widths), dtype=torch.int64, device=device)
        self.static = dict(zip(_PER_ROW + _PER_REQUEST, self.packed.split(widths), strict=True))
        self.q_start_loc = torch.zeros(_REQUESTS + 1, dtype=torch.int64, device=device)
        self.hidden_states = None
        if takes_hidden_states:
            hidden = model_runner.model_config.hidden_size
            self.hidden_states = torch.zeros(_ROWS[-1], hidden, dtype=model_runner.dtype, device=device)
        self._captured: set[int] = set()
        if device.type == "cuda":
            for size in _ROWS[::-1]:
                self._capture(size)

    def run(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput | None:
        """The forward of a prefill, with results of its own; None if it has to run eagerly."""
        rows, bs = len(forward_batch.input_ids), len(forward_batch.req_pool_indices)
        index = bisect.bisect_left(_ROWS, rows)
        asks_more = (
            forward_batch.topk != self.topk
            or forward_batch.capture_hidden_mode != self.capture_hidden_mode
            or forward_batch.input_logprobs is not None
        )
        if index == len(_ROWS) or bs > _REQUESTS or asks_more:
            return None
        size = _ROWS[index]
        if size not in self._captured:
            self._capture(size)
        self.packed.zero_()
        for name, tensor in self.static.items():
            source = getattr(forward_batch, name)
            tensor[: len(source)].copy_(source)
        self.q_start_loc.fill_(rows)
        self.q_start_loc[: bs + 1].copy_(forward_batch.q_start_loc)
        if self.hidden_states is not None:
            self.hidden_states[:rows].copy_(forward_batch.spec_info.hidden_states)
        output = self.graphs.replay((self.name, size))
        is_full = self.capture_hidden_mode == CaptureHiddenMode.FULL
        # The next prefill may be replayed before these are used, so they leave the graph's memory.
        return LogitsProcessorOutput(
            next_token_logits=None,
            topk_p=output.topk_p[:bs].clone(),
            topk_index=output.topk_index[:bs].clone(),
            hidden_states=None
            if output.hidden_states is None
            else output.hidden_states[: rows if is_full else bs].clone(),
        )

    def _capture(self, size: int) -> None:
        self._captured.add(size)
        self.packed.zero_()  # a larger prompt's last rows would point behind this size
        self.q_start_loc.zero_()
        fields = {name: self.static[name][:size] for name in _PER_ROW}
        fields |= {name: self.static[name] for name in _PER_REQUEST}
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            q_start_loc=self.q_start_loc,
            max_q_len=size,
            attn_backend=self.model_runner.attn_backend,
            capture_hidden_mode=self.capture_hidden_mode,
            topk=self.topk,
            spec_info=None if self.hidden_states is None else HiddenStates(self.hidden_states[:size]),
            **fields,
        )
        self.graphs.capture((self.name, size), partial(self.model_runner.forward_eagerly, forward_batch))
