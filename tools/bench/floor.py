"""The machine's own limits, without any engine: what no implementation on it can be faster than.

A forward must read its weights, so weights over copy bandwidth is the floor of a step. The other numbers say
what the pieces of a step cost where nothing else is in the way: the layers' matmuls in one CUDA graph, the
LM head, a tiny kernel, launching a graph, reading a few numbers back. On a CPU there are no graphs and the
same work runs eagerly.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open

from ..models.cache import find_model

ROWS = (1, 8, 16, 32, 64, 128, 256)
SAMPLES = 5
SECONDS = 0.02  # of work per sample, about
TINY_KERNELS = 200


def weight_bytes(target: Path, head: Path | None, item_size: int) -> dict[str, int]:
    """Bytes of weights that one forward of each model reads: {"target", "draft", "lm_head"}.

    An embedding is read a row at a time and counts only where it is the LM head too. The draft's forward
    reads the target's LM head.
    """
    sizes = _tensor_sizes(target)
    table = sizes.pop("model.embed_tokens.weight")
    lm_head = sizes.pop("lm_head.weight", table)
    found = {"target": sum(sizes.values()) + lm_head, "lm_head": lm_head}
    if head is not None:
        own = {name: size for name, size in _tensor_sizes(head).items() if "embed_tokens" not in name}
        found["draft"] = sum(own.values()) + (lm_head if "lm_head.weight" not in own else 0)
    return {name: count * item_size for name, count in found.items()}


def _tensor_sizes(folder: Path) -> dict[str, int]:
    """Elements of every tensor in a model's folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                shape = file.get_slice(name).get_shape()
                found[name] = math.prod(shape)
    return found


def measure_floor(
    model: str, head: str | None, device: str, dtype: str, advance: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """All limits, seconds unless a name says otherwise; lists hold every sample.

    Args: model and head are folders or names in the cache; dtype is the engine's.
    """
    target = find_model(model)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    kind = engine_dtype(config, device, dtype)
    bench = Bench(device)
    found: dict[str, Any] = {
        "weight_bytes": weight_bytes(target, find_model(head) if head else None, kind.itemsize)
    }
    with torch.inference_mode():
        advance("copy bandwidth")
        found["copy_bytes_per_second"] = bench.copy_bandwidth()
        weights = layer_weights(config, kind, device)
        rows_of = {rows: torch.randn(rows, config["hidden_size"], dtype=kind, device=device) for rows in ROWS}
        advance("layer matmuls")
        found["layer_matmuls"] = {
            rows: bench.seconds(lambda x=x: _chain(weights, x)) for rows, x in rows_of.items()
        }
        advance("LM head")
        head_weight = torch.randn(config["vocab_size"], config["hidden_size"], dtype=kind, device=device)
        found["lm_head"] = {
            rows: bench.seconds(lambda x=x: F.linear(x, head_weight)) for rows, x in rows_of.items()
        }
        advance("launching")
        tiny = torch.zeros(64, device=device)

        def many() -> None:
            for _ in range(TINY_KERNELS):
                tiny.add_(1)

        found["tiny_kernel"] = [sample / TINY_KERNELS for sample in bench.seconds(many)]
        if bench.is_cuda:
            found["graph_launch_host"] = bench.launch_seconds(many)
            found["read_8_integers"] = bench.read_seconds()
    return found


def engine_dtype(config: dict[str, Any], device: str, dtype: str) -> torch.dtype:
    """What an engine makes of `dtype`: "auto" is float32 on a CPU, the checkpoint's own elsewhere."""
    if dtype == "auto":
        own = config.get("torch_dtype") or config.get("dtype") or "float32"
        dtype = "float32" if device == "cpu" else own.removeprefix("torch.")
    return getattr(torch, dtype)


def layer_weights(config: dict[str, Any], dtype: torch.dtype, device: str) -> list[list[torch.Tensor]]:
    """Random weights of the four matmuls of each layer, all different, so that no cache serves them twice."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads", heads)
    shapes = (
        ((heads + 2 * kv_heads) * head_dim, hidden),
        (hidden, heads * head_dim),
        (2 * mlp, hidden),
        (hidden, mlp),
    )

    def make(shape: tuple[int, int]) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device) * shape[1] ** -0.5

    return [[make(shape) for shape in shapes] for _ in range(config["num_hidden_layers"])]


def _chain(layers: list[list[torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    """Each matmul on the result of the one before: qkv, output, gate and up, down; a part of it goes on."""
    for qkv, output, gate_up, down in layers:
        x = F.linear(F.linear(x, qkv)[:, : output.shape[1]], output)
        x = F.linear(F.linear(x, gate_up)[:, : down.shape[1]], down)
    return x


class Bench:
    """Times functions on one device; on a GPU each is captured in a graph that is replayed."""

    def __init__(self, device: str):
        self.device, self.is_cuda = device, torch.device(device).type == "cuda"

    def seconds(self, work: Callable[[], Any]) -> list[float]:
        """Seconds of one call, as samples that are means over many calls one after another."""
        run = self._graph(work).replay if self.is_cuda else work
        first = self._stretch(run, 1)
        count = max(1, int(SECONDS / max(min(first, self._stretch(run, 1)), 1e-7)))
        return [self._stretch(run, count) / count for _ in range(SAMPLES)]

    def copy_bandwidth(self) -> list[float]:
        """Bytes read and written in a second of copying a large buffer on the device."""
        size = 2**30 if self.is_cuda else 2**27
        source, target = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        return [2 * size / seconds for seconds in self.seconds(lambda: target.copy_(source))]

    def launch_seconds(self, work: Callable[[], Any]) -> list[float]:
        """CPU seconds of launching a graph of `work` on an idle device."""
        graph, found = self._graph(work), []
        for _ in range(4 * SAMPLES):
            torch.cuda.synchronize()
            start = time.perf_counter()
            graph.replay()
            found.append(time.perf_counter() - start)
        return found

    def read_seconds(self) -> list[float]:
        """Seconds of reading eight integers back from an idle device."""
        numbers, found = torch.arange(8, device=self.device), []
        for _ in range(4 * SAMPLES):
            torch.cuda.synchronize()
            start = time.perf_counter()
            numbers.cpu()
            found.append(time.perf_counter() - start)
        return found

    def _graph(self, work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # libraries set themselves up before a capture
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph

    def _stretch(self, run: Callable[[], Any], count: int) -> float:
        if not self.is_cuda:
            start = time.perf_counter()
            for _ in range(count):
                run()
            return time.perf_counter() - start
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()  # what is timed is launched while this one runs
        start_event.record()
        for _ in range(count):
            run()
        end_event.record()
        end_event.synchronize()
        return start_event.elapsed_time(end_event) / 1e3
