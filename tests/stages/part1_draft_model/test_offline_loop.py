"""The loop beside the scheduler, in parts 1 and 2: what it answers, leaves behind and refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.contract import models
from tests.contract.harness import Engines, Stage, Zoo, tree_id
from tests.contract.probe import Probe, swapped
from tests.contract.reference import simulate

CHAINS = [(1, 1, 2), (3, 1, 4), (5, 1, 6)]
CHAIN = (3, 1, 4)
LENGTHS = (1, 5, 16, 13, 9)
LIMITS = (16, 3, 24, 1, 10)  # requests leave the batch one by one, and one never enters it


@pytest.fixture(scope="module")
def zoo(tmp_path_factory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module", params=["part1_draft_model", "part2_cudagraph_dp"])
def engines(request, zoo):
    made = Engines(Stage(request.param), zoo)
    yield made
    made.close()


def greedy(*limits: int) -> list[dict]:
    return [{"temperature": 0, "max_new_tokens": limit} for limit in limits]


def generate(engine, prompts, params, **more) -> list[dict]:
    results = engine.generate(input_ids=prompts, sampling_params=params, **more)
    Probe(engine).check_idle()
    return results


def ids_of(results) -> list[list[int]]:
    return [result["output_ids"] for result in results]


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("tree", CHAINS, ids=tree_id)
def test_answers_and_rounds(engines, zoo, tree, page):
    """Tokens are plain decoding's; rounds are those of the simulation, as far as each request's own end."""
    prompts = zoo.prompts(LENGTHS, 24)
    engine = engines.get(tree=tree, page_size=page)
    results = generate(engine, prompts, greedy(*LIMITS))
    assert ids_of(results) == [zoo.r0(p, max_new_tokens=n) for p, n in zip(prompts, LIMITS, strict=True)]
    for prompt, result in zip(prompts, results, strict=True):
        rounds, meta = simulate(zoo.ref_head(), prompt, result["output_ids"], *tree), result["meta_info"]
        assert meta["spec_verify_ct"] == len(rounds)
        assert meta["tokens_per_round"] == (sum(rounds) / len(rounds) if rounds else 0.0)
        assert meta["spec_num_proposed_drafts"] == tree[0] * len(rounds)
    info = engine.get_server_info()
    most = max(result["meta_info"]["spec_verify_ct"] for result in results)
    assert (info["forward_ct_prefill"], info["forward_ct_decode"]) == (1, most)


def test_forwards_of_a_round(engines, zoo):
    engine, prompts = engines.get(tree=CHAIN), zoo.prompts((5, 9), 20)
    before = engine.get_server_info()["forward_ct"]
    generate(engine, prompts, greedy(20, 20))
    info = engine.get_server_info()
    target, draft = (info["forward_ct"][name] - before[name] for name in ("target", "draft"))
    rounds = info["forward_ct_decode"]
    assert (target, draft) == (1 + rounds, 1 + CHAIN[0] * rounds)


@pytest.mark.parametrize("tree", CHAINS, ids=tree_id)
def test_a_sampled_text_is_plain_decodings_own(engines, zoo, tree):
    """Each token is drawn with the number of its position, whoever drafted it."""
    prompts = zoo.prompts((5, 9, 7, 12), 16)
    params = [
        {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True, "sampling_seed": 3 + i}
        for i in range(4)
    ]
    params[1] |= {"top_p": 0.7, "temperature": 1.5}
    params[2] |= {"top_k": 5, "min_p": 0.1}
    params[3] |= {"temperature": 0}
    plain = generate(engines.get(), prompts, params)
    drafted = generate(engines.get(tree=tree), prompts, params)
    assert ids_of(drafted) == ids_of(plain)
    assert any(r["meta_info"]["spec_num_correct_drafts"] for r in drafted[:3]), (
        "no sampled draft was accepted"
    )


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("poison", [False, True])
def test_kv_after_every_round(engines, zoo, page, poison):
    """Target KV is a fresh pass's, draft KV a teacher-forced one's, whatever lies in free slots."""
    engine, rounds = engines.get(tree=CHAIN, page_size=page), []
    loop, probe = engine.scheduler, Probe(engine)
    real, table = loop.decode, loop.req_to_token_pool.req_to_token_host

    def decode(batch):
        if poison:
            probe.poison()
        real(batch)
        for row, req in enumerate(batch.reqs):
            slots, tokens = table[req.req_pool_idx, : req.kv_len], req.all_token_ids()
            assert batch.seq_lens[row] == req.kv_len == len(tokens) - 1
            k, v = probe.kv(probe.target_runner, slots)
            want = zoo.ref().run(tokens[:-1])
            torch.testing.assert_close(k, want.k, atol=2e-4, rtol=1e-3)
            torch.testing.assert_close(v, want.v, atol=2e-4, rtol=1e-3)
            k, v = probe.kv(probe.draft_runner, slots)
            want_k, want_v, _ = zoo.ref_head().teacher_forced(tokens)
            torch.testing.assert_close(k[0], want_k, atol=2e-4, rtol=1e-3)
            torch.testing.assert_close(v[0], want_v, atol=2e-4, rtol=1e-3)
        rounds.append(len(batch.reqs))

    prompts = zoo.prompts(LENGTHS, 24)
    with swapped(loop, "decode", decode):
        results = generate(engine, prompts, greedy(*LIMITS))
    assert ids_of(results) == [zoo.r0(p, max_new_tokens=n) for p, n in zip(prompts, LIMITS, strict=True)]
    assert len(rounds) > 4 and rounds[0] > rounds[-2] > rounds[-1] == 0


def test_one_upload_and_one_read_in_a_round(engines, zoo):
    counts = engines.stage.module("model_executor.device_io").counts
    engine, seen = engines.get(tree=CHAIN), []
    real = engine.scheduler.decode

    def decode(batch):
        before, rows = dict(counts), len(batch.reqs)
        real(batch)
        left = len(batch.reqs) < rows  # then the index of the rows that stay is one upload more
        seen.append((counts["uploads"] - before["uploads"] - left, counts["downloads"] - before["downloads"]))

    with swapped(engine.scheduler, "decode", decode):
        generate(engine, zoo.prompts((5, 9, 7), 20), greedy(20, 12, 6))
    assert set(seen) == {(1, 1)} and len(seen) > 3


@pytest.mark.parametrize("kind", ["stop_token_ids", "stop"])
def test_a_stop_inside_an_accepted_run(engines, zoo, kind):
    """Nothing behind it is kept, wherever in its round it lies."""
    engine = engines.get(tree=(5, 1, 6), skip_tokenizer_init=False)
    prompt = zoo.prompts((9,), 24)[0]
    full = zoo.r0(prompt, max_new_tokens=24)
    for token in list(dict.fromkeys(full))[1:9]:
        text = engine.tokenizer.decode([token])
        if kind == "stop" and not text.strip():
            continue
        stop = {"stop_token_ids": [token]} if kind == "stop_token_ids" else {"stop": [text]}
        plain = generate(engines.get(skip_tokenizer_init=False), [prompt], greedy(24)[0] | stop)
        drafted = generate(engine, [prompt], greedy(24)[0] | stop)
        assert [(r["output_ids"], r["text"], r["meta_info"]["finish_reason"]) for r in drafted] == [
            (r["output_ids"], r["text"], r["meta_info"]["finish_reason"]) for r in plain
        ]


def test_hidden_states_are_those_of_plain_decoding(engines, zoo):
    prompts = zoo.prompts((5, 9), 16)
    rows = [
        [np.array(r["meta_info"]["hidden_states"]) for r in generate(e, prompts, greedy(16, 9), **asked)]
        for e in (engines.get(), engines.get(tree=CHAIN))
        for asked in [{"return_hidden_states": True}]
    ]
    for plain, drafted in zip(*rows, strict=True):
        np.testing.assert_allclose(drafted, plain, atol=1e-4)


def test_the_context_limit_ends_a_request(engines, zoo):
    """The last chain sticks out over the end of the row."""
    prompts = [p[:20] for p in zoo.prompts((20, 21), 24)]
    engine = engines.get(tree=(5, 1, 6), context_length=32)
    assert ids_of(generate(engine, prompts, greedy(64, 64))) == [
        zoo.r0(p, max_new_tokens=12) for p in prompts
    ]


def test_the_last_chain_writes_to_its_own_slots(engines, zoo):
    """In every round up to the last, which sticks out over what a request may write."""
    engine = engines.get(tree=CHAIN)
    loop, probe, rounds = engine.scheduler, Probe(engine), []
    real = loop.draft

    def draft(batch):
        verify_input = real(batch)
        slots = batch.out_cache_loc.flatten().tolist()
        assert len(set(slots)) == len(slots) and 0 not in slots, "two rows write to one place"
        assert not set(slots) & set(probe.free_slots().tolist()), "nobody was given these slots"
        rounds.append(len(slots))
        return verify_input

    with swapped(loop, "draft", draft):
        generate(engine, zoo.prompts(LENGTHS, 24), greedy(*LIMITS))
    assert len(rounds) > 4


# ---- what it refuses ----


@pytest.mark.parametrize(
    "asked",
    [
        {"stream": True},
        {"return_logprob": True},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"min_new_tokens": 2},
        {"logit_bias": {5: 1.0}},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_takes_a_scheduler_is_refused(engines, zoo, asked):
    """With the name of the stage that brings it; nothing of the call has been started."""
    engine, prompts = engines.get(tree=CHAIN), zoo.prompts((5, 9), 16)
    name = next(iter(asked))
    is_argument = name in ("stream", "return_logprob")
    params = greedy(16)[0] | ({} if is_argument else asked)
    with pytest.raises(ValueError, match=f"{name}=.*part3_scheduler"):
        engine.generate(
            input_ids=prompts, sampling_params=[greedy(16)[0], params], **(asked if is_argument else {})
        )
    assert ids_of(generate(engine, prompts, greedy(16, 16))) == [zoo.r0(p) for p in prompts]
    plain = engines.get()  # the scheduler has all of it
    plain.generate(input_ids=prompts, sampling_params=params, **({} if name == "stream" else {}))


@pytest.mark.parametrize(
    "flags, prompts, limit",
    [({"max_running_requests": 2}, (5, 9, 7), 8), ({"max_total_tokens": 64}, (9, 12), 24)],
)
def test_a_call_larger_than_the_pools_is_refused(engines, zoo, flags, prompts, limit):
    """The sentence has the numbers. As many as fit are answered; another call takes the rest."""
    engine, prompts = engines.get(tree=CHAIN, **flags), zoo.prompts(prompts, limit)
    with pytest.raises(ValueError, match="part3_scheduler") as caught:
        engine.generate(input_ids=prompts, sampling_params=greedy(limit)[0])
    need = sum(len(p) + limit + CHAIN[2] for p in prompts)
    assert f"{len(prompts)} requests and {need} KV slots" in str(caught.value)
    fits = prompts[:-1]
    assert ids_of(generate(engine, fits, greedy(limit)[0])) == [zoo.r0(p, max_new_tokens=limit) for p in fits]


def test_calls_that_wait_take_turns(engines, zoo):
    """Two calls that fit one by one and not together, both there before the first step."""
    engine, prompts = engines.get(tree=CHAIN, max_running_requests=2), zoo.prompts((5, 9, 7, 12), 8)
    loop, steps = engine.scheduler, []
    real = loop.prefill

    def prefill(reqs):
        steps.append(len(reqs))
        return real(reqs)

    requests = [make(engines, engine, pair, 8) for pair in (prompts[:2], prompts[2:])]
    for req in (req for reqs in requests for req in reqs):
        loop.add_request(req)
    with swapped(loop, "prefill", prefill):
        assert [loop.step(), loop.step(), loop.step()] == [True, True, False]
    assert steps == [2, 2]
    found = [req.output_ids for reqs in requests for req in reqs]
    assert found == [zoo.r0(p, max_new_tokens=8) for p in prompts]
    Probe(engine).check_idle()


def make(engines, engine, prompts, limit):
    io_struct = engines.stage.module("managers.io_struct")
    names = ("prompt", "return_logprob", "logprob_start_len", "token_ids_logprob", "rid", "routed_dp_rank")
    more = dict.fromkeys(names) | {"return_logprob": False, "top_logprobs_num": 0}
    reqs = io_struct.GenerateRequests.from_arguments(
        None, engine.scheduler.model_config, engine.server_args, input_ids=prompts,
        sampling_params=greedy(limit)[0], return_hidden_states=False, stream=False, **more,
    ).reqs  # fmt: skip
    for number, req in enumerate(reqs):
        req.seed = number
    return reqs


@pytest.mark.parametrize("flags", [{"chunked_prefill_size": 64}, {"max_prefill_tokens": 64}])
def test_a_prefill_in_parts_is_refused_at_the_start(engines, flags):
    with pytest.raises(ValueError, match=f"{next(iter(flags))}=64.*part3_scheduler"):
        engines.fresh(tree=CHAIN, **flags)


# ---- when something goes wrong ----


def test_a_request_without_finite_logits_ends_alone(engines, zoo):
    engine, calls = engines.get(tree=CHAIN), []
    probe, prompts = Probe(engine), zoo.prompts((5, 9, 7), 16)

    def spoil(module, args, output):
        if not probe.is_capturing:
            calls.append(None)
            if len(calls) == 3:
                rows = len(output.topk_p) // 3
                output.topk_p[rows : 2 * rows] = float("nan")

    handle = probe.target_runner.model.register_forward_hook(spoil)
    try:
        results = generate(engine, prompts, greedy(16, 16, 16))
    finally:
        handle.remove()
    assert results[1]["meta_info"]["finish_reason"]["type"] == "abort"
    wanted = [zoo.r0(p) for p in prompts]
    assert ids_of(results)[::2] == wanted[::2]
    assert ids_of(results)[1] == wanted[1][: len(ids_of(results)[1])]
    assert ids_of(generate(engine, prompts, greedy(16, 16, 16))) == wanted


def test_an_interrupt_leaves_the_engine_whole(engines, zoo):
    engine, prompts = engines.get(tree=CHAIN), zoo.prompts((5, 9), 16)
    real, calls = engine.scheduler.draft_worker.verify, []

    def verify(*args):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    with swapped(engine.scheduler.draft_worker, "verify", verify), pytest.raises(KeyboardInterrupt):
        engine.generate(input_ids=prompts, sampling_params=greedy(16, 16))
    assert ids_of(generate(engine, prompts, greedy(16, 16))) == [zoo.r0(p) for p in prompts]


@pytest.mark.parametrize("spec", [models.GROUP3, models.TIED, models.BIASED], ids=lambda spec: spec.name)
def test_other_llamas(engines, zoo, spec):
    prompts = zoo.prompts((3, 11), 12, spec=spec)
    results = generate(engines.get(spec, tree=CHAIN), prompts, greedy(12, 12))
    assert ids_of(results) == [zoo.r0(p, spec, max_new_tokens=12) for p in prompts]
