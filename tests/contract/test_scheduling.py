"""Small pools, aborts at every moment, requests that come and go: others are undisturbed and
no slot is lost.
"""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from tests.contract import drafters
from tests.contract.harness import run, tree_id
from tests.contract.probe import Probe
from tests.contract.reference import simulate

TREE = (3, 2, 8)
SHAPES = [None, (3, 1, 4), TREE]
GREEDY = {"temperature": 0, "max_new_tokens": 24}


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_a_small_pool_evicts_then_retracts_and_never_raises(stage, engines, zoo, tree, radix, page):
    """Requests that fit at one token a step but not at a tree a step: outputs and rounds are those of a large
    pool.
    """
    prompts = zoo.prompts((9, 12, 7, 14, 10), 24)
    engine = engines.get(tree=tree, page_size=page, max_total_tokens=112, disable_radix_cache=not radix)

    def optimist(probe):  # admission counts on short answers, as after a long run without retractions
        probe.scheduler.new_token_ratio = 0.1

    done = run(
        engine,
        prompts,
        {"max_new_tokens": 24},
        ref=zoo.ref(),
        ref_head=zoo.ref_head() if tree else None,
        before=optimist,
    )
    assert done.tokens == [zoo.r0(p, max_new_tokens=24) for p in prompts]
    assert engine.get_server_info()["num_retractions"] > 0, "the pool was not small enough to test anything"
    if tree is not None:
        assert [r["meta_info"]["spec_verify_ct"] for r in done.results] == [
            len(simulate(zoo.ref_head(), p, o, *tree)) for p, o in zip(prompts, done.tokens, strict=True)
        ]


@pytest.mark.parametrize("step", [2, 3, 5, 8])
@pytest.mark.parametrize("tree", [(3, 1, 4), TREE], ids=tree_id)
def test_retraction_at_every_step(stage, engines, zoo, tree, step):
    """Push back all requests but one just before step `step`: no draft state survives, the output is R0's."""
    prompts = zoo.prompts((9, 12, 7), 24)
    engine, steps = engines.get(tree=tree), []
    probe = Probe(engine)
    real = type(probe.scheduler.running_batch).check_decode_mem
    refused = []

    def check(batch, *args, **kwargs):
        if len(steps) == step and batch.batch_size() > 1:
            refused.append(len(batch.reqs))
            return False
        return real(batch, *args, **kwargs)

    def after(probe):
        steps.append(None)

    type(probe.scheduler.running_batch).check_decode_mem = check
    try:
        done = run(engine, prompts, GREEDY, ref=zoo.ref(), ref_head=zoo.ref_head(), after=after)
    finally:
        type(probe.scheduler.running_batch).check_decode_mem = real
    assert done.tokens == [zoo.r0(p, max_new_tokens=24) for p in prompts]
    assert not refused or engine.get_server_info()["num_retractions"] == refused[0] - 1
    assert [sum(rounds) for rounds in done.rounds] == [23] * 3
    hits = [r["meta_info"]["cached_tokens"] for r in done.results]
    assert hits == [0] * 3, "what a request finds again of its own is no hit"


@pytest.mark.needs("spec_scheduler")
def test_whoever_has_produced_least_is_retracted(stage, engines, zoo):
    """Of three requests the first accepts nothing, so it has least to lose, though it is the oldest."""
    prompts = zoo.prompts((9, 12, 7), 24)
    engine, steps, gone = engines.get(tree=stage.shape), [], []
    probe = Probe(engine)
    batch_type = type(probe.scheduler.running_batch)
    real = batch_type.check_decode_mem

    def check(batch, *args, **kwargs):
        return real(batch, *args, **kwargs) and not (len(steps) == 3 and batch.batch_size() == 3)

    def after(probe):
        steps.append(None)
        gone.extend(req.rid for req in probe.scheduler.waiting_queue)

    batch_type.check_decode_mem = check
    try:
        with drafters.drafting(probe, zoo.ref(), lambda req, number: 0 if req.rid == "r0" else 3):
            done = run(engine, prompts, GREEDY, after=after)
    finally:
        batch_type.check_decode_mem = real
    assert gone == ["r0"]
    assert done.tokens == [zoo.r0(p, max_new_tokens=24) for p in prompts]


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
@pytest.mark.parametrize("page", [1, 16])
def test_the_last_request_outgrows_the_pool(stage, engines, zoo, tree, page):
    """A single request longer than the pool ends with a message; the engine lives on and the
    pool is whole.
    """
    prompt = zoo.prompts((20,), 24)[0]
    engine = engines.get(tree=tree, page_size=page, max_total_tokens=64)
    done = run(engine, [prompt], {"max_new_tokens": 120})
    reason = done.results[0]["meta_info"]["finish_reason"]
    assert reason["type"] in ("abort", "length") and "pool" in reason["message"]
    assert (
        done.tokens[0] == zoo.r0(prompt, max_new_tokens=120)[: len(done.tokens[0])]
        and len(done.tokens[0]) >= 20
    )
    assert run(engine, [prompt[:5]]).tokens == [zoo.r0(prompt[:5])]


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_a_prompt_larger_than_the_pool_is_turned_away(stage, engines, zoo, tree):
    engine = engines.get(tree=tree, max_total_tokens=64)
    small, large = zoo.prompts((9, 70), 8)
    done = run(engine, [small, large], {"max_new_tokens": 8})
    assert done.tokens[0] == zoo.r0(small, max_new_tokens=8)
    reason = done.results[1]["meta_info"]["finish_reason"]
    assert reason["type"] == "abort" and "64" in reason["message"] and "70" in reason["message"]


