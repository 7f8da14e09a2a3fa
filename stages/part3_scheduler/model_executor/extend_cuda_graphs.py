"""Short prompts in CUDA graphs: one graph for each of some numbers of rows and requests.

Launched kernel by kernel, short prompts keep the host busy for longer than the GPU. A batch is padded to the
next shape: rows behind the last write to the padding slot, and requests behind the last have no rows. Long
prompts run eagerly; there the GPU has enough to do. Upstream records decode steps only at v0.4.6.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..layers.logits_processor import LogitsProcessorOutput
from ..speculative.eagle_info import EagleDraftInput
from .cuda_graph_runner import CudaGraphRunner
from .forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

if TYPE_CHECKING:
    from .model_runner import ModelRunner

# (rows, requests, rows of one request), ascending. Attention has a program for each tile that a request might
# have, so many requests are short ones. Without a GPU nothing is saved by filling up a large batch.
_SHAPES = tuple((rows, 8, rows) for rows in (16, 32, 48, 64, 96, 128, 192, 256))
_GPU_SHAPES = (*_SHAPES, (512, 8, 512), (512, 128, 256), (1024, 8, 1024),
               *((rows, 128, 256) for rows in (1024, 2048, 4096, 8192)))  # fmt: skip

_PER_ROW = ("input_ids", "positions", "out_cache_loc")
_PER_REQUEST = ("req_pool_indices", "prefix_lens", "seq_lens", "last_rows")


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
        device = model_runner.device
        self.shapes = _GPU_SHAPES if device.type == "cuda" else _SHAPES
        most_rows, most_requests, _ = self.shapes[-1]
        widths = [most_rows] * len(_PER_ROW) + [most_requests] * len(_PER_REQUEST)
        self.packed = torch.zeros(sum(widths), dtype=torch.int64, device=device)
        self.static = dict(zip(_PER_ROW + _PER_REQUEST, self.packed.split(widths), strict=True))
        self.q_start_loc = torch.zeros(most_requests + 1, dtype=torch.int64, device=device)
        self.hidden_states = None
        if takes_hidden_states:
            hidden = model_runner.model_config.hidden_size
            self.hidden_states = torch.zeros(most_rows, hidden, dtype=model_runner.dtype, device=device)
        self._captured: set[tuple[int, int, int]] = set()
        if device.type == "cuda":
            for shape in self.shapes[::-1]:
                self._capture(shape)

    def run(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput | None:
        """The forward of a prefill, with results of its own; None if it has to run eagerly."""
        rows, bs = len(forward_batch.input_ids), len(forward_batch.req_pool_indices)
        needs = (rows, bs, forward_batch.max_q_len)
        shape = next((shape for shape in self.shapes if all(map(operator.le, needs, shape))), None)
        asks_more = (
            forward_batch.topk != self.topk
            or forward_batch.capture_hidden_mode != self.capture_hidden_mode
            or forward_batch.input_logprobs is not None
        )
        if shape is None or asks_more:
            return None
        if shape not in self._captured:
            self._capture(shape)
        self.packed.zero_()
        for name, tensor in self.static.items():
            source = getattr(forward_batch, name)
            tensor[: len(source)].copy_(source)
        self.q_start_loc.fill_(rows)
        self.q_start_loc[: bs + 1].copy_(forward_batch.q_start_loc)
        if self.hidden_states is not None:
            self.hidden_states[:rows].copy_(forward_batch.spec_info.hidden_states)
        output = self.graphs.replay((self.name, shape))
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

    def _capture(self, shape: tuple[int, int, int]) -> None:
        self.packed.zero_()  # a larger prompt's last rows would point behind this shape's
        self.q_start_loc.zero_()
        rows, requests, longest = shape
        fields = {name: self.static[name][:rows] for name in _PER_ROW}
        fields |= {name: self.static[name][:requests] for name in _PER_REQUEST}
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            q_start_loc=self.q_start_loc[: requests + 1],
            max_q_len=longest,
            attn_backend=self.model_runner.attn_backend,
            capture_hidden_mode=self.capture_hidden_mode,
            topk=self.topk,
            spec_info=None if self.hidden_states is None else EagleDraftInput(self.hidden_states[:rows]),
            **fields,
        )
        self.graphs.capture((self.name, shape), partial(self.model_runner.forward_eagerly, forward_batch))
        self._captured.add(shape)
