"""DP attention on two GPUs with tiny models: NCCL, and graphs that hold collectives."""

from __future__ import annotations

import os
import signal

import pytest

from stages.part4_worker import Engine
from tests.contract.harness import Zoo, tree_id

from .dp_helpers import (
    GREEDY,
    PROMPTS,
    TREES,
    TWO_RANKS,
    Kept,
    begin,
    check_idle,
    check_same,
    entered,
    flags,
    steps,
)

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow]
CUDA = {"device": "cuda", "attention_backend": "triton"}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module", params=[False, True], ids=["graphs", "eager"])
def disable_cuda_graph(request) -> bool:
    return request.param


@pytest.fixture(scope="module")
def one(zoo):
    kept = Kept(zoo, **CUDA)
    yield kept
    kept.close()


@pytest.fixture(scope="module")
def two(zoo, disable_cuda_graph):
    kept = Kept(zoo, **TWO_RANKS, **CUDA, disable_cuda_graph=disable_cuda_graph)
    yield kept
    kept.close()


@pytest.mark.parametrize("tree", TREES, ids=tree_id)
def test_answers_and_rounds_are_those_of_one_rank(zoo, one, two, tree):
    prompts = zoo.prompts(PROMPTS, 24)
    results = check_same(two(tree), one(tree), prompts, GREEDY)
    assert [r["output_ids"] for r in results] == [zoo.r0(p, max_new_tokens=24) for p in prompts]
    sampled = [{"temperature": 0.9, "sampling_seed": 5 + i, "max_new_tokens": 12} for i in range(5)]
    check_same(two(tree), one(tree), prompts, sampled)


@pytest.mark.parametrize("tree", TREES, ids=tree_id)
def test_a_rank_without_requests_takes_part_in_everything(zoo, two, tree):
    prompts, engine = zoo.prompts(PROMPTS[:2], 24), two(tree)
    for rank, prompt in ((0, prompts[0]), (1, prompts[0]), (1, prompts[1]), (0, prompts[1])):
        result = engine.generate(input_ids=prompt, sampling_params=GREEDY, routed_dp_rank=rank)
        assert result["output_ids"] == zoo.r0(prompt, max_new_tokens=24)
    check_idle(engine)


def test_more_requests_than_the_largest_graph(zoo, two, disable_cuda_graph):
    """Nine on one rank and one on the other: no graph for either, until few enough are left."""
    largest = {} if disable_cuda_graph else {"cuda_graph_max_bs": 4}
    prompts, engine = zoo.prompts(PROMPTS, 24) * 2, two(TREES[-1], max_running_requests=32, **largest)
    ranks = [0] * 9 + [1]
    streams = [begin(engine, p, rank) for p, rank in zip(prompts, ranks, strict=True)]
    for stream, prompt in zip(streams, prompts, strict=True):
        assert list(stream)[-1]["output_ids"] == zoo.r0(prompt, max_new_tokens=24)
    check_idle(engine)


@pytest.mark.parametrize("tree", TREES, ids=tree_id)
def test_prefill_beside_decode(zoo, two, tree):
    (long,), (short,), engine = zoo.prompts((33,), 24), zoo.prompts((9,), 24), two(tree)
    decoding = begin(engine, short, 0)
    next(decoding)
    prefilling = begin(engine, long, 1)
    next(prefilling)
    for stream, prompt in ((decoding, short), (prefilling, long)):
        assert list(stream)[-1]["output_ids"] == zoo.r0(prompt, max_new_tokens=24)
    check_idle(engine)


def test_hidden_rows_travel_in_the_models_own_type(zoo, two):
    engine = two(TREES[-1], dtype="bfloat16")
    before = entered(engine)
    results = engine.generate(input_ids=zoo.prompts(PROMPTS, 24), sampling_params=GREEDY)
    assert [len(r["output_ids"]) for r in results] == [24] * 5
    entries = sum(steps(engine, before), [])
    hidden = {dtype for name, _, dtype in entries}
    assert hidden == {"bfloat16"}
    check_idle(engine)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_does_not_answer_is_named(zoo, disable_cuda_graph, how):
    wanted = {
        signal.SIGKILL: r"^rank 1 was killed by SIGKILL",
        signal.SIGSTOP: r"dist_timeout=3 s: rank 1 hangs and reacts to no signal",
    }
    more = TWO_RANKS | CUDA | {"disable_cuda_graph": disable_cuda_graph}
    with Engine(**flags(zoo, TREES[-1], **more)) as engine:
        ranks = [rank.process.pid for rank in engine.scheduler.ranks]
        streams = [begin(engine, [5, 6, 7], rank, max_new_tokens=200) for rank in (0, 1)]
        for stream in streams:
            next(stream)
        engine.scheduler.dist_timeout = 3  # only now: until here kernels were compiled
        os.kill(ranks[1], how)
        with pytest.raises(RuntimeError, match=wanted[how]):
            list(streams[0])
        for pid in ranks:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
