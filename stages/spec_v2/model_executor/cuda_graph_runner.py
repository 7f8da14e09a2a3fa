"""Records a function over tensors at fixed addresses, and replays it.

Restates sglang/srt/model_executor/cuda_graph_runner.py. A step launches hundreds of small kernels, and
launching them one by one takes longer than running them. A CUDA graph is launched as one. It holds for one
batch size, so there is one for each of some sizes; a batch is padded to the next, and its padding rows hold
what changes nothing (request row 0, length 0, slot 0).

Without a GPU nothing is recorded: a replay calls the function and writes what it returns over what the first
call returned. So static inputs, padding, stale rows and the choice between graph and eager are tested
anywhere. There a size is prepared when it is first needed, since that costs a step.
"""

from __future__ import annotations

import bisect
import dataclasses
import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tqdm import tqdm

from ..layers.dp_attention import GlobalStep, get_dp_group
from ..server_args import ServerArgs

if TYPE_CHECKING:
    from .model_runner import ModelRunner

_ALONE = GlobalStep()
_DEFAULT_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def batch_sizes_to_capture(server_args: ServerArgs) -> list[int]:
    """Ascending; empty where CUDA graphs are off. A batch over the largest runs eagerly."""
    if not server_args.cuda_graph:
        return []
    running, asked = server_args.max_running_requests, server_args.cuda_graph_max_bs
    if server_args.cuda_graph_bs is not None:
        return [size for size in server_args.cuda_graph_bs if size <= min(running, asked or running)]
    most = min(running, asked or _DEFAULT_SIZES[-1])
    return sorted({size for size in _DEFAULT_SIZES if size < most} | {most})


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph | None  # None on a CPU
    function: Callable[[], Any]
    result: Any
    forwards: list[int]  # of each model runner in one replay
    collectives: Sequence[tuple] = ()  # in one replay


class CudaGraphRunner:
    """The graphs of one engine: every graph of every worker shares one memory pool."""

    def __init__(self, server_args: ServerArgs, model_runners: list[ModelRunner]):
        self.model_runners = model_runners
        self.dp_group = get_dp_group()
        self.sizes = batch_sizes_to_capture(server_args)
        self._on_gpu = server_args.device == "cuda"
        self._graphs: dict[Hashable, _Recorded] = {}
        self._shared: dict[Hashable, torch.Tensor] = {}
        self._captures: list[Callable[[int], None]] = []
        self._captured: set[int] = set()
        self.is_capturing = False
        if self._on_gpu:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def register(self, capture_size: Callable[[int], None]) -> None:
        """`capture_size(size)` calls `capture` for whatever a worker runs at that size."""
        self._captures.append(capture_size)

    def capture_all(self) -> None:
        """The largest size first: the smaller ones fit into its memory."""
        if self._on_gpu:
            is_silent = True if self.dp_group and self.dp_group.rank > 0 else None  # None: unless a terminal
            for size in tqdm(self.sizes[::-1], desc="capturing CUDA graphs", disable=is_silent):
                self._capture_size(size)

    def padded_size(self, bs: int, step: GlobalStep = _ALONE) -> int | None:
        """The size that a batch of `bs` requests is padded to; None: run it eagerly.

        Under DP attention that is for all ranks the same, since graphs hold collectives. It follows from the
        largest batch of any rank, and from nothing that only one of them knows.
        """
        if step.extends:
            return None
        index = bisect.bisect_left(self.sizes, max(bs, step.max_decode_bs))
        if index == len(self.sizes):
            return None
        self._capture_size(self.sizes[index])
        return self.sizes[index]

    def _capture_size(self, size: int) -> None:
        if size not in self._captured:
            for capture_size in self._captures:
                capture_size(size)
            self._captured.add(size)  # last: what broke off is not taken for done

    @torch.inference_mode()
    def capture(self, key: Hashable, function: Callable[[], Any]) -> Any:
        """Record `function` and return what it returned; replays write to the same tensors."""
        self.is_capturing = True
        before = [runner.forward_ct for runner in self.model_runners]
        entered = self.dp_group.count if self.dp_group else 0
        graph = None
        try:
            result = function()  # compiles kernels and makes what lives longer than a call
            forwards = [runner.forward_ct - n for runner, n in zip(self.model_runners, before, strict=True)]
            collectives = self.dp_group.since(entered) if self.dp_group else ()
            if self._on_gpu:
                graph, result = self._record(function)
        finally:
            for runner, n in zip(self.model_runners, before, strict=True):
                runner.forward_ct = n
            self.is_capturing = False
        self._graphs[key] = _Recorded(graph, function, result, forwards, collectives)
        return result

    def shared(self, name: str, size: int, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a graph's large result in memory that the graphs of all sizes share.

        `tensor` has some rows for each of `size` requests. Whoever reads the copy does so before the next
        replay; a result that is not shared lives as long as its graph does, in every size anew.
        """
        rows = len(tensor) // size
        if name not in self._shared or len(self._shared[name]) < len(tensor):  # rounds differ in their rows
            self._shared[name] = tensor.new_empty(self.sizes[-1] * rows, *tensor.shape[1:])
        return self._shared[name][: len(tensor)].copy_(tensor)

    def _record(self, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """A graph that is garbage must not be destroyed while another is recorded: nothing is collected then.

        torch.cuda.graph() collects beforehand instead, for every graph, which takes longer than recording it.
        """
        torch.cuda.synchronize()
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    result = function()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph, result

    def replay(self, key: Hashable) -> Any:
        recorded = self._graphs[key]
        if recorded.graph is None:
            self.write(key, recorded.function())
        else:
            if recorded.collectives:
                self.dp_group.record(recorded.collectives)
            recorded.graph.replay()
            for runner, n in zip(self.model_runners, recorded.forwards, strict=True):
                runner.forward_ct += n
        return recorded.result

    def result(self, key: Hashable) -> Any:
        """What the graph writes to."""
        return self._graphs[key].result

    def write(self, key: Hashable, value: Any) -> Any:
        """Put `value` where the graph would have written its result, and return that."""
        for old, new in zip(_tensors(self.result(key)), _tensors(value), strict=True):
            old.copy_(new)
        return self.result(key)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a structure of dataclasses, tuples and lists, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
