"""The contract's core with the Triton kernels: in float32 they give the tokens and rounds of the reference.

A few short runs go through Triton's interpreter where there is no GPU; the rest needs one.
"""

from __future__ import annotations

import pytest
import torch

from tests.contract.harness import run, tree_id
from tests.contract.test_lossless import LENGTHS, NEW, simulated

# Triton 3.6's interpreter turns one-element arrays into numbers in a way that numpy 2.3 warns about. And a
# graph's padding rows hold whatever there was: numpy tells of overflows there that a GPU does not mention.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
]

GPU = {"device": "cuda" if torch.cuda.is_available() else "cpu", "attention_backend": "triton"}
SHAPES = [None, (1, 1, 2), (3, 1, 4), (3, 4, 8), (5, 4, 16)]


@pytest.mark.needs("triton")
@pytest.mark.parametrize("page, tree", [(1, None), (1, (2, 1, 3)), (4, (2, 2, 4))])
def test_short_runs(stage, engines, zoo, page, tree):
    prompts = zoo.prompts(LENGTHS, NEW)[:2]
    done = run(engines.get(tree=tree, page_size=page, **GPU), prompts, {"max_new_tokens": 6})
    assert done.tokens == [zoo.r0(p, max_new_tokens=6) for p in prompts]
    if tree is not None:
        assert done.rounds == simulated(zoo, prompts, done.tokens, tree)


@pytest.mark.gpu
@pytest.mark.needs("triton")
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("tree", SHAPES, ids=lambda t: tree_id(t) if t else "plain")
def test_tokens_and_rounds(stage, engines, zoo, tree, page):
    prompts = zoo.prompts(LENGTHS, NEW)
    done = run(engines.get(tree=tree, page_size=page, **GPU), prompts, {"max_new_tokens": NEW})
    assert done.tokens == [zoo.r0(p, max_new_tokens=NEW) for p in prompts]
    if tree is not None:
        assert done.rounds == simulated(zoo, prompts, done.tokens, tree)


@pytest.mark.gpu
@pytest.mark.needs("triton", "spec_scheduler")
def test_kv_of_every_layer(stage, engines, zoo):
    prompts = zoo.prompts(LENGTHS, NEW)
    engine = engines.get(tree=stage.shape, **GPU)
    run(engine, prompts, {"max_new_tokens": NEW}, ref=zoo.ref(), ref_head=zoo.ref_head())


@pytest.mark.gpu
@pytest.mark.needs("triton", "spec_scheduler")
def test_chunks_and_retraction(stage, engines, zoo):
    """A pool that cannot hold everybody, and prompts read in pieces, change nothing."""
    prompts = zoo.prompts(LENGTHS, NEW)
    # A squeeze for every stage; below 48 there is no room for one request and what spec_v2 reserves.
    small = {"max_total_tokens": 60, "chunked_prefill_size": 7, "disable_radix_cache": True}
    engine = engines.get(tree=stage.shape, **small, **GPU)
    done = run(engine, prompts, {"max_new_tokens": NEW})
    assert done.tokens == [zoo.r0(p, max_new_tokens=NEW) for p in prompts]
    assert engine.get_server_info()["num_retractions"] > 0


@pytest.mark.gpu
@pytest.mark.needs("triton")
@pytest.mark.parametrize("tree", [None, (3, 4, 8)], ids=lambda t: tree_id(t) if t else "plain")
def test_seeds_decide_alone(stage, engines, zoo, tree):
    """A seeded sample depends on neither batch nor order; different seeds differ."""
    prompt = zoo.prompts(LENGTHS, NEW)[1]
    params = [{"temperature": 1.0, "max_new_tokens": NEW, "sampling_seed": s} for s in range(8)]
    engine = engines.get(tree=tree, **GPU)
    together = run(engine, [prompt] * 8, params).tokens
    backwards = run(engine, [prompt] * 8, params[::-1]).tokens[::-1]
    alone = [run(engine, [prompt], [p]).tokens[0] for p in params]
    assert together == backwards == alone
    assert len({tuple(t) for t in together}) > 4
