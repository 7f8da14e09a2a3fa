"""Steps that change from round to round: the invariants again, whatever follows whatever, and the policy at
work. What is drafted is a chain, so a round of s steps has to accept what a chain of s steps accepts there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import zlib
from types import SimpleNamespace

import pytest

from tests.contract import drafters, models
from tests.contract.harness import run
from tests.contract.probe import Probe, swapped
from tests.contract.reference import simulate
from tests.contract.test_refusals import DP, EAGLE, refused
from tests.contract.test_sampling_law import check_law, draw
from tests.contract.test_triton import GPU

pytestmark = pytest.mark.needs("adaptive")
LENGTHS = (1, 5, 16, 13, 9)
NEW = 24
STEPS = (0, 1, 3, 6)
ALL = {"candidate_steps": list(STEPS), "warmup_batches": 0, "update_interval": 1}
# Every change from one number of steps to another, and every number twice in a row.
ORDERS = [0, 0, 1, 1, 3, 3, 6, 6, 0, 3, 0, 6, 1, 6, 3, 1, 0]
METHODS = [models.BASE, models.EAGLE3]
method = pytest.mark.parametrize("spec", METHODS, ids=lambda spec: spec.name)


@pytest.fixture
def adaptive(engines, tmp_path_factory):
    """An engine of the session by its slots; the same slots are the same file."""
    folder = tmp_path_factory.getbasetemp()

    def get(spec=models.BASE, slots=None, **flags):
        text = json.dumps(slots or {"1": ALL})
        path = folder / f"adaptive-{zlib.crc32(text.encode())}.json"
        path.write_text(text)
        chain = {
            "speculative_num_steps": None,
            "speculative_eagle_topk": None,
            "speculative_num_draft_tokens": None,
            "speculative_adaptive": True,
            "speculative_adaptive_config": str(path),
        }
        return engines.get(spec, tree=(3, 1, 4), **chain, **flags)

    return get


@contextlib.contextmanager
def chosen(engine, script=None):
    """The steps of every decode step, in order; with `script` they are its, over and over."""
    worker, seen = Probe(engine).draft_worker, []
    real, numbers = worker.params.get_steps_for_batch, None if script is None else itertools.cycle(script)

    def get_steps_for_batch(batch_size):
        seen.append(real(batch_size) if numbers is None else next(numbers))
        return seen[-1]

    with swapped(worker.params, "get_steps_for_batch", get_steps_for_batch):
        yield seen


def rounds_of(head, prompt, output, steps):
    """Tokens of each round if the rounds have `steps`, in order."""
    rounds, done = [], 1
    for number in steps:
        if done >= len(output):
            break
        if number == 0:
            rounds.append(1)
        else:
            rest = simulate(head, [*prompt, *output[: done - 1]], output[done - 1 :], number, 1, number + 1)
            rounds.append(rest[0])
        done += rounds[-1]
    return rounds


def check(zoo, engine, spec, prompts, new=NEW, script=ORDERS, **more):
    """Greedy tokens, KV of both models after each step, and what every round accepted."""
    head = zoo.ref_head(spec)
    with chosen(engine, script):
        done = run(engine, prompts, {"max_new_tokens": new}, ref=zoo.ref(spec), ref_head=head, **more)
    assert done.tokens == [zoo.r0(p, spec, max_new_tokens=new) for p in prompts]
    return done


@method
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"page_size": 4, "chunked_prefill_size": 7},
        {"disable_cuda_graph": True},
        {"max_running_requests": 2, "disable_radix_cache": True},
    ],
    ids=lambda flags: ",".join(f"{k}={v}" for k, v in flags.items()) or "default",
)
def test_any_order_of_steps(stage, adaptive, zoo, spec, flags):
    """Tokens, and KV of target and draft, whatever the steps of the round before."""
    check(zoo, adaptive(spec, **flags), spec, zoo.prompts(LENGTHS, NEW, spec))


@method
@pytest.mark.parametrize("first", STEPS)
def test_a_round_accepts_what_its_chain_accepts(stage, adaptive, zoo, spec, first):
    """And so the drafts of a round do not suffer from what the round before was like."""
    prompt = zoo.prompts((9,), NEW, spec)[0]
    script = [first, *ORDERS]
    done = check(zoo, adaptive(spec), spec, [prompt], script=script)
    assert done.rounds == [rounds_of(zoo.ref_head(spec), prompt, done.tokens[0], itertools.cycle(script))]


def test_the_books_count_what_was_drafted(stage, adaptive, zoo):
    prompt = zoo.prompts((9,), NEW)[0]
    done = check(zoo, adaptive(), models.BASE, [prompt])
    used = list(itertools.islice(itertools.cycle(ORDERS), len(done.rounds[0])))
    meta = done.results[0]["meta_info"]
    assert meta["spec_verify_ct"] == len(used) and meta["spec_num_proposed_drafts"] == sum(used)


def test_what_is_chosen_is_what_requests_accepted(stage, adaptive, zoo):
    """Neither padding rows of a replay nor rounds of a request that has ended have a say."""
    slots = {"1": {"candidate_steps": [1, 3], "warmup_batches": 0, "update_interval": 1, "ema_alpha": 0.6}}
    prompts, orders = zoo.prompts((9, 5, 7), 40), []
    for flags in ({"cuda_graph_bs": [8]}, {"disable_cuda_graph": True}):
        engine = adaptive(slots=slots, **flags)
        for prompt in prompts:
            with chosen(engine) as seen:
                run(engine, [prompt], {"max_new_tokens": 40})
            orders.append(seen)
    assert orders[:3] == orders[3:]
    assert {steps for order in orders for steps in order} == {1, 3}


@method
def test_without_drafts_it_is_plain_decoding(stage, adaptive, zoo, spec):
    prompts = zoo.prompts(LENGTHS, NEW, spec)
    done = check(zoo, adaptive(spec), spec, prompts, script=[0])
    assert all(set(rounds) <= {1} for rounds in done.rounds)


def test_a_small_pool_retracts(stage, adaptive, zoo):
    prompts = zoo.prompts((9, 12, 7, 14, 10), 24)
    engine = adaptive(max_total_tokens=112)

    def optimist(probe):
        probe.scheduler.new_token_ratio = 0.1

    check(zoo, engine, models.BASE, prompts, new=24, before=optimist)
    assert engine.get_server_info()["num_retractions"] > 0


def test_what_a_request_holds_is_enough_for_the_most_steps(stage, adaptive, zoo):
    """Reserved is what the longest chain needs, or a switch would write behind the end."""
    scheduler = Probe(adaptive()).scheduler
    assert scheduler.alloc_len_per_decode == max(STEPS) + 1
    assert {w.alloc_len_per_decode() for w in scheduler.draft_worker.by_steps.values()} == {max(STEPS) + 1}


def test_what_requests_ask_for(stage, adaptive, zoo):
    """Penalties, scores and hidden states in rounds of every shape, beside requests without."""
    prompts = zoo.prompts((5, 9, 13), NEW)
    asks = [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {},
        {"logit_bias": {"7": 3.0}, "min_new_tokens": 5},
    ]
    for more in ({}, {"return_logprob": True, "top_logprobs_num": 2}, {"return_hidden_states": True}):
        engine = adaptive()
        with chosen(engine, ORDERS):
            done = run(engine, prompts, [{"max_new_tokens": NEW, **ask} for ask in asks], **more)
        assert done.tokens == [
            zoo.r0(p, max_new_tokens=NEW, **ask) for p, ask in zip(prompts, asks, strict=True)
        ]
        for result in done.results:
            scores = result["meta_info"].get("output_token_logprobs")
            assert scores is None or len(scores) == NEW


@pytest.mark.parametrize("rejects", [False, True], ids=["tree", "rejection"])
def test_joint_law_at_temperature_one(stage, adaptive, zoo, rejects):
    """A round that drafts nothing draws its token by the target's law, and so does whatever comes behind."""
    spec, prompt = models.TOY8, [3, 1, 4, 1, 5]
    engine = adaptive(
        spec,
        max_total_tokens=16384,
        max_running_requests=256,
        speculative_use_rejection_sampling=rejects or None,
    )
    with chosen(engine, [0, 1, 3, 0, 3, 1]):
        check_law(zoo.ref(spec), prompt, draw(engine, prompt, {}))


