"""Counting: what a round is, what was accepted, and that nothing divides by zero."""

from __future__ import annotations

import math

import pytest

from tests.contract import drafters
from tests.contract.harness import accepted, run, tree_id
from tests.contract.probe import Probe

pytestmark = pytest.mark.needs("spec_scheduler")
SHAPES = [(1, 1, 2), (3, 1, 4), (3, 2, 8)]


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_tokens_and_rounds_add_up(stage, engines, zoo, tree):
    """1 + committed per round == completion tokens; histogram, proposals and both averages follow from the
    rounds.
    """
    prompts = zoo.prompts((5, 9, 7), 20)
    done = run(engines.get(tree=tree), prompts, {"max_new_tokens": 20})
    for result, rounds in zip(done.results, done.rounds, strict=True):
        meta = result["meta_info"]
        assert 1 + sum(rounds) == meta["completion_tokens"] == 20
        assert meta["spec_verify_ct"] == len(rounds) == sum(meta["spec_correct_drafts_histogram"])
        assert meta["spec_num_correct_drafts"] == accepted(result)
        assert meta["spec_num_proposed_drafts"] == len(rounds) * (tree[2] - 1)
        assert meta["spec_accept_length"] == pytest.approx(20 / len(rounds))
        assert meta["tokens_per_round"] == pytest.approx(19 / len(rounds))
        # All rounds but the last end in a bonus token; the last may be cut inside its accepted run.
        drafts = sum(rounds) - len(rounds)
        assert drafts <= accepted(result) <= drafts + 1


@pytest.mark.parametrize("new", range(2, 14))
def test_a_run_cut_by_the_end_counts_what_was_emitted(stage, engines, zoo, new):
    """Chain of 3, all right: the last round counts the drafts that became output, not those cut off."""
    prompt = zoo.prompts((9,), 24)[0]
    engine = engines.get(tree=(3, 1, 4))
    with drafters.perfect(Probe(engine), zoo.ref()):
        done = run(engine, [prompt], {"max_new_tokens": new})
    meta, left = done.results[0]["meta_info"], new - 1
    want = [min(3, left - 4 * i) for i in range(-(-left // 4))]
    histogram = meta["spec_correct_drafts_histogram"]
    assert accepted(done.results[0]) == sum(want)
    assert [i for i, count in enumerate(histogram) for _ in range(count)] == sorted(want)
    assert meta["tokens_per_round"] == pytest.approx((new - 1) / len(want))


def test_no_round_at_all(stage, engines, zoo):
    """Requests that end at prefill: every number is there and finite."""
    prompt = zoo.prompts((9,), 24)[0]
    engine = engines.get(tree=(3, 1, 4))
    info = engine.get_server_info()
    assert all(math.isfinite(v) for v in info.values() if isinstance(v, (int, float)))
    result = run(engine, [prompt], {"max_new_tokens": 1}).results[0]
    meta = result["meta_info"]
    assert meta["spec_verify_ct"] == meta["spec_num_correct_drafts"] == meta["spec_num_proposed_drafts"] == 0
    assert meta["spec_accept_length"] == meta["tokens_per_round"] == 0.0
    info = engine.get_server_info()
    assert all(math.isfinite(v) for v in info.values() if isinstance(v, (int, float)))
    assert info["spec_verify_ct"] == 0


def test_the_engine_counts_what_its_requests_count(stage, engines, zoo):
    prompts = zoo.prompts((5, 9, 7, 12), 20)
    engine = engines.get(tree=stage.shape)
    done = run(engine, prompts, [{"max_new_tokens": n} for n in (20, 1, 13, 6)])
    info = engine.get_server_info()
    metas = [r["meta_info"] for r in done.results]
    assert info["spec_verify_ct"] == sum(m["spec_verify_ct"] for m in metas)
    assert info["completion_tokens"] == sum(m["completion_tokens"] for m in metas)
    total = [0] * len(info["spec_correct_drafts_histogram"])
    for meta in metas:
        for i, count in enumerate(meta["spec_correct_drafts_histogram"]):
            total[i] += count
    assert info["spec_correct_drafts_histogram"] == total
    assert engine.flush_cache()
    assert engine.get_server_info()["spec_verify_ct"] == 0


def test_plain_results_carry_no_speculation_numbers(stage, engines, zoo):
    meta = run(engines.get(), zoo.prompts((9,), 24)).results[0]["meta_info"]
    assert not [key for key in meta if key.startswith("spec_")]


def test_upstream_keys_are_there(stage, engines, zoo):
    result = run(engines.get(tree=(3, 1, 4)), zoo.prompts((9,), 24)).results[0]
    assert {"text", "output_ids", "meta_info"} <= result.keys()
    assert {
        "id",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "e2e_latency",
        "spec_verify_ct",
        "spec_accept_length",
        "spec_num_correct_drafts",
        "spec_num_proposed_drafts",
        "spec_correct_drafts_histogram",
        "tokens_per_round",
    } <= result["meta_info"].keys()
    assert result["meta_info"]["prompt_tokens"] == 9
