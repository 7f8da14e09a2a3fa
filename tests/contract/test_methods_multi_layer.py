"""A head for each step: the invariants of the suite again, for drafts that all come out of the draft extend.

Head i reads i tokens further than EAGLE's: at the end of a text these are proposals, and its KV there has to
be made anew when they have become something else.
"""

from __future__ import annotations

import pytest

from tests.contract import drafters, models
from tests.contract.harness import run
from tests.contract.probe import Probe
from tests.contract.reference import MultiLayerRefHead, simulate
from tests.contract.test_refusals import DP, EAGLE, refused
from tests.contract.test_sampling_law import big, check_law, draw
from tests.contract.test_triton import GPU

pytestmark = pytest.mark.needs("multi_layer_eagle")
LENGTHS = (1, 5, 16, 13, 9, 2)
NEW = 16
SPEC, TREE = models.MULTI_LAYER, (3, 1, 4)
FLAG = {"enable_multi_layer_eagle": True}
# Of one head for all steps, too: files that EAGLE and EAGLE-3 are run with.
SHAPES = [
    (SPEC, 3),
    *((models.BASE, steps) for steps in (1, 2, 5)),
    (models.EAGLE3, 3),
    (models.TOKEN_MAP, 3),
]
shape = pytest.mark.parametrize("spec, steps", SHAPES, ids=lambda value: getattr(value, "name", value))


def ref_heads(zoo, spec=SPEC, steps=3):
    head = zoo.ref_head(spec)
    return zoo._once(
        ("modules", spec, steps), lambda: head if spec.modules > 1 else MultiLayerRefHead([head] * steps)
    )


def check(zoo, engine, prompts, spec=SPEC, steps=3, new=NEW, **more):
    """Greedy tokens, KV of both models after each step, and what every round accepted."""
    heads = ref_heads(zoo, spec, steps)
    done = run(engine, prompts, {"max_new_tokens": new}, ref=zoo.ref(spec), ref_head=heads, **more)
    assert done.tokens == [zoo.r0(p, spec, max_new_tokens=new) for p in prompts]
    assert done.rounds == [
        simulate(heads, p, o, steps, 1, steps + 1) for p, o in zip(prompts, done.tokens, strict=True)
    ]
    return done


@shape
def test_shapes(stage, engines, zoo, spec, steps):
    engine = engines.get(spec, tree=(steps, 1, steps + 1), **FLAG)
    done = check(zoo, engine, zoo.prompts(LENGTHS, NEW, spec), spec, steps)
    if spec is SPEC:
        rounds = {count for each in done.rounds for count in each[:-1]}
        assert rounds == {1, 2, 3, 4}, "some drafts are right and some are wrong, at every step"


def test_one_module_is_eagle(stage, engines, zoo):
    """With a single step there is nothing to shift: the rounds of a chain of one draft."""
    prompts = zoo.prompts(LENGTHS, NEW)
    done = run(engines.get(tree=(1, 1, 2), **FLAG), prompts, ref_head=zoo.ref_head())
    assert done.rounds == [
        simulate(zoo.ref_head(), p, o, 1, 1, 2) for p, o in zip(prompts, done.tokens, strict=True)
    ]


@pytest.mark.parametrize(
    "flags",
    [
        {"page_size": 4, "chunked_prefill_size": 7},
        {"page_size": 4, "chunked_prefill_size": 8, "disable_cuda_graph": True},
        {"disable_cuda_graph": True, "chunked_prefill_size": 3},
        {"max_running_requests": 2, "disable_radix_cache": True},
    ],
    ids=lambda flags: ",".join(f"{k}={v}" for k, v in flags.items()),
)
@pytest.mark.parametrize("spec", [SPEC, models.EAGLE3], ids=lambda spec: spec.name)
def test_flags_that_must_not_matter(stage, engines, zoo, spec, flags):
    check(zoo, engines.get(spec, tree=TREE, **FLAG, **flags), zoo.prompts(LENGTHS, NEW, spec), spec)


@pytest.mark.parametrize("chunk", [3, 4, 5, 9])
def test_a_chunk_leaves_what_is_read_behind_it(stage, engines, zoo, chunk):
    """So the KV of a chunk needs no second look, whatever the length of the prompt."""
    prompts = zoo.prompts(tuple(range(chunk, chunk + 8)), NEW, SPEC)
    engine, seen = engines.get(SPEC, tree=TREE, chunked_prefill_size=chunk, **FLAG), []

    def see(args, kwargs, result):
        batch = args[0]
        seen.append(int(batch.q_start_loc[-1]))
        known = batch.known_next_tokens
        for row, ends in zip(known.tolist(), batch.seq_lens.tolist(), strict=True):
            assert -1 not in row or (row == [-1, -1, -1] and ends >= chunk)

    probe = Probe(engine)
    with probe.spy(probe.draft_worker.draft_worker, "forward_draft_extend", see):
        check(zoo, engine, prompts)
    assert max(seen) <= chunk


