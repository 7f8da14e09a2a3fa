"""The prefix cache under EAGLE: pair keys, what may enter the tree, and what a hit must find there."""

from __future__ import annotations

import pytest

from tests.contract import drafters
from tests.contract.harness import run, tree_id
from tests.contract.probe import Probe
from tests.contract.reference import simulate

TREE = (3, 2, 8)
SHAPES = [None, (3, 1, 4), TREE]


def cached(done):
    return [result["meta_info"]["cached_tokens"] for result in done.results]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("tree", [(3, 1, 4), TREE], ids=tree_id)
def test_a_warm_prefix_drafts_like_a_cold_one(stage, engines, zoo, tree, page):
    """Prompts that share a prefix and part right after it, and nested prefixes: same draft KV,
    same rounds.
    """
    base = zoo.prompts((16,), 20)[0]
    prompts = [
        [*base, 5, 9, 11],
        [*base, 6, 9, 11],
        base[:12],
        [*base[:12], 77, 78],
        [*base, 5, 9, 11, 30, 31, 32, 33, 34],
    ]
    engine = engines.get(tree=tree, page_size=page)
    hits = []
    for prompt in prompts:
        done = run(engine, [prompt], {"max_new_tokens": 20}, ref=zoo.ref(), ref_head=zoo.ref_head())
        assert done.tokens == [zoo.r0(prompt, max_new_tokens=20)]
        assert done.rounds == [simulate(zoo.ref_head(), prompt, done.tokens[0], *tree)]
        Probe(engine).check_tree_kv(zoo.ref(), zoo.ref_head())
        hits += cached(done)
    unit = lambda n: n // page * page  # noqa: E731 — a hit is whole pages
    assert hits == [0, unit(15), unit(11), unit(11), unit(18)]


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_a_repeated_prompt_loses_at_most_one_unit(stage, engines, zoo, tree, page):
    """One row has to run again; nothing more is lost to speculation, at exact multiples of the page too."""
    lengths = (8, 15, 16, 17, 32, 33)
    prompts = zoo.prompts(lengths, 4)
    engine = engines.get(tree=tree, page_size=page)
    first, second = (run(engine, prompts, {"max_new_tokens": 4}) for _ in range(2))
    assert first.tokens == second.tokens == [zoo.r0(prompt, max_new_tokens=4) for prompt in prompts]
    assert cached(first) == [0] * len(lengths)
    assert cached(second) == [(length - 1) // page * page for length in lengths]


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_the_next_turn_of_a_conversation_hits_all_that_was_said(stage, engines, zoo, tree):
    """A's sequence and one more token: all of A but what has no KV yet is found, never more
    than A's length.
    """
    prompt = zoo.prompts((4,), 8)[0]
    engine = engines.get(tree=tree)
    for new in (2, 5):
        engine.flush_cache()
        out = run(engine, [prompt], {"max_new_tokens": new}).tokens[0]
        follow = [*prompt, *out, 50]
        done = run(
            engine, [follow], {"max_new_tokens": 3}, ref=zoo.ref(), ref_head=zoo.ref_head() if tree else None
        )
        assert done.tokens == [zoo.r0(follow, max_new_tokens=3)]
        assert cached(done) == [len(prompt) + len(out) - 1]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("tree", [(3, 1, 4), TREE], ids=tree_id)
def test_rejected_drafts_never_enter_the_tree(stage, engines, zoo, tree, page):
    """With a drafter that is always wrong the tree holds prompt and output, and a probe with a
    draft misses.
    """
    prompt = zoo.prompts((9,), 16)[0]
    engine, proposed = engines.get(tree=tree, page_size=page), []
    probe = Probe(engine)
    with (
        drafters.never(probe, zoo.ref()),
        probe.spy(
            probe.draft_worker, "draft", lambda a, k, result: proposed.append(result.draft_token.tolist())
        ),
    ):
        out = run(engine, [prompt], {"max_new_tokens": 12}, ref=zoo.ref(), ref_head=zoo.ref_head()).tokens[0]
    sequence = prompt + out
    keys = [key for node in probe.tree_nodes() for key in node.key.tolist()]
    whole = (len(sequence) - 1) // page * page
    assert sorted(keys) == sorted(probe.tree.make_key(sequence, whole).tolist())
    wrong = [*prompt, out[0], proposed[0][0][1]]
    assert len(probe.tree.match_prefix(wrong, len(wrong) - 1).device_indices) <= len(prompt)


@pytest.mark.needs("spec_scheduler")
@pytest.mark.parametrize("chunk", [None, 8])
def test_a_hit_never_reads_unwritten_draft_kv(stage, engines, zoo, chunk):
    """Both pools start as NaN; whatever the tree hands out must have been written by the drafter too."""
    base = zoo.prompts((24,), 12)[0]
    engine = engines.get(tree=stage.shape, chunked_prefill_size=chunk)
    probe = Probe(engine)
    probe.poison()
    for prompt in (base, base[:17], [*base, 4, 5, 6], base):
        done = run(engine, [prompt], {"max_new_tokens": 12}, ref=zoo.ref(), ref_head=zoo.ref_head())
        assert done.tokens == [zoo.r0(prompt, max_new_tokens=12)]
    probe.check_tree_kv(zoo.ref(), zoo.ref_head())


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_same_prompt_twice_in_one_batch(stage, engines, zoo, tree):
    """Two requests compute the same prefix side by side: one set of slots is given back, none twice."""
    prompt = zoo.prompts((12,), 16)[0]
    done = run(
        engines.get(tree=tree),
        [prompt] * 3,
        {"max_new_tokens": 16},
        ref=zoo.ref(),
        ref_head=zoo.ref_head() if tree else None,
    )
    assert done.tokens == [zoo.r0(prompt)] * 3


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_without_the_cache_nothing_is_kept(stage, engines, zoo, tree):
    prompt = zoo.prompts((12,), 16)[0]
    engine = engines.get(tree=tree, disable_radix_cache=True)
    for _ in range(2):
        assert cached(run(engine, [prompt])) == [0]
        probe = Probe(engine)
        assert probe.allocator.available_size() == probe.allocator.size and not list(probe.tree_nodes())


@pytest.mark.needs("spec_scheduler")
def test_multi_turn_hit_rate_is_that_of_plain_decoding(stage, engines, zoo):
    """Four conversations of three turns: speculation costs no hits at the same occupancy."""
    openers = zoo.prompts((8, 12, 9, 15), 10)

    def total(tree):
        engine, hits, histories = engines.get(tree=tree, max_total_tokens=400), 0, [list(p) for p in openers]
        for turn in range(3):
            done = run(engine, histories, {"max_new_tokens": 10})
            hits += sum(cached(done))
            histories = [
                h + out + [20 + turn, 30 + turn] for h, out in zip(histories, done.tokens, strict=True)
            ]
        return hits

    plain, drafted = total(None), total(stage.shape)
    assert drafted == plain > 0


@pytest.mark.parametrize("tree", SHAPES, ids=tree_id)
def test_flush(stage, engines, zoo, tree):
    """Flushed while idle: pool full, counters zero, the next run is like the first. While busy: refused."""
    prompt = zoo.prompts((12,), 16)[0]
    engine = engines.get(tree=tree)
    probe = Probe(engine)
    first = run(engine, [prompt])
    assert probe.tree.evictable_size() > 0
    assert engine.flush_cache()
    assert probe.allocator.available_size() == probe.allocator.size and not list(probe.tree_nodes())
    again = run(engine, [prompt])
    assert again.tokens == first.tokens and again.commits == first.commits and cached(again) == [0]
    stream = engine.generate(
        input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 16}, stream=True
    )
    next(stream)
    assert not engine.flush_cache()
    assert [part["output_ids"] for part in stream][-1] == first.tokens[0]
    probe.check_idle()
