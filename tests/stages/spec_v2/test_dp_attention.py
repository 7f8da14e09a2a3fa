"""Two gloo ranks whose schedulers are a step ahead of their collectives."""

from __future__ import annotations

import os
import signal

import pytest

from stages.spec_v2 import Engine
from tests.contract.harness import Zoo
from tests.stages.part4_worker.dp_helpers import (
    GREEDY,
    LAYERS,
    PROMPTS,
    RUNS,
    TWO_RANKS,
    Kept,
    begin,
    run_id,
    told,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one(zoo: Zoo):
    kept = Kept(zoo, Engine)
    yield kept
    kept.close()


@pytest.fixture(scope="module")
def two(zoo: Zoo):
    kept = Kept(zoo, Engine, **TWO_RANKS)
    yield kept
    kept.close()


def check_ranks(engine) -> None:
    """Nothing is left behind, and all ranks entered the same collectives in the same order."""
    for state in engine.get_server_info()["internal_states"]:
        assert state["available_size"] + state["evictable_size"] == state["max_total_num_tokens"]
        assert state["protected_size"] == state["num_running_reqs"] == state["num_waiting_reqs"] == 0
    first, second = engine.scheduler._call("collectives")
    assert first == second and {name for name, _, _ in first[1]} <= {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_answers_and_rounds_are_those_of_one_rank(zoo, one, two, run):
    prompts = zoo.prompts(PROMPTS, 24)
    engine = two(*run)
    assert engine.get_server_info()["internal_states"][0]["is_on"]["overlap_schedule"]
    for params in (
        GREEDY,
        [{"temperature": 0.9, "sampling_seed": i, "max_new_tokens": 12} for i in range(5)],
    ):
        wanted = one(*run).generate(input_ids=prompts, sampling_params=params)
        results = engine.generate(input_ids=prompts, sampling_params=params)
        assert [told(result) for result in results] == [told(result) for result in wanted]
        check_ranks(engine)


def test_one_rank_draws_its_drafts_and_the_other_does_not(zoo, one, two):
    """They replay different graphs, which hold the same collectives; requests go to the ranks in turn."""
    prompts, flags = zoo.prompts(PROMPTS, 24), {"speculative_use_rejection_sampling": True}
    for order in (1, -1):
        params = [{"temperature": float(i % 2), "sampling_seed": i, "max_new_tokens": 18} for i in range(4)]
        inputs = {"input_ids": prompts[:4], "sampling_params": params[::order]}
        wanted = one((3, 1, 4), **flags).generate(**inputs)
        engine = two((3, 1, 4), **flags)
        results = engine.generate(**inputs)
        assert [told(result) for result in results] == [told(result) for result in wanted]
        check_ranks(engine)


@pytest.mark.parametrize("run", [RUNS[0], RUNS[2]], ids=run_id)
def test_one_rank_idle_then_the_other(zoo, two, run):
    """Requests on one rank alone, the other beside it in every step, late rounds and what follows too."""
    engine, prompts = two(*run), zoo.prompts(PROMPTS, 24)
    for rank in (0, 1):
        stream = begin(engine, prompts[rank], rank)
        other = begin(engine, prompts[rank + 1], 1 - rank, max_new_tokens=3)
        for handle, prompt, count in ((stream, prompts[rank], 24), (other, prompts[rank + 1], 3)):
            assert list(handle)[-1]["output_ids"] == zoo.r0(prompt, max_new_tokens=count)
        assert engine.generate(input_ids=prompts[3], sampling_params=GREEDY, routed_dp_rank=rank)[
            "output_ids"
        ] == zoo.r0(prompts[3], max_new_tokens=24)
    check_ranks(engine)


def test_gathers_count_tokens_and_not_requests(zoo, two):
    """Five requests here, one there, each in trees of eight: every gather has the rows of the five."""
    (depth, topk, nodes), bs = (3, 2, 8), 5
    engine = two((depth, topk, nodes), eager=True)
    params = [GREEDY | {"ignore_eos": True}] * (bs + 1)
    streams = [
        begin(engine, prompt, rank, **more)
        for prompt, rank, more in zip(zoo.prompts((*PROMPTS, 8), 24), (0,) * bs + (1,), params, strict=True)
    ]
    for stream in streams:
        next(stream)
    for _ in range(3):
        next(streams[0])
    log = [shape[0] for name, shape, _ in engine.scheduler._call("collectives")[0][1] if name == "all_gather"]
    round_ = [bs * topk] * (depth - 1) + [bs * nodes] * LAYERS + [bs * (depth + 1)]
    assert any(log[i : i + len(round_)] == round_ for i in range(len(log)))
    for stream in streams:
        list(stream)
    check_ranks(engine)


def test_a_rank_that_dies_in_a_step_is_named(zoo):
    """Its thread's collectives break off in the other rank, which is not to blame."""
    engine = Kept(zoo, Engine, **TWO_RANKS)((3, 1, 4))
    try:
        stream = begin(engine, zoo.prompts(PROMPTS, 24)[0], 0)
        next(stream)
        os.kill(engine.scheduler.ranks[1].process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL"):
            list(stream)
    finally:
        engine.shutdown()