@pytest.mark.parametrize("page", [1, 4])
def test_kv_after_scripted_accepts(stage, engines, zoo, page):
    """What was read as a proposal is read again as what it has become."""
    prompts, new = zoo.prompts((2, 9, 12), 20, SPEC), 20
    engine = engines.get(SPEC, tree=TREE, page_size=page, **FLAG)
    with drafters.scripted(Probe(engine), zoo.ref(SPEC), [0, 0, 3, 1, 0, 2]):
        done = run(engine, prompts, {"max_new_tokens": new}, ref=zoo.ref(SPEC), ref_head=ref_heads(zoo))
    assert done.tokens == [zoo.r0(p, SPEC, max_new_tokens=new) for p in prompts]


def test_a_warm_prefix_drafts_like_a_cold_one(stage, engines, zoo):
    """A prefix is shared as far as the three tokens behind each of its positions agree."""
    base = zoo.prompts((16,), NEW, SPEC)[0]
    for page, hits in ((1, (0, 13, 13, 9, 0)), (4, (0, 12, 12, 8, 0))):
        engine = engines.get(SPEC, tree=TREE, page_size=page, **FLAG)
        prompts = (base, base, [*base, 5, 9], base[:12], base[:3])
        for prompt, hit in zip(prompts, hits, strict=True):
            done = check(zoo, engine, [prompt])
            Probe(engine).check_tree_kv(zoo.ref(SPEC), ref_heads(zoo))
            assert done.results[0]["meta_info"]["cached_tokens"] == hit


def test_texts_that_part_share_what_is_the_same_for_both(stage, engines, zoo):
    base = zoo.prompts((16,), NEW, SPEC)[0]
    engine = engines.get(SPEC, tree=TREE, **FLAG)
    for fork, hit in ((16, 0), (10, 7), (11, 8), (9, 6)):
        prompt = [*base[:fork], *[(token + 1) % SPEC.vocab for token in base[fork:]]]
        done = run(engine, [prompt], {"max_new_tokens": 6}, ref=zoo.ref(SPEC), ref_head=ref_heads(zoo))
        Probe(engine).check_tree_kv(zoo.ref(SPEC), ref_heads(zoo))
        assert done.results[0]["meta_info"]["cached_tokens"] == hit


@pytest.mark.parametrize("page, pool", [(1, 112), (4, 120)])
def test_a_small_pool_retracts(stage, engines, zoo, page, pool):
    prompts = zoo.prompts((9, 12, 7, 14, 10), 24, SPEC)
    flags = {"max_total_tokens": pool, "page_size": page, "chunked_prefill_size": 4 * page}
    engine = engines.get(SPEC, tree=TREE, **FLAG, **flags)

    def optimist(probe):
        probe.scheduler.new_token_ratio = 0.1

    references = {"ref": zoo.ref(SPEC), "ref_head": ref_heads(zoo)}
    done = run(engine, prompts, {"max_new_tokens": 24}, before=optimist, **references)
    assert done.tokens == [zoo.r0(p, SPEC, max_new_tokens=24) for p in prompts]
    assert [r["meta_info"]["spec_verify_ct"] for r in done.results] == [
        len(simulate(ref_heads(zoo), p, o, *TREE)) for p, o in zip(prompts, done.tokens, strict=True)
    ]
    assert engine.get_server_info()["num_retractions"] > 0


def test_poison_changes_nothing(stage, engines, zoo):
    prompts = zoo.prompts(LENGTHS, NEW, SPEC)
    check(zoo, engines.get(SPEC, tree=TREE, **FLAG), prompts, before=lambda probe: probe.poison())
    engine = engines.get(SPEC, tree=TREE, **FLAG)
    with drafters.poisoned(Probe(engine)):
        assert run(engine, prompts).tokens == [zoo.r0(p, SPEC) for p in prompts]
    engines.drop(engine)
    engine.shutdown()


@pytest.mark.parametrize("flags", [{}, {"disable_cuda_graph": True}], ids=["graphs", "eager"])
def test_all_of_drafting_is_in_the_draft_extend(stage, engines, zoo, flags):
    """A round has no draft forward, and as many in its draft extend as there are steps; so has a prompt."""
    engine, seen = engines.get(SPEC, tree=TREE, disable_overlap_schedule=True, **FLAG, **flags), []

    def look(probe):
        seen.append(probe.draft_runner.forward_ct)

    probe, drafts = Probe(engine), []
    with probe.spy(probe.draft_worker, "draft", lambda *_: drafts.append(probe.draft_runner.forward_ct)):
        run(engine, zoo.prompts((9, 5), NEW, SPEC), {"max_new_tokens": NEW}, after=look)
    steps = [b - a for a, b in zip(seen, seen[1:], strict=False)]
    assert set(steps) == {3} and drafts == seen[: len(drafts)]