@pytest.mark.needs("spec_scheduler")
def test_a_full_pool_of_locked_cache_keeps_moving(stage, engines, zoo):
    """Many requests over a pool that stays nearly full: each step commits something, outputs are R0's."""
    prompts = zoo.prompts((9, 12, 7, 14, 10, 8, 6, 11), 16)
    engine, sizes = engines.get(tree=stage.shape, max_total_tokens=96), []

    def after(probe):
        sizes.append(probe.allocator.available_size() / probe.allocator.size)

    done = run(engine, prompts * 2, {"max_new_tokens": 16}, after=after)
    assert done.tokens == [zoo.r0(p, max_new_tokens=16) for p in prompts * 2]
    assert min(sizes) < 0.1
    assert len(sizes) < 16 * len(prompts) * 2 * 2


class Moment:
    """Aborts one request when its state first matches `where`."""

    def __init__(self, engine, rid: str, where: str):
        self.engine, self.rid, self.where, self.done = engine, rid, where, False

    def __call__(self, probe) -> None:
        if self.done:
            return
        scheduler = probe.scheduler
        queued = any(req.rid == self.rid for req in scheduler.waiting_queue)
        chunked = scheduler.chunked_req is not None and scheduler.chunked_req.rid == self.rid
        running = next((req for req in probe.running() if req.rid == self.rid), None)
        now = {
            "queued": queued,
            "mid-chunk": chunked,
            "after prefill": running is not None and len(running.output_ids) == 1,
            "decoding": running is not None and len(running.output_ids) > 4,
        }
        if now[self.where]:
            assert self.engine.abort_request(self.rid) is not False
            self.done = True


@pytest.mark.parametrize("where", ["queued", "mid-chunk", "after prefill", "decoding"])
@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_abort_at_any_moment(stage, engines, zoo, tree, where):
    """The aborted request keeps what it had; the others equal R0; nothing is lost."""
    prompts = zoo.prompts((9, 12, 30, 8), 24)
    engine = engines.get(tree=tree, chunked_prefill_size=16, max_running_requests=3)
    victim = {"queued": 3}.get(where, 2)
    moment = Moment(engine, f"r{victim}", where)
    done = run(
        engine, prompts, GREEDY, after=moment, ref=zoo.ref(), ref_head=zoo.ref_head() if tree else None
    )
    assert moment.done
    for i, prompt in enumerate(prompts):
        truth = zoo.r0(prompt, max_new_tokens=24)
        if i == victim:
            assert done.tokens[i] == truth[: len(done.tokens[i])] and len(done.tokens[i]) < 24
            assert done.results[i]["meta_info"]["finish_reason"]["type"] == "abort"
        else:
            assert done.tokens[i] == truth


@pytest.mark.needs("spec_scheduler")
@pytest.mark.parametrize("phase", ["draft", "verify", "forward_draft_extend_after_decode"])
def test_abort_inside_a_step(stage, engines, zoo, phase):
    """The flag is raised between two phases of a step; rows keep their requests."""
    prompts = zoo.prompts((9, 12, 7), 24)
    engine, calls = engines.get(tree=stage.shape), []
    probe = Probe(engine)
    worker = probe.draft_worker

    def see(args, kwargs, result):
        calls.append(None)
        if len(calls) == 3:
            # From another thread, as a server's abort would come; it may wait for the step's end.
            threading.Thread(target=engine.abort_request, args=("r1",), daemon=True).start()

    with probe.spy(worker, phase, see):
        done = run(engine, prompts, GREEDY, ref=zoo.ref(), ref_head=zoo.ref_head())
    for i in (0, 2):
        assert done.tokens[i] == zoo.r0(prompts[i], max_new_tokens=24)
    assert done.tokens[1] == zoo.r0(prompts[1], max_new_tokens=24)[: len(done.tokens[1])]


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_a_dropped_stream_frees_everything(stage, engines, zoo, tree):
    prompt = zoo.prompts((9,), 24)[0]
    engine = engines.get(tree=tree)
    stream = engine.generate(input_ids=prompt, sampling_params=GREEDY, stream=True)
    next(stream)
    stream.close()
    probe = Probe(engine)
    assert run(engine, [prompt], GREEDY).tokens == [zoo.r0(prompt, max_new_tokens=24)]
    probe.check_idle()