# ---- the policy at work ----


def test_right_drafts_lengthen_and_wrong_ones_end_drafting(stage, adaptive, zoo):
    prompts = zoo.prompts((6, 9), NEW)
    for drafting, last in ((drafters.perfect, max(STEPS)), (drafters.never, 0)):
        engine = adaptive()
        with chosen(engine) as seen, contextlib.ExitStack() as stack:
            for worker in Probe(engine).draft_worker.by_steps.values():
                stack.enter_context(drafting(SimpleNamespace(draft_worker=worker), zoo.ref()))
            done = run(engine, prompts, {"max_new_tokens": NEW, "ignore_eos": True})
        assert done.tokens == [zoo.r0(p, max_new_tokens=NEW, ignore_eos=True) for p in prompts]
        assert last in seen and set(seen) <= set(STEPS)
        info = engine.get_server_info()
        assert info["spec_num_draft_tokens"] == info["spec_num_steps"] + 1


def test_a_batch_size_has_its_own_steps(stage, adaptive, zoo):
    """And its graphs are padded to, where there are graphs."""
    slots = {"1": {"candidate_steps": [3]}, "4": {"candidate_steps": [1]}}
    for flags, sizes in (({"disable_cuda_graph": True}, (2, 4)), ({"cuda_graph_bs": [1, 2, 4]}, (2, 3))):
        engine = adaptive(slots=slots, **flags)
        for bs, steps in zip(sizes, (3, 1), strict=True):
            engine.flush_cache()
            with chosen(engine) as seen:
                run(engine, zoo.prompts((5,) * bs, NEW), {"max_new_tokens": 6, "ignore_eos": True})
            assert seen[1] == steps  # in the first a request or two may still be on their way