@pytest.mark.parametrize("rejects", [False, True], ids=["tree", "rejection"])
@pytest.mark.parametrize("spec", [models.TOY8, models.TOY8_EAGLE3], ids=lambda spec: spec.name)
def test_joint_law_at_temperature_one(stage, engines, zoo, spec, rejects):
    """Drafts that are drawn follow one another: each is drawn after the one before is known."""
    prompt = [3, 1, 4, 1, 5]
    engine = big(engines, spec, (2, 1, 3), speculative_use_rejection_sampling=rejects or None, **FLAG)
    check_law(zoo.ref(spec), prompt, draw(engine, prompt, {}))


@pytest.mark.parametrize("rejects", [False, True], ids=["tree", "rejection"])
def test_the_same_seed_gives_the_same_text(stage, engines, zoo, rejects):
    """Alone or among others, whole or in chunks, in graphs or not: what is drafted follows from the text."""
    prompts = zoo.prompts((9, 12, 7, 14), NEW, SPEC)
    params = [{"temperature": 0.8, "sampling_seed": i, "max_new_tokens": NEW} for i in range(4)]
    reject = {"speculative_use_rejection_sampling": rejects or None}
    seen = []
    chunks = {"page_size": 4, "chunked_prefill_size": 5}
    for flags in ({}, chunks, {"max_running_requests": 1}, {"disable_cuda_graph": True}):
        done = run(engines.get(SPEC, tree=TREE, **FLAG, **reject, **flags), prompts, params)
        seen.append((done.tokens, done.rounds))
    assert all(one == seen[0] for one in seen)


# ---- the file ----


def test_one_head_for_all_steps_is_there_once(stage, engines, zoo):
    heads = Probe(engines.get(tree=TREE, **FLAG)).draft_runner.model.heads
    assert len({head.fc.weight.data_ptr() for head in heads}) == 1
    heads = Probe(engines.get(SPEC, tree=TREE, **FLAG)).draft_runner.model.heads
    assert len({head.fc.weight.data_ptr() for head in heads}) == 3


@pytest.mark.parametrize(
    "tree, flags", [((2, 1, 3), FLAG), (TREE, {})], ids=["other steps", "without the flag"]
)
def test_other_modules_than_steps_are_refused(engines, tree, flags):
    with pytest.raises(ValueError, match=r"3 modules.*enable_multi_layer_eagle.*speculative_num_steps=3"):
        engines.fresh(SPEC, tree=tree, **flags)


def test_a_head_of_several_layers_is_refused(engines, zoo, tmp_path):
    folder = models.copy_with_config(zoo.head(), tmp_path / "head", num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"2 layers.*module for one step has one"):
        engines.fresh(tree=TREE, speculative_draft_model_path=str(folder), **FLAG)


def test_a_missing_module_is_named(engines, zoo, tmp_path):
    tensors = models.read_tensors(zoo.head(SPEC))
    del tensors["mtp.2.fc.weight"]
    folder = models.write_head(tmp_path / "head", SPEC, tensors)
    with pytest.raises(ValueError, match=r"lacks mtp\.2\.fc\.weight"):
        engines.fresh(SPEC, tree=TREE, speculative_draft_model_path=str(folder), **FLAG)


# ---- flags ----


@pytest.mark.parametrize(
    "flags, words",
    [
        (EAGLE | {"speculative_eagle_topk": 4}, ("speculative_eagle_topk=4", "chains")),
        (EAGLE | {"speculative_num_steps": 3, "speculative_num_draft_tokens": 3}, ("steps + 1",)),
        (EAGLE | DP, ("enable_dp_attention", "upstream's does")),
        (EAGLE | {"speculative_adaptive": True}, ("speculative_adaptive", "upstream")),
        (EAGLE | {"speculative_algorithm": "STANDALONE"}, ("STANDALONE", "upstream")),
        ({"speculative_algorithm": "NGRAM"}, ("NGRAM", "upstream")),
        (EAGLE | {"chunked_prefill_size": 2}, ("chunked_prefill_size=2", "speculative_num_steps")),
        ({}, ("speculative_algorithm",)),
    ],
    ids=lambda value: "",
)
def test_what_it_does_not_go_with_is_refused(stage, flags, words):
    message = refused(stage, FLAG | flags)
    assert all(word in message for word in words), message


def test_defaults(stage):
    """A chain of three: the number of modules that published models bring."""
    args = stage.module("server_args").ServerArgs.from_kwargs(model_path="m", device="cpu", **EAGLE, **FLAG)
    shape = (args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens)
    assert shape == TREE


@pytest.mark.gpu
@pytest.mark.needs("triton")
@pytest.mark.parametrize("spec", [SPEC, models.EAGLE3], ids=lambda spec: spec.name)
def test_on_a_gpu(stage, engines, zoo, spec):
    """All graphs recorded at the start, and a batch that shrinks."""
    check(zoo, engines.get(spec, tree=TREE, **FLAG, **GPU), zoo.prompts(LENGTHS, NEW, spec), spec)