@pytest.mark.parametrize("tree", [None, TREE], ids=tree_id)
def test_requests_join_a_running_loop(stage, engines, zoo, tree):
    """Several threads call generate at once; each gets the result of its own prompt."""
    prompts = zoo.prompts((9, 12, 7, 14), 24)
    engine, results = engines.get(tree=tree), {}

    def ask(i):
        results[i] = engine.generate(input_ids=prompts[i], sampling_params=GREEDY)["output_ids"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {i: zoo.r0(p, max_new_tokens=24) for i, p in enumerate(prompts)}
    Probe(engine).check_idle()


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("tree", [(3, 1, 4), TREE], ids=tree_id)
def test_storm(stage, engines, zoo, tree, page, seed):
    """Random limits, stops, aborts and late arrivals in a pool that keeps overflowing; checked after every
    step.
    """
    rng = random.Random(seed)
    pool = zoo.prompts((3, 5, 8, 9, 12, 14, 17, 21), 24)
    picked = [rng.choice(pool) for _ in range(10)]
    params = [{"max_new_tokens": rng.randint(1, 24)} for _ in picked]
    for p, prompt in zip(params, picked, strict=True):
        if rng.random() < 0.3:
            p["stop_token_ids"] = [rng.choice(zoo.r0(prompt, max_new_tokens=24))]
    engine = engines.get(
        tree=tree,
        page_size=page,
        max_total_tokens=144,
        max_running_requests=5,
        chunked_prefill_size=rng.choice([-1, 8, 16]),
    )
    gone: set[str] = set()

    def after(probe):
        if rng.random() < 0.04 and (held := probe.holders()):
            rid = rng.choice(held).rid
            engine.abort_request(rid)
            gone.add(rid)

    done = run(engine, picked, params, after=after, ref=zoo.ref(), ref_head=zoo.ref_head())
    Probe(engine).check_tree_kv(zoo.ref(), zoo.ref_head())
    for i, (prompt, p) in enumerate(zip(picked, params, strict=True)):
        truth = zoo.r0(prompt, **p)
        if f"r{i}" in gone:
            assert done.tokens[i] == truth[: len(done.tokens[i])]
        else:
            assert done.tokens[i] == truth


@pytest.mark.needs("spec_scheduler", "page")
@pytest.mark.parametrize("page", [4, 16, 64])
def test_many_requests_leave_the_pool_full(stage, engines, zoo, page):
    """Mixed lengths, one by one and together; after each finish INV-POOL, at the end everything is free."""
    pool = zoo.prompts((1, 3, 8, 15, 16, 17, 21), 12)
    engine = engines.get(tree=stage.shape, page_size=page, max_total_tokens=1024, max_running_requests=8)
    run(engine, pool[:1], {"max_new_tokens": 7})
    rng = random.Random(page)
    prompts = [rng.choice(pool) for _ in range(120)]
    done = run(engine, prompts, [{"max_new_tokens": rng.randint(1, 9)} for _ in prompts])
    assert all(t == zoo.r0(p, max_new_tokens=12)[: len(t)] for t, p in zip(done.tokens, prompts, strict=True))
    assert engine.flush_cache()
    probe = Probe(engine)
    assert probe.allocator.available_size() == probe.allocator.size
    assert len(probe.rows.free_slots) == probe.rows.size


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_pages_follow_lengths(stage, engines, zoo, tree):
    """A running request holds ceil(kv_len / page) pages after every step: no stranded tail, none too few."""
    engine = engines.get(tree=tree, page_size=4, disable_radix_cache=True)
    prompts = zoo.prompts((5, 9, 3), 24)

    def after(probe):
        used = probe.allocator.size - probe.allocator.available_size()
        assert used == sum(-(-req.kv_len // 4) * 4 for req in probe.holders())

    run(engine, prompts, GREEDY, after=after)


@pytest.mark.parametrize("page", [1, 16])
def test_a_slot_cannot_be_freed_twice(stage, engines, zoo, page):
    """Freeing a free slot raises, and so does freeing a page that the tree or nobody owns."""
    engine = engines.get(page_size=page)
    run(engine, zoo.prompts((17,), 16))
    probe = Probe(engine)
    free, cached = probe.free_slots(), next(probe.tree_nodes()).value
    for slots in (free[:1], free[-1:], np.array([0]), np.array([probe.allocator.size + page])):
        with pytest.raises(RuntimeError):
            probe.allocator.free(slots)
    assert not set(free.tolist()) & set(cached.tolist())
    probe.check_idle()