def test_only_what_can_be_chosen_is_recorded(stage, adaptive, zoo):
    """And a small size may need more rows of the shared buffer than a large one that came before it."""
    slots = {"1": {"candidate_steps": [0, 5]}, "2": {"candidate_steps": [0]}}
    engine = adaptive(slots=slots, cuda_graph_bs=[1, 4])
    run(engine, zoo.prompts((5, 9, 3), NEW), {"max_new_tokens": 8, "ignore_eos": True})
    run(engine, zoo.prompts((5,), NEW), {"max_new_tokens": 8, "ignore_eos": True})
    verify = {key for key in engine.scheduler.graphs._graphs if key[0] == "verify"}
    assert verify == {("verify", 1), ("verify", 1, 1), ("verify", 4, 1)}


def test_flush_forgets_what_was_accepted(stage, adaptive, zoo):
    engine, seen = adaptive(), []
    for _ in range(2):
        engine.flush_cache()
        with chosen(engine) as steps:
            run(engine, zoo.prompts((9,), NEW), {"max_new_tokens": NEW})
        seen.append(steps)
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "flags, words",
    [
        (EAGLE | {"speculative_eagle_topk": 4}, ("speculative_eagle_topk=4", "upstream")),
        (EAGLE | DP, ("enable_dp_attention", "upstream")),
        (EAGLE | {"speculative_algorithm": "STANDALONE"}, ("STANDALONE", "upstream")),
        ({"speculative_algorithm": "NGRAM"}, ("NGRAM", "upstream")),
        (EAGLE | {"speculative_num_steps": 2}, ("speculative_num_steps=2", "0, 1, 3, 5, 7")),
        (EAGLE | {"speculative_adaptive_config": "no-such-file"}, ("no-such-file", "JSON")),
        (EAGLE | {"speculative_adaptive": False, "speculative_adaptive_config": "file"}, ("by itself",)),
        ({}, ("speculative_algorithm",)),
    ],
    ids=lambda value: "",
)
def test_what_it_does_not_go_with_is_refused(stage, flags, words):
    message = refused(stage, {"speculative_adaptive": True, **flags})
    assert "speculative_adaptive" in message and all(word in message for word in words), message


@pytest.mark.gpu
@pytest.mark.needs("triton")
@method
def test_on_a_gpu(stage, adaptive, zoo, spec):
    """All graphs recorded at the start, batches that shrink, every change of steps."""
    prompts = zoo.prompts(LENGTHS, NEW, spec)
    engine = adaptive(spec, **GPU)
    before = len(engine.scheduler.graphs._graphs)
    check(zoo, engine, spec, prompts)
    assert run(engine, prompts, {"max_new_tokens": NEW}).tokens == [
        zoo.r0(p, spec, max_new_tokens=NEW) for p in prompts
    ]
    assert len(engine.scheduler.graphs._graphs) == before
