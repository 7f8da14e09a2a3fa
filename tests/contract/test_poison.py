"""INV-POISON: NaN or huge values in memory that nobody owns change nothing; a drafter gone mad costs only
rounds.
"""

from __future__ import annotations

import pytest
import torch

from tests.contract import drafters
from tests.contract.harness import run, tree_id
from tests.contract.probe import Probe
from tests.contract.reference import simulate

TREE = (3, 2, 8)


@pytest.mark.parametrize("value", [float("nan"), 1e9])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("tree", [None, (3, 1, 4), (3, 4, 12)], ids=tree_id)
def test_free_slots_before_every_step(stage, engines, zoo, tree, page, value):
    """Free slots and the padding page of both pools are overwritten before each step."""
    prompts = zoo.prompts((5, 9, 16, 13), 16)
    done = run(
        engines.get(tree=tree, page_size=page, chunked_prefill_size=16),
        prompts,
        {"max_new_tokens": 16},
        before=lambda probe: probe.poison(value),
        ref=zoo.ref(),
        ref_head=zoo.ref_head() if tree else None,
    )
    assert done.tokens == [zoo.r0(p) for p in prompts]
    if tree is not None:
        assert done.rounds == [
            simulate(zoo.ref_head(), p, o, *tree) for p, o in zip(prompts, done.tokens, strict=True)
        ]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("tree", [None, (3, 1, 4), TREE], ids=tree_id)
def test_table_entries_behind_the_end(stage, engines, zoo, tree, page):
    """What req_to_token holds behind a request's last KV entry, and in rows of nobody, is never followed."""

    @torch.inference_mode()
    def before(probe):
        probe.poison()
        table, owned = probe.rows.req_to_token, {req.req_pool_idx: req.kv_len for req in probe.holders()}
        for row in range(len(table)):
            table[row, owned.get(row, 0) :] = 0  # the padding slot, which is NaN now

    prompts = zoo.prompts((5, 9, 16, 13), 16)
    done = run(engines.get(tree=tree, page_size=page), prompts, before=before)
    assert done.tokens == [zoo.r0(p) for p in prompts]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize("tree", [(3, 1, 4), TREE, (3, 4, 12)], ids=tree_id)
def test_a_drafter_that_returns_garbage(stage, engines, zoo, tree, value):
    prompts = zoo.prompts((5, 9), 16)
    engine = engines.get(tree=tree)
    with drafters.poisoned(Probe(engine), value):
        done = run(engine, prompts, ref=zoo.ref())
    assert done.tokens == [zoo.r0(p) for p in prompts]
    assert run(engine, prompts, ref_head=zoo.ref_head()).tokens == done.tokens


@pytest.mark.parametrize("tree", [None, (3, 1, 4), TREE], ids=tree_id)
def test_a_non_finite_logit_ends_its_own_request(stage, engines, zoo, tree):
    """NaN in one request's target logits: that request aborts with a sentence, its neighbours go on."""
    prompts = zoo.prompts((5, 9, 7), 16)
    engine, calls = engines.get(tree=tree), []
    probe = Probe(engine)

    def spoil(module, args, output):
        if probe.is_capturing:
            return
        calls.append(None)
        if len(calls) == 4:
            rows = len(output.topk_p) // 3
            output.topk_p[rows : 2 * rows] = float("nan")

    handle = probe.target_runner.model.register_forward_hook(spoil)
    try:
        done = run(engine, prompts, {"max_new_tokens": 16})
    finally:
        handle.remove()
    reason = done.results[1]["meta_info"]["finish_reason"]
    assert reason["type"] == "abort" and reason["message"]
    for i in (0, 2):
        assert done.tokens[i] == zoo.r0(prompts[i])
    assert done.tokens[1] == zoo.r0(prompts[1])[: len(done.tokens[1])]
    assert run(engine, prompts).tokens == [zoo.r0(p) for p in prompts], (
        "its KV must not have entered the tree"
    )


@pytest.mark.parametrize("tree", [None, (3, 1, 4), TREE], ids=tree_id)
def test_bad_kv_of_an_aborted_request_is_not_cached(stage, engines, zoo, tree):
    """NaN in the KV of an output token: the request aborts, and a later prompt recomputes that token."""
    prompts = zoo.prompts((5, 9, 7), 16)
    engine, spoilt = engines.get(tree=tree), []

    @torch.inference_mode()
    def before(probe):
        victim = next((req for req in probe.running() if req.rid == "r1"), None)
        if victim is not None and len(victim.output_ids) >= 5 and not spoilt:
            pool, slot = probe.target_runner.token_to_kv_pool, int(probe.slots_of(victim)[-2])
            pool.k_buffer[:, slot] = pool.v_buffer[:, slot] = float("nan")
            spoilt.append(victim.all_token_ids())

    done = run(engine, prompts, before=before)
    assert done.results[1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert [done.tokens[i] for i in (0, 2)] == [zoo.r0(prompts[i]) for i in (0, 2)]
    again = run(engine, [spoilt[0], prompts[1]], {"max_new_tokens": 8})
    assert again.tokens == [zoo.r0(p, max_new_tokens=8) for p in (spoilt[0], prompts[1])]
