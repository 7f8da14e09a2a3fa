"""EAGLE-3 heads and the token map: the invariants of the suite again, where these methods could break them.

The draft proposes some of the vocabulary only, so its ids are mapped; an EAGLE-3 head is fed three of the
target's layers after a forward of the target, and its own state while a tree grows.
"""

from __future__ import annotations

import pytest
import torch

from tests.contract import drafters, models
from tests.contract.harness import run, tree_id
from tests.contract.probe import Probe
from tests.contract.reference import simulate
from tests.contract.test_sampling_law import big, check_law, draw
from tests.contract.test_triton import GPU

LENGTHS = (1, 5, 16, 13, 9)
NEW = 16
TREE = (3, 2, 8)
method = pytest.mark.parametrize("spec", models.METHODS, ids=lambda spec: spec.name)
eagle3 = pytest.mark.needs("eagle3")


def check(zoo, engine, spec, tree, prompts, new=NEW, **more):
    """Run greedily with everything checked after each step: tokens, rounds, KV of both models, owners."""
    head = zoo.ref_head(spec)
    done = run(engine, prompts, {"max_new_tokens": new}, ref=zoo.ref(spec), ref_head=head, **more)
    assert done.tokens == [zoo.r0(p, spec, max_new_tokens=new) for p in prompts]
    assert done.rounds == [simulate(head, p, o, *tree) for p, o in zip(prompts, done.tokens, strict=True)]
    return done


@method
@pytest.mark.parametrize("tree", [(1, 1, 2), (3, 1, 4), TREE, (3, 4, 37)], ids=tree_id)
def test_shapes(stage, engines, zoo, spec, tree):
    check(zoo, engines.get(spec, tree=tree), spec, tree, zoo.prompts(LENGTHS, NEW, spec))


@method
@pytest.mark.parametrize(
    "flags",
    [
        {"page_size": 4, "chunked_prefill_size": 7},
        {"disable_cuda_graph": True},
        {"max_running_requests": 2, "disable_radix_cache": True},
    ],
    ids=lambda flags: ",".join(f"{k}={v}" for k, v in flags.items()),
)
def test_flags_that_must_not_matter(stage, engines, zoo, spec, flags):
    prompts = zoo.prompts(LENGTHS, NEW, spec)
    check(zoo, engines.get(spec, tree=TREE, **flags), spec, TREE, prompts)


@method
def test_drafts_are_accepted_and_rejected(stage, zoo, spec):
    """The models are useful: in the runs above some drafts are right, some wrong, some never drafted."""
    head, hot, rounds, missed = zoo.ref_head(spec), set(spec.hot_tokens().tolist()), [], 0
    for prompt in zoo.prompts(LENGTHS, NEW, spec):
        output = zoo.r0(prompt, spec)
        rounds += simulate(head, prompt, output, *TREE)
        missed += sum(token not in hot for token in output)
    assert {1, 2, 3, 4} <= set(rounds) and missed


@method
def test_only_tokens_of_the_draft_vocabulary_are_drafted(stage, engines, zoo, spec):
    """And all sorts of them: an id that is not mapped would be a small number."""
    engine, seen = engines.get(spec, tree=(3, 4, 37)), set()

    def see(args, kwargs, result):
        seen.update(result.draft_token[:, 1:].flatten().tolist())

    probe = Probe(engine)
    with probe.spy(probe.draft_worker, "draft", see):
        run(engine, zoo.prompts(LENGTHS, NEW, spec))
    hot = spec.hot_tokens().tolist()
    assert seen <= set(hot) and max(seen) == hot[-1]


@method
@pytest.mark.parametrize("page", [1, 4])
def test_kv_after_scripted_accepts(stage, engines, zoo, spec, page):
    """Accepted rows that are not the first rows: the pairs take their three layers from the right ones."""
    prompts, new = zoo.prompts((6, 9, 12), 20, spec), 20
    engine = engines.get(spec, tree=(4, 2, 9), page_size=page)
    with drafters.scripted(Probe(engine), zoo.ref(spec), [0, 3, 1, 4, 2], last_sibling=True):
        done = run(engine, prompts, {"max_new_tokens": new}, ref=zoo.ref(spec), ref_head=zoo.ref_head(spec))
    assert done.tokens == [zoo.r0(p, spec, max_new_tokens=new) for p in prompts]


@method
def test_a_warm_prefix_drafts_like_a_cold_one(stage, engines, zoo, spec):
    base = zoo.prompts((16,), NEW, spec)[0]
    engine = engines.get(spec, tree=TREE, page_size=4)
    for prompt, hit in ((base, 0), ([*base, 5, 9], 12), (base[:12], 8)):
        done = check(zoo, engine, spec, TREE, [prompt])
        Probe(engine).check_tree_kv(zoo.ref(spec), zoo.ref_head(spec))
        assert done.results[0]["meta_info"]["cached_tokens"] == hit


