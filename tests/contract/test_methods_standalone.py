"""STANDALONE: the invariants of the suite again, for a whole model as the draft.

Its KV at p is that of token p, one entry ahead of the target's: the last output token has been read too.
"""

from __future__ import annotations

import shutil

import pytest

from tests.contract import drafters, models
from tests.contract.harness import run, tree_id
from tests.contract.probe import Probe
from tests.contract.reference import RefTarget, StandaloneRefDraft, simulate
from tests.contract.test_methods import LENGTHS, NEW, check
from tests.contract.test_refusals import DP, refused
from tests.contract.test_sampling_law import big, check_law, draw
from tests.contract.test_triton import GPU

SPEC, TREE = models.STANDALONE, (3, 2, 8)
pytestmark = pytest.mark.needs("standalone")


def standalone(folder) -> dict:
    return {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder)}


@pytest.mark.parametrize("tree", [(1, 1, 2), (3, 1, 4), TREE, (3, 4, 37)], ids=tree_id)
def test_shapes(stage, engines, zoo, tree):
    done = check(zoo, engines.get(SPEC, tree=tree), SPEC, tree, zoo.prompts(LENGTHS, NEW, SPEC))
    rounds = [count for each in done.rounds for count in each[:-1]]
    assert {1, tree[0] + 1} <= set(rounds), "some drafts are right and some are wrong"


@pytest.mark.parametrize(
    "flags",
    [
        {"page_size": 4, "chunked_prefill_size": 7},
        {"page_size": 4, "chunked_prefill_size": 8, "disable_cuda_graph": True},
        {"disable_cuda_graph": True, "chunked_prefill_size": 1},
        {"max_running_requests": 2, "disable_radix_cache": True},
    ],
    ids=lambda flags: ",".join(f"{k}={v}" for k, v in flags.items()),
)
@pytest.mark.parametrize("tree", [(3, 1, 4), TREE], ids=tree_id)
def test_flags_that_must_not_matter(stage, engines, zoo, tree, flags):
    check(zoo, engines.get(SPEC, tree=tree, **flags), SPEC, tree, zoo.prompts(LENGTHS, NEW, SPEC))


@pytest.mark.parametrize("flags", [{}, {"disable_cuda_graph": True, "page_size": 4}], ids=["", "eager"])
def test_a_model_that_drafts_for_itself_is_always_right(stage, engines, zoo, flags):
    """The draft sees every token of the text, the first one too, where the target sees it."""
    engine = engines.get(SPEC, tree=(3, 1, 4), **standalone(zoo.target(SPEC)), **flags)
    done = run(engine, zoo.prompts(LENGTHS, NEW, SPEC), {"max_new_tokens": NEW}, ref=zoo.ref(SPEC))
    assert done.rounds == [[4, 4, 4, 3]] * len(LENGTHS)


@pytest.mark.parametrize("page", [1, 4])
def test_kv_after_scripted_accepts(stage, engines, zoo, page):
    prompts, new = zoo.prompts((6, 9, 12), 20, SPEC), 20
    engine = engines.get(SPEC, tree=(4, 2, 9), page_size=page)
    with drafters.scripted(Probe(engine), zoo.ref(SPEC), [0, 3, 1, 4, 2], last_sibling=True):
        done = run(engine, prompts, {"max_new_tokens": new}, ref=zoo.ref(SPEC), ref_head=zoo.ref_head(SPEC))
    assert done.tokens == [zoo.r0(p, SPEC, max_new_tokens=new) for p in prompts]


def test_a_warm_prefix_drafts_like_a_cold_one(stage, engines, zoo):
    """Keys are single tokens, so a prompt that is there as a whole is hit up to its last page."""
    base = zoo.prompts((16,), NEW, SPEC)[0]
    for page, hits in ((1, (0, 16, 11)), (4, (0, 16, 8))):
        engine = engines.get(SPEC, tree=TREE, page_size=page)
        assert Probe(engine).tree.lookahead == 0
        for prompt, hit in zip((base, [*base, 5, 9], base[:12]), hits, strict=True):
            done = check(zoo, engine, SPEC, TREE, [prompt])
            Probe(engine).check_tree_kv(zoo.ref(SPEC), zoo.ref_head(SPEC))
            assert done.results[0]["meta_info"]["cached_tokens"] == hit


@pytest.mark.parametrize("page, pool", [(1, 112), (4, 120)])
def test_a_small_pool_retracts(stage, engines, zoo, page, pool):
    prompts = zoo.prompts((9, 12, 7, 14, 10), 24, SPEC)
    engine = engines.get(
        SPEC, tree=TREE, max_total_tokens=pool, page_size=page, chunked_prefill_size=4 * page
    )

    def optimist(probe):
        probe.scheduler.new_token_ratio = 0.1

    references = {"ref": zoo.ref(SPEC), "ref_head": zoo.ref_head(SPEC)}
    done = run(engine, prompts, {"max_new_tokens": 24}, before=optimist, **references)
    assert done.tokens == [zoo.r0(p, SPEC, max_new_tokens=24) for p in prompts]
    assert [r["meta_info"]["spec_verify_ct"] for r in done.results] == [
        len(simulate(zoo.ref_head(SPEC), p, o, *TREE)) for p, o in zip(prompts, done.tokens, strict=True)
    ]
    assert engine.get_server_info()["num_retractions"] > 0


