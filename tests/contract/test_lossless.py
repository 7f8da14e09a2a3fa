"""INV-LOSSLESS, INV-POOL, INV-DRAFTKV and INV-ACCEPT over the matrix of shapes.

Every run here is checked after every step: owners of slots, lengths, target KV in every layer, draft KV.
Tokens must equal R0 and the tokens of every round must equal what the independent simulation of the loop
commits.
"""

from __future__ import annotations

import pytest

from tests.contract import models
from tests.contract.harness import run, tree_id
from tests.contract.reference import simulate

LENGTHS = (1, 5, 16, 13, 9)
NEW = 16
BF16_GAP = 0.1  # logits up to 10 here, and eight bits of mantissa
TREES = [
    (1, 1, 2),
    (2, 1, 3),
    (3, 1, 4),
    (5, 1, 6),
    (1, 2, 3),
    (1, 4, 2),
    (2, 2, 4),
    (2, 2, 7),
    (3, 2, 8),
    (3, 4, 8),
    (2, 4, 5),
    (5, 2, 19),
    (5, 4, 16),
    (3, 4, 37),
    (2, 4, 2),
]


def simulated(zoo, prompts, outputs, tree, spec=models.BASE):
    return [simulate(zoo.ref_head(spec), p, o, *tree) for p, o in zip(prompts, outputs, strict=True)]


@pytest.mark.parametrize("page", [1, 4, 16])
def test_plain_equals_r0(stage, engines, zoo, page):
    prompts = zoo.prompts(LENGTHS, NEW)
    done = run(engines.get(page_size=page), prompts, {"max_new_tokens": NEW}, ref=zoo.ref())
    assert done.tokens == [zoo.r0(p, max_new_tokens=NEW) for p in prompts]
    assert all(
        result["meta_info"]["finish_reason"] == {"type": "length", "length": NEW} for result in done.results
    )
    assert all(set(rounds) == {1} for rounds in done.rounds)


@pytest.mark.parametrize("tree", TREES, ids=tree_id)
def test_tree_matrix(stage, engines, zoo, tree):
    prompts = zoo.prompts(LENGTHS, NEW)
    done = run(
        engines.get(tree=tree), prompts, {"max_new_tokens": NEW}, ref=zoo.ref(), ref_head=zoo.ref_head()
    )
    assert done.tokens == [zoo.r0(p, max_new_tokens=NEW) for p in prompts]
    assert done.rounds == simulated(zoo, prompts, done.tokens, tree)


@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("tree", [(3, 1, 4), (3, 2, 8), (5, 4, 16)], ids=tree_id)
def test_pages(stage, engines, zoo, tree, page):
    prompts = zoo.prompts(LENGTHS, NEW)
    done = run(
        engines.get(tree=tree, page_size=page),
        prompts,
        {"max_new_tokens": NEW},
        ref=zoo.ref(),
        ref_head=zoo.ref_head(),
    )
    assert done.tokens == [zoo.r0(p, max_new_tokens=NEW) for p in prompts]
    assert done.rounds == simulated(zoo, prompts, done.tokens, tree)


@pytest.mark.parametrize("tree", [(3, 1, 4), (3, 4, 8)], ids=tree_id)
def test_every_prompt_length_of_a_page(stage, engines, zoo, tree):
    """Branches share the last partial page: every remainder of the prompt length modulo the page."""
    prompts = zoo.prompts(tuple(range(1, 18)), 9)
    done = run(
        engines.get(tree=tree, page_size=16),
        prompts,
        {"max_new_tokens": 9},
        ref=zoo.ref(),
        ref_head=zoo.ref_head(),
    )
    assert done.tokens == [zoo.r0(p, max_new_tokens=9) for p in prompts]
    assert done.rounds == simulated(zoo, prompts, done.tokens, tree)


@pytest.mark.parametrize("chunk", [8, 7, 1])
@pytest.mark.parametrize("tree", [None, (3, 1, 4), (3, 2, 8)], ids=tree_id)
def test_chunked_prefill(stage, engines, zoo, tree, chunk):
    """At the end of a chunk the next prompt token is known, and the draft must be fed that one."""
    prompts = zoo.prompts(LENGTHS, NEW)
    done = run(
        engines.get(tree=tree, chunked_prefill_size=chunk),
        prompts,
        {"max_new_tokens": NEW},
        ref=zoo.ref(),
        ref_head=zoo.ref_head() if tree else None,
    )
    assert done.tokens == [zoo.r0(p, max_new_tokens=NEW) for p in prompts]
    if tree is not None:
        assert done.rounds == simulated(zoo, prompts, done.tokens, tree)