@method
def test_a_small_pool_retracts(stage, engines, zoo, spec):
    prompts = zoo.prompts((9, 12, 7, 14, 10), 24, spec)
    engine = engines.get(spec, tree=TREE, max_total_tokens=112)

    def optimist(probe):
        probe.scheduler.new_token_ratio = 0.1

    done = run(
        engine,
        prompts,
        {"max_new_tokens": 24},
        ref=zoo.ref(spec),
        ref_head=zoo.ref_head(spec),
        before=optimist,
    )
    assert done.tokens == [zoo.r0(p, spec, max_new_tokens=24) for p in prompts]
    assert [r["meta_info"]["spec_verify_ct"] for r in done.results] == [
        len(simulate(zoo.ref_head(spec), p, o, *TREE)) for p, o in zip(prompts, done.tokens, strict=True)
    ]
    assert engine.get_server_info()["num_retractions"] > 0


@method
def test_poison_changes_nothing(stage, engines, zoo, spec):
    prompts = zoo.prompts(LENGTHS, NEW, spec)
    check(zoo, engines.get(spec, tree=TREE), spec, TREE, prompts, before=lambda probe: probe.poison())
    engine = engines.get(spec, tree=TREE)
    with drafters.poisoned(Probe(engine)):
        done = run(engine, prompts)
    assert done.tokens == [zoo.r0(p, spec) for p in prompts]
    engines.drop(engine)
    engine.shutdown()


@eagle3
def test_joint_law_at_temperature_one(stage, engines, zoo):
    """Two of eight tokens are never drafted, and they come as often as they should all the same."""
    spec, prompt = models.TOY8_EAGLE3, [3, 1, 4, 1, 5]
    check_law(zoo.ref(spec), prompt, draw(big(engines, spec, (2, 2, 6)), prompt, {}))


@eagle3
def test_what_the_draft_is_fed(stage, engines, zoo):
    """Pair p has what the target's layers 2, n // 2 and n - 3 were given at p, in that order."""
    spec = models.EAGLE3
    prompt = zoo.prompts((19,), 4, spec)[0]
    engine, fed = engines.get(spec, tree=(2, 1, 3), chunked_prefill_size=7), {}
    probe = Probe(engine)

    def see(args, kwargs, result):
        batch = args[0]
        if batch.forward_mode.is_extend():
            for position, state in zip(batch.positions.tolist(), batch.spec_info.hidden_states, strict=True):
                fed[position] = state.clone()

    with probe.spy(probe.draft_runner, "forward", see):
        run(engine, [prompt], {"max_new_tokens": 1})
    inputs = zoo.ref(spec).run(prompt).inputs
    want = torch.cat([inputs[2], inputs[3], inputs[4]], dim=-1)
    torch.testing.assert_close(torch.stack([fed[p] for p in range(19)]), want, atol=1e-4, rtol=1e-4)


@eagle3
def test_features_of_the_head_equal_the_reference(stage, engines, zoo):
    """What the next round starts from is the state ahead of the final norm."""
    spec, compared = models.EAGLE3, []
    prompt = zoo.prompts((9,), 12, spec)[0]
    truth = zoo.r0(prompt, spec, max_new_tokens=24, ignore_eos=True)

    def after(probe):
        for batch in probe.batches():
            for row, _ in probe.rows_of(batch):
                count, hidden = probe.draft_feature(batch, row)
                features = zoo.ref_head(spec).teacher_forced([*prompt, *truth][:count])[2]
                torch.testing.assert_close(hidden, features[-1], atol=1e-4, rtol=1e-4)
                compared.append(row)

    run(engines.get(spec, tree=TREE), [prompt], {"max_new_tokens": 12}, after=after)
    assert len(compared) >= 4


@pytest.mark.needs("nextn")
def test_nextn_is_eagle(stage, engines, zoo):
    prompts = zoo.prompts((5, 9), NEW)
    with engines.fresh(tree=TREE, speculative_algorithm="NEXTN") as engine:
        assert engine.get_server_info()["speculative_algorithm"] == "EAGLE"
        done = run(engine, prompts, ref=zoo.ref(), ref_head=zoo.ref_head())
    assert done.rounds == [
        simulate(zoo.ref_head(), p, o, *TREE) for p, o in zip(prompts, done.tokens, strict=True)
    ]


@pytest.mark.gpu
@pytest.mark.needs("triton")
@method
@pytest.mark.parametrize("tree", [(3, 1, 4), (3, 4, 8)], ids=tree_id)
def test_on_a_gpu(stage, engines, zoo, spec, tree):
    prompts = zoo.prompts((5, 9, 3), NEW, spec)
    done = run(engines.get(spec, tree=tree, **GPU), prompts)
    assert done.tokens == [zoo.r0(p, spec) for p in prompts]
    assert done.rounds == [
        simulate(zoo.ref_head(spec), p, o, *tree) for p, o in zip(prompts, done.tokens, strict=True)
    ]