def test_poison_changes_nothing(stage, engines, zoo):
    prompts = zoo.prompts(LENGTHS, NEW, SPEC)
    check(zoo, engines.get(SPEC, tree=TREE), SPEC, TREE, prompts, before=lambda probe: probe.poison())


def test_no_hidden_states_are_asked_for(stage, engines, zoo):
    """Of a prefill; a verification returns what requests may want."""
    engine, modes = engines.get(SPEC, tree=TREE), set()
    probe = Probe(engine)

    def see(args, kwargs, result):
        if args[0].forward_mode.is_extend():
            modes.add((args[0].capture_hidden_mode.name, result.hidden_states is None))

    with probe.spy(probe.target_runner, "forward", see):
        run(engine, zoo.prompts((5, 9), NEW, SPEC))
    assert modes == {("NULL", True)}


def test_a_draft_of_another_shape(stage, engines, zoo):
    """Its width is its own affair: it has an embedding and a head to go with it."""
    other = models.TargetSpec(
        name="narrow", hidden=32, layers=1, heads=2, kv_heads=1, mlp=48, tied=True, seed=53
    )
    draft, tree = StandaloneRefDraft(RefTarget(zoo.target(other)), zoo.ref(SPEC)), (2, 2, 6)
    engine = engines.get(SPEC, tree=tree, **standalone(zoo.target(other)))
    prompts = zoo.prompts(LENGTHS, NEW, SPEC)
    done = run(engine, prompts, {"max_new_tokens": NEW}, ref=zoo.ref(SPEC), ref_head=draft)
    assert done.tokens == [zoo.r0(p, SPEC, max_new_tokens=NEW) for p in prompts]
    assert done.rounds == [simulate(draft, p, o, *tree) for p, o in zip(prompts, done.tokens, strict=True)]


@pytest.mark.parametrize("tree", [(2, 1, 3), (2, 2, 6)], ids=tree_id)
def test_joint_law_at_temperature_one(stage, engines, zoo, tree):
    spec, prompt = models.TOY8_STANDALONE, [3, 1, 4, 1, 5]
    check_law(zoo.ref(spec), prompt, draw(big(engines, spec, tree), prompt, {}))


def test_another_vocabulary_is_refused(engines, zoo, tmp_path):
    """By its size; and by its tokens, where both models bring a tokenizer."""
    fewer = models.TargetSpec(name="fewer", vocab=64, seed=54)
    with pytest.raises(ValueError, match=r"vocabulary of 64 tokens.*one of 128.*own family"):
        engines.fresh(SPEC, tree=TREE, **standalone(zoo.target(fewer)))
    swapped = shutil.copytree(zoo.target(SPEC), tmp_path / "swapped")
    file = swapped / "tokenizer.json"
    file.write_text(
        file.read_text().replace('": 70', '": 0071').replace('": 71', '": 70').replace("0071", "71")
    )
    with pytest.raises(ValueError, match="number their tokens differently"):
        engines.fresh(SPEC, tree=TREE, **standalone(swapped))
    file.unlink()
    engines.fresh(SPEC, tree=TREE, **standalone(swapped)).shutdown()


def test_a_head_is_no_model_and_a_model_no_head(engines, zoo):
    with pytest.raises(ValueError, match="set it to 'EAGLE'"):
        engines.fresh(SPEC, tree=TREE, **standalone(zoo.head()))
    with pytest.raises(ValueError, match="set it to 'STANDALONE'"):
        engines.fresh(tree=TREE, speculative_draft_model_path=str(zoo.target()))


def test_ranks_are_refused(stage):
    assert "upstream's does not either" in refused(stage, standalone("a-draft") | DP)


def test_defaults_are_upstreams(stage):
    args = stage.module("server_args").ServerArgs.from_kwargs(model_path="m", device="cpu", **standalone("d"))
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (3, 1)
    assert args.speculative_num_draft_tokens == 4


@pytest.mark.gpu
@pytest.mark.needs("triton")
@pytest.mark.parametrize("tree", [(3, 1, 4), (3, 4, 8)], ids=tree_id)
def test_on_a_gpu(stage, engines, zoo, tree):
    prompts = zoo.prompts((5, 9, 3), NEW, SPEC)
    done = run(engines.get(SPEC, tree=tree, **GPU), prompts)
    assert done.tokens == [zoo.r0(p, SPEC) for p in prompts]
    assert done.rounds == [
        simulate(zoo.ref_head(SPEC), p, o, *tree) for p, o in zip(prompts, done.tokens, strict=True)
    ]
