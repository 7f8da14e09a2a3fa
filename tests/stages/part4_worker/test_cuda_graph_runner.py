"""The runner by itself, over a counting function: which size, what a replay writes, what a capture leaves."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from stages.part4_worker.layers.dp_attention import GlobalStep
from stages.part4_worker.model_executor.cuda_graph_runner import (
    CudaGraphRunner,
    _Recorded,
    batch_sizes_to_capture,
)


@pytest.fixture(autouse=True)
def inside_a_step():
    with torch.inference_mode():
        yield


def args(**given):
    base = {"cuda_graph": True, "max_running_requests": 16, "cuda_graph_bs": None, "cuda_graph_max_bs": None}
    return SimpleNamespace(**{**base, "device": "cpu", **given})


def runner(*sizes, runners=()):
    return CudaGraphRunner(args(cuda_graph_bs=sizes), list(runners))


# ---- sizes ----


@pytest.mark.parametrize(
    "given, sizes",
    [
        ({}, [1, 2, 3, 4, 6, 8, 12, 16]),
        ({"max_running_requests": 5}, [1, 2, 3, 4, 5]),
        ({"max_running_requests": 1}, [1]),
        ({"cuda_graph_max_bs": 5}, [1, 2, 3, 4, 5]),
        ({"cuda_graph_max_bs": 99}, [1, 2, 3, 4, 6, 8, 12, 16]),
        ({"cuda_graph_bs": (1, 4, 16)}, [1, 4, 16]),
        ({"cuda_graph_bs": (1, 4, 17)}, [1, 4]),
        ({"cuda_graph_bs": (1, 4, 16), "cuda_graph_max_bs": 8}, [1, 4]),
        ({"cuda_graph_bs": (32,)}, []),
        ({"cuda_graph": False}, []),
        ({"cuda_graph": False, "cuda_graph_bs": (1,)}, []),
    ],
)
def test_sizes_that_are_prepared(given, sizes):
    assert batch_sizes_to_capture(args(**given)) == sizes


def test_by_default_every_batch_up_to_128_has_a_size_and_none_above():
    sizes = batch_sizes_to_capture(args(max_running_requests=1000))
    assert sizes[0] == 1 and sizes[-1] == 128 and sizes == sorted(set(sizes))
    assert all(b <= 1.5 * a for a, b in zip(sizes[1:], sizes[2:], strict=False)), "padding costs at most half"
    assert batch_sizes_to_capture(args(max_running_requests=1000, cuda_graph_max_bs=200))[-1] == 200


def test_the_smallest_size_that_holds_the_batch_is_chosen():
    graphs = runner(1, 2, 4, 8)
    for bs in range(9):
        assert graphs.padded_size(bs, GlobalStep()) == min(size for size in (1, 2, 4, 8) if size >= bs)
    assert graphs.padded_size(9, GlobalStep()) is None
    assert runner().padded_size(1, GlobalStep()) is None


def test_ranks_choose_by_the_largest_batch_among_them():
    graphs = runner(1, 2, 4)
    sizes = [graphs.padded_size(bs, GlobalStep(max_decode_bs=3)) for bs in (0, 1, 3)]
    assert sizes == [4, 4, 4]
    assert graphs.padded_size(1, GlobalStep(max_decode_bs=5)) is None
    assert graphs.padded_size(1, GlobalStep(max_decode_bs=1, extends=True)) is None


def test_a_size_is_prepared_once_by_every_worker_when_it_is_first_needed():
    graphs, prepared = runner(1, 4), []
    for worker in "ab":
        graphs.register(lambda size, worker=worker: prepared.append((worker, size)))
    graphs.capture_all()
    assert prepared == []  # a CPU has no time to lose
    for bs in (3, 4, 1, 2, 9):
        graphs.padded_size(bs, GlobalStep())
    assert prepared == [("a", 4), ("b", 4), ("a", 1), ("b", 1)]


# ---- capture and replay ----


@dataclass
class Result:
    tensor: torch.Tensor
    nothing: None
    pair: tuple
    inner: Result | None = None
    number: int = 3


def test_a_replay_writes_what_the_function_returns_over_its_first_result():
    graphs, source = runner(1), torch.zeros(2)

    def function():
        return Result(source + 1, None, (source + 2, [source + 3]), Result(source + 4, None, ()))

    first = graphs.capture("key", function)
    places = [first.tensor, first.pair[0], first.pair[1][0], first.inner.tensor]
    source += 10
    assert [t[0] for t in places] == [1, 2, 3, 4]
    assert graphs.replay("key") is first and graphs.result("key") is first
    assert [t[0] for t in places] == [11, 12, 13, 14]
    assert first.pair[1][0] is places[2] and first.inner.tensor is places[3]


def test_a_capture_is_told_from_a_step():
    graphs = runner(1)
    assert graphs.capture("key", lambda: graphs.is_capturing) is True and not graphs.is_capturing


def test_a_capture_that_breaks_off_leaves_nothing_behind():
    model = SimpleNamespace(forward_ct=5)
    graphs, fails = runner(1, runners=[model]), [True]

    def function():
        model.forward_ct += 1
        if fails:
            raise OSError("broke off")
        return torch.ones(1)

    graphs.register(lambda size: graphs.capture(("key", size), function))
    with pytest.raises(OSError):
        graphs.padded_size(1)
    assert not graphs.is_capturing and model.forward_ct == 5
    fails.clear()
    assert graphs.padded_size(1) == 1  # tried again, and not taken for done
    assert graphs.replay(("key", 1)) == 1


def test_a_function_that_returns_another_shape_is_noticed():
    graphs, shapes = runner(1), iter([2, 3])
    graphs.capture("key", lambda: torch.ones(next(shapes)))
    with pytest.raises(RuntimeError):
        graphs.replay("key")


def test_a_function_that_returns_more_is_noticed():
    graphs, counts = runner(1), iter([1, 2])
    graphs.capture("key", lambda: [torch.ones(1)] * next(counts))
    with pytest.raises(ValueError):
        graphs.replay("key")


def test_forwards_are_counted_by_replays_and_not_by_captures():
    models = [SimpleNamespace(forward_ct=5), SimpleNamespace(forward_ct=7)]
    graphs = runner(1, runners=models)

    def function():
        models[0].forward_ct += 1
        models[1].forward_ct += 3
        return torch.zeros(1)

    graphs.capture("key", function)
    assert [m.forward_ct for m in models] == [5, 7]
    graphs.replay("key")
    assert [m.forward_ct for m in models] == [6, 10]


def test_forwards_inside_a_recorded_graph_are_counted():
    """On a GPU no Python runs in a replay."""
    models = [SimpleNamespace(forward_ct=5), SimpleNamespace(forward_ct=7)]
    graphs, replays = runner(1, runners=models), []
    graph = SimpleNamespace(replay=lambda: replays.append(None))
    graphs._graphs["key"] = _Recorded(graph, None, "result", [1, 3], [])
    assert graphs.replay("key") == "result" and len(replays) == 1
    assert [m.forward_ct for m in models] == [6, 10]


@pytest.mark.parametrize("sizes", [(4, 2, 1), (1, 2, 4)])
def test_shared_results_of_all_sizes_lie_in_one_place(sizes):
    graphs = runner(1, 2, 4)
    results = {}
    for size in sizes:
        source = torch.full((3 * size, 5), float(size))
        results[size] = graphs.shared("x", size, source)
        assert torch.equal(results[size], source)
    assert len({t.untyped_storage().data_ptr() for t in results.values()}) == 1
    assert results[1].untyped_storage().nbytes() == 3 * 4 * 5 * 4
    assert graphs.shared("y", 1, torch.zeros(2)).untyped_storage().nbytes() == 2 * 4 * 4
