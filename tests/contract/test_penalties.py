"""Bias and penalties reach every node of a tree, each node with the counts of its own path."""

from __future__ import annotations

import pytest

from tests.contract import drafters, models
from tests.contract.harness import run, tree_id
from tests.contract.probe import Probe, swapped

SHAPES = [None, (3, 1, 4), (3, 2, 8), (5, 4, 16)]
PENALTIES = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.1},
    {"repetition_penalty": 1.4},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 0.8},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5},
]


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: ",".join(f"{k}={v}" for k, v in p.items()))
def test_penalties_equal_plain_decoding(stage, engines, zoo, tree, penalty):
    """In a batch where only some requests are penalised."""
    prompts = zoo.prompts((5, 9, 7), 24)
    params = [{"max_new_tokens": 24, **penalty}, {"max_new_tokens": 24}, {"max_new_tokens": 24, **penalty}]
    done = run(
        engines.get(tree=tree), prompts, params, ref=zoo.ref(), ref_head=zoo.ref_head() if tree else None
    )
    assert done.tokens == [zoo.r0(p, **q) for p, q in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0}],
    ids=lambda p: next(iter(p)),
)
def test_a_loved_token_inside_one_accepted_run(stage, engines, zoo, tree, penalty):
    """A model that repeats one token: the penalty must bite from one draft to the next inside
    the same run.
    """
    spec, loved = models.LOVER, models.LOVER.loved
    prompts = zoo.prompts((5, 9), 16, spec=spec)
    free = zoo.r0(prompts[0], spec, max_new_tokens=16)
    assert free.count(loved) >= 4, free
    want = [zoo.r0(p, spec, max_new_tokens=16, **penalty) for p in prompts]
    engine = engines.get(spec, tree=tree)
    assert run(engine, prompts, {"max_new_tokens": 16, **penalty}).tokens == want
    if tree is None:
        return
    # Drafts that insist on the loved token: only exact counts along the path reject them where R0 does.
    probe = Probe(engine)
    real = probe.draft_worker.draft

    def draft(batch, *args, **kwargs):
        verify_input = real(batch, *args, **kwargs)
        tokens = verify_input.draft_token.view(len(batch.reqs), -1)
        tokens[:, 1:] = loved
        return verify_input

    with swapped(probe.draft_worker, "draft", draft):
        assert run(engine, prompts, {"max_new_tokens": 16, **penalty}).tokens == want


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_a_banned_token_never_appears(stage, engines, zoo, tree):
    """Bias −100 on tokens that greedy decoding likes, under drafts that propose them, and +100 forces one."""
    prompts = zoo.prompts((5, 9), 20)
    banned = sorted(set(zoo.r0(prompts[0], max_new_tokens=20)))[:6]
    bias = {str(token): -100.0 for token in banned}
    params = [{"max_new_tokens": 20, "logit_bias": bias}, {"max_new_tokens": 6, "logit_bias": {"50": 100.0}}]
    engine = engines.get(tree=tree)
    want = [zoo.r0(p, **q) for p, q in zip(prompts, params, strict=True)]
    done = run(engine, prompts, params)
    assert done.tokens == want and not set(done.tokens[0]) & set(banned) and done.tokens[1] == [50] * 6
    if tree is not None:
        with drafters.perfect(
            Probe(engine), zoo.ref()
        ):  # "perfect" for the unbiased model: it proposes what is banned
            assert run(engine, prompts, params).tokens == want


@pytest.mark.parametrize("tree", SHAPES[1:], ids=tree_id)
def test_penalties_survive_filter_and_retraction(stage, engines, zoo, tree):
    """Counts follow their request when others leave and when it is pushed out of a small pool."""
    prompts = zoo.prompts((5, 9, 7, 11), 24)
    params = [{"max_new_tokens": n, "frequency_penalty": 0.7} for n in (6, 24, 13, 24)]
    done = run(engines.get(tree=tree, max_total_tokens=96, disable_radix_cache=True), prompts, params)
    assert done.tokens == [zoo.r0(p, **q) for p, q in zip(prompts, params, strict=True)]


@pytest.mark.needs("spec_scheduler")
def test_unpenalised_batches_keep_no_counts(stage, engines, zoo):
    engine = engines.get(tree=(3, 1, 4))
    seen = []
    run(
        engine,
        zoo.prompts((5, 9), 16),
        after=lambda probe: seen.extend(
            batch.sampling_info.penalties
            for batch in probe.batches()
            if batch.reqs and batch.sampling_info is not None
        ),
    )
    assert seen and set(seen) == {None}
