"""Two thousand steps of requests that end, are aborted and pushed back while rounds of them are under way.

The forward stream is as late as a seed makes it, and every page is spoilt as soon as it is free.
"""

from __future__ import annotations

import random

import pytest

from tests.contract.harness import run
from tests.contract.probe import Probe, swapped

from .lag import Lag, poison_on_free

pytestmark = pytest.mark.slow

POOL_PROMPTS = (3, 5, 8, 9, 12, 14, 17, 21)
# Tree, page, pool, graphs; the numbers of steps add up to two thousand and more.
STORMS = [
    (None, 1, 96, {}),
    (None, 4, 112, {"disable_cuda_graph": True}),
    ((3, 1, 4), 1, 112, {"disable_cuda_graph": True}),
    ((3, 1, 4), 4, 144, {}),
    ((3, 2, 8), 1, 144, {}),
    ((3, 2, 8), 4, 176, {"disable_cuda_graph": True}),
    ((3, 1, 4), 4, 256, {"speculative_adaptive": True}),
]
STEPS = 340


class Storm:
    """Aborts and retractions at moments that a seed chooses, and a count of what happened."""

    def __init__(self, engine, rng: random.Random):
        self.engine, self.rng, self.gone = engine, rng, set()
        self.steps = self.pushed_back = 0
        self.asked_in = -1
        self.batch_class = type(engine.scheduler.running_batch)
        self.real_check = self.batch_class.check_decode_mem

    def before(self, probe) -> None:
        probe.scheduler.new_token_ratio = 0.1  # admission counts on short answers

    def after(self, probe) -> None:
        self.steps += 1
        if self.rng.random() < 0.06 and (held := probe.holders()):
            rid = self.rng.choice(held).rid
            self.engine.abort_request(rid)
            self.gone.add(rid)

    def check_decode_mem(self, batch, alloc_len: int = 1) -> bool:
        is_first, self.asked_in = self.asked_in != self.steps, self.steps  # twice would end a request
        if is_first and batch.batch_size() > 1 and self.rng.random() < 0.05:
            self.pushed_back += 1
            return False
        return self.real_check(batch, alloc_len)


def weather(engine, zoo, seed, steps):
    """Batches of requests until `steps` steps have run; every answer is R0's, or begins it where aborted."""
    rng, pool = random.Random(seed), zoo.prompts(POOL_PROMPTS, 24)
    storm = Storm(engine, rng)

    def check(batch, *args):
        return storm.check_decode_mem(batch, *args)

    while storm.steps < steps:
        picked = [rng.choice(pool) for _ in range(10)]
        params = [{"max_new_tokens": rng.randint(1, 24)} for _ in picked]
        for p, prompt in zip(params, picked, strict=True):
            if rng.random() < 0.3:
                p["stop_token_ids"] = [rng.choice(zoo.r0(prompt, max_new_tokens=24))]
        storm.gone.clear()
        with swapped(storm.batch_class, "check_decode_mem", check):
            done = run(engine, picked, params, check=False, before=storm.before, after=storm.after)
        for i, (prompt, p) in enumerate(zip(picked, params, strict=True)):
            truth = zoo.r0(prompt, **p)
            out = done.tokens[i]
            reason = done.results[i]["meta_info"]["finish_reason"]
            assert out == (truth[: len(out)] if f"r{i}" in storm.gone else truth), reason
    return storm


@pytest.mark.parametrize("storm", range(len(STORMS)))
def test_a_storm(engines, zoo, storm):
    tree, page, pool, flags = STORMS[storm]
    with engines.fresh(
        tree=tree,
        page_size=page,
        max_total_tokens=pool,
        max_running_requests=5,
        chunked_prefill_size=(-1, 8, 16)[storm % 3],
        **flags,
    ) as engine:
        with poison_on_free(engine) as freed, Lag(engine, storm).open() as lag:
            weathered = weather(engine, zoo, storm, STEPS)
        assert lag.holds > 100 and len(freed) > 50 and weathered.pushed_back > 3
        probe = Probe(engine)
        probe.settle()
        probe.check_idle()
        probe.check_tree_kv(zoo.ref(), zoo.ref_head() if tree else None)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"tree": (3, 1, 4)},
        {"tree": (3, 2, 8)},
        {"tree": (3, 1, 4), "speculative_use_rejection_sampling": True},
    ],
    ids=["plain", "3-1-4", "3-2-8", "drawn"],
)
def test_sampled_requests_beside_others(engines, zoo, flags):
    """Rows of sampling parameters and penalties leave and come while a late step uses them."""
    prompts = zoo.prompts((5, 9, 7, 12, 3, 14), 24)
    params = [
        {"temperature": 0.8, "sampling_seed": 5, "max_new_tokens": 6},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3, "max_new_tokens": 20},
        {"max_new_tokens": 3},
        {"temperature": 1.2, "top_p": 0.8, "min_p": 0.01, "sampling_seed": 11, "max_new_tokens": 12},
        {"repetition_penalty": 1.3, "logit_bias": {"7": 2.0}, "max_new_tokens": 17},
        {"temperature": 0.9, "sampling_seed": 3, "min_new_tokens": 5, "max_new_tokens": 24},
    ]
    flags = flags | {"max_running_requests": 4, "chunked_prefill_size": 16}
    wanted = run(engines.get(**flags, disable_overlap_schedule=True), prompts, params)
    engine = engines.get(**flags)
    for seed in range(3):
        assert engine.flush_cache()
        with poison_on_free(engine), Lag(engine, seed, share=0.8).open():
            done = run(engine, prompts, params, check=False)
        assert done.tokens == wanted.tokens


def noticed(engines, zoo, spoil) -> bool:
    """Whether a storm over an engine that `spoil(scheduler)` has spoilt goes wrong."""
    flags = {"tree": (3, 2, 8), "page_size": 1, "max_total_tokens": 144, "max_running_requests": 5}
    with engines.fresh(**flags) as engine:
        with spoil(engine.scheduler), poison_on_free(engine), Lag(engine, 1).open():
            try:
                weather(engine, zoo, 1, 200)
                Probe(engine).check_tree_kv(zoo.ref(), zoo.ref_head())
            except (AssertionError, RuntimeError):
                return True
    return False


def test_without_the_barrier_it_goes_wrong(engines, zoo):
    """A row is given to another request while a step in flight still follows its old entries."""
    assert noticed(engines, zoo, lambda scheduler: swapped(scheduler.forward_stream, "wait_for_reads", int))


def test_where_a_page_is_given_back_too_early_it_goes_wrong(engines, zoo):
    """What is behind the accepted tokens is freed with each result, though a round is using it."""

    def spoil(scheduler):
        real = scheduler.process_batch_result_decode

        def process(batch, result):
            real(batch, result)
            for _, req in batch.rows_in_time():
                table = scheduler.req_to_token_pool.req_to_token_host[req.req_pool_idx]
                scheduler.token_to_kv_pool_allocator.free(table[req.kv_len + 1 : req.kv_allocated_len])
                req.kv_allocated_len = req.kv_len + 1

        return swapped(scheduler, "process_batch_result_decode", process)

    assert noticed(engines, zoo, spoil)