@pytest.mark.needs("spec_scheduler")
@pytest.mark.parametrize(
    "flags",
    [
        {"disable_radix_cache": True},
        {"page_size": 4, "chunked_prefill_size": 7},
        {"page_size": 16, "chunked_prefill_size": 8, "disable_radix_cache": True},
        {"max_running_requests": 2},
        {"max_prefill_tokens": 16},
    ],
    ids=lambda flags: ",".join(f"{k}={v}" for k, v in flags.items()),
)
def test_flags_that_must_not_matter(stage, engines, zoo, flags):
    """Same work, same answer: tokens and accept counts."""
    prompts, tree = zoo.prompts(LENGTHS, NEW), stage.shape
    done = run(
        engines.get(tree=tree, **flags),
        prompts,
        {"max_new_tokens": NEW},
        ref=zoo.ref(),
        ref_head=zoo.ref_head(),
    )
    assert done.tokens == [zoo.r0(p, max_new_tokens=NEW) for p in prompts]
    assert done.rounds == simulated(zoo, prompts, done.tokens, tree)


@pytest.mark.needs("spec_scheduler")
@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_batch_and_order_do_not_matter(stage, engines, zoo, batch):
    prompts, tree = zoo.prompts(LENGTHS, NEW)[:batch][::-1], stage.shape
    done = run(
        engines.get(tree=tree), prompts, {"max_new_tokens": NEW}, ref=zoo.ref(), ref_head=zoo.ref_head()
    )
    assert done.tokens == [zoo.r0(p, max_new_tokens=NEW) for p in prompts]
    assert done.rounds == simulated(zoo, prompts, done.tokens, tree)


@pytest.mark.parametrize("tree", [None, (3, 2, 8)], ids=tree_id)
@pytest.mark.parametrize(
    "spec", [models.GROUP3, models.TIED, models.BIASED, models.SCALED_ROPE], ids=lambda spec: spec.name
)
def test_other_llamas(stage, engines, zoo, spec, tree):
    """Groups of three query heads, a tied head, biases and shards, scaled rotary positions."""
    prompts = zoo.prompts((3, 11, 20), NEW, spec=spec)
    done = run(
        engines.get(spec, tree=tree),
        prompts,
        {"max_new_tokens": NEW},
        ref=zoo.ref(spec),
        ref_head=zoo.ref_head(spec) if tree else None,
    )
    assert done.tokens == [zoo.r0(p, spec, max_new_tokens=NEW) for p in prompts]
    if tree is not None:
        assert done.rounds == simulated(zoo, prompts, done.tokens, tree, spec)


@pytest.mark.parametrize("tree", [(3, 1, 4), (3, 2, 8)], ids=tree_id)
def test_bfloat16_differs_only_where_two_tokens_are_nearly_tied(stage, engines, zoo, tree):
    """The first difference to plain decoding lies where plain decoding itself saw two tokens
    within rounding.
    """
    prompts = zoo.prompts((5, 9, 13, 7, 20, 11), 40)
    plain = run(
        engines.get(dtype="bfloat16"),
        prompts,
        {"max_new_tokens": 40},
        return_logprob=True,
        top_logprobs_num=2,
    )
    done = run(engines.get(tree=tree, dtype="bfloat16"), prompts, {"max_new_tokens": 40})
    for want, have in zip(plain.results, done.results, strict=True):
        a, b = want["output_ids"], have["output_ids"]
        first = next((i for i in range(40) if a[i] != b[i]), None)
        if first is not None:
            top = want["meta_info"]["output_top_logprobs"][first]
            assert top[0][0] - top[1][0] < BF16_GAP and b[first] in (top[0][1], top[1][1])


@pytest.mark.needs("spec_scheduler")
def test_drafts_are_accepted_and_rejected(stage, zoo):
    """The models are useful: in the runs above some drafts are right and some are wrong."""
    prompts = zoo.prompts(LENGTHS, NEW)
    outputs = [zoo.r0(p, max_new_tokens=NEW) for p in prompts]
    for tree in [(3, 1, 4), (3, 2, 8)]:
        rounds = [n for r in simulated(zoo, prompts, outputs, tree) for n in r]
        assert {1, 2, 3, 4} <= set(rounds), rounds
