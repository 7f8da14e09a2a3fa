"""The door at its edges: threads, broken steps, dropped streams, pools of one page, arguments of the wrong
type, damaged model folders, and numbers against transformers. Each test once failed, or guards what nearly
did.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
import time

import pytest
import torch

from stages.part4_worker import Engine
from stages.part4_worker.managers.schedule_batch import Req, ScheduleBatch
from stages.part4_worker.managers.schedule_policy import PrefillAdder
from tests.contract import models
from tests.contract.harness import Zoo, run

TREE = (3, 2, 8)
GREEDY = {"temperature": 0, "max_new_tokens": 24}
ODD = dataclasses.replace(
    models.SCALED_ROPE, name="odd", hidden=60, heads=5, kv_heads=1, head_dim=24, qkv_bias=True, shards=3
)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture
def make(zoo):
    """make(spec, tree, **flags): an engine that is shut down with the test."""
    made = []

    def build(spec=models.BASE, tree=TREE, **flags) -> Engine:
        given = {
            "model_path": str(zoo.target(spec)), "skip_tokenizer_init": True, "device": "cpu",
            "attention_backend": "torch_native", "max_total_tokens": 1024, "max_running_requests": 8,
            "chunked_prefill_size": -1,
        }  # fmt: skip
        if tree is not None:
            given |= {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(zoo.head(spec))}
            names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
            given |= dict(zip(names, tree, strict=True))
        made.append(Engine(**(given | flags)))
        return made[-1]

    yield build
    for engine in made:
        engine.shutdown()


@pytest.fixture
def engine(make) -> Engine:
    return make()


def assert_idle(engine: Engine) -> None:
    info = engine.get_server_info()
    assert info["available_size"] + info["evictable_size"] == info["max_total_num_tokens"]
    assert info["protected_size"] == 0 and engine.scheduler.is_idle() and not engine.scheduler.waiting_queue


def assert_whole(engine: Engine, zoo: Zoo) -> None:
    assert_idle(engine)
    prompt = zoo.prompts((9,), 24)[0]
    assert engine.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"] == zoo.r0(
        prompt, max_new_tokens=24
    )
    assert_idle(engine)


# ---- streams and aborts ----


@pytest.mark.parametrize("begun", [False, True])
def test_a_dropped_stream_aborts_whether_or_not_it_was_read(engine, zoo, begun):
    stream = engine.generate(input_ids=[[5, 6, 7], [8, 9]], sampling_params=GREEDY, stream=True)
    if begun:
        next(stream)
    del stream
    gc.collect()
    assert_whole(engine, zoo)


def test_an_ended_request_cannot_be_aborted(engine):
    engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY, rid="x")
    assert engine.abort_request("x") is False


def test_a_stream_leaves_another_call_with_its_old_id_alone(engine, zoo):
    """Of two streamed requests one ends; its id is used again; dropping the stream ends only the other."""
    prompt = zoo.prompts((9,), 24)[0]
    params = [{"temperature": 0, "max_new_tokens": 1}, {"temperature": 0, "max_new_tokens": 200}]
    old = engine.generate(input_ids=[prompt, [3, 4]], sampling_params=params, rid=["x", "y"], stream=True)
    while next(old)["meta_info"]["finish_reason"] is None:
        pass
    new = engine.generate(input_ids=prompt, sampling_params=GREEDY, rid="x", stream=True)
    old.close()
    assert list(new)[-1]["output_ids"] == zoo.r0(prompt, max_new_tokens=24)
    assert_idle(engine)


@pytest.mark.parametrize("phase", ["draft", "verify", "forward_draft_extend_after_decode", "commit"])
def test_an_abort_from_inside_a_step_waits_for_its_end(engine, zoo, monkeypatch, phase):
    """As from a signal handler, or a stream collected as garbage, in the stepping thread itself."""
    prompts = zoo.prompts((9, 12), 24)
    worker = engine.scheduler.draft_worker
    real = getattr(worker, phase)
    answers = []

    def aborting(*args):
        answers.append(engine.abort_request("victim"))
        return real(*args)

    monkeypatch.setattr(worker, phase, aborting)
    results = engine.generate(input_ids=prompts, sampling_params=GREEDY, rid=["victim", "other"])
    assert answers[0] is True and not any(answers[1:])
    assert results[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert results[1]["output_ids"] == zoo.r0(prompts[1], max_new_tokens=24)
    monkeypatch.undo()
    assert_whole(engine, zoo)


def test_a_result_is_not_made_while_another_thread_books_its_step(engine, zoo, monkeypatch):
    """Tokens, scores and states of a streamed dict belong together, whoever ran the step."""
    prompts = zoo.prompts((9, 12, 7), 24)
    real, inside = Req.append_output, threading.Event()

    def slow(req, token_id):
        real(req, token_id)
        if threading.current_thread() is other and req.origin_input_ids == prompts[1]:
            inside.set()
            time.sleep(0.01)  # the token is there, its score is not
            inside.clear()

    monkeypatch.setattr(Req, "append_output", slow)
    arguments = {"sampling_params": GREEDY, "return_logprob": True, "return_hidden_states": True}
    other = threading.Thread(target=engine.generate, kwargs={"input_ids": prompts[2], **arguments})
    stream = engine.generate(input_ids=prompts[:2], stream=True, **arguments)
    other.start()
    last = {}
    for result in stream:
        meta, count = result["meta_info"], len(result["output_ids"])
        assert len(meta["output_token_logprobs"]) == len(meta["hidden_states"]) == count
        last[result["index"]] = result["output_ids"]
        inside.wait(0.05)  # before the second request is looked at
    other.join(30)
    assert last == {i: zoo.r0(prompts[i], max_new_tokens=24) for i in range(2)}


# ---- steps that break off ----


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "owner, name",
    [
        ("scheduler", "_merge_last_prefill"),
        ("scheduler", "run_batch"),
        ("draft_worker", "forward_target_extend"),
        ("draft_worker", "verify"),
        ("draft_worker", "commit"),
        ("tree_cache", "cache_unfinished_req"),
        ("token_to_kv_pool_allocator", "alloc_extend"),
    ],
)
def test_a_broken_step_is_told_to_everybody(engine, zoo, monkeypatch, owner, name, error):
    """The caller gets the exception, the others' requests end with its text, and the engine is whole."""
    scheduler = engine.scheduler
    part = scheduler if owner == "scheduler" else getattr(scheduler, owner)

    def broken(*args, **kwargs):
        raise error("boom")

    stream = engine.generate(input_ids=[8, 9], sampling_params=GREEDY, stream=True)
    monkeypatch.setattr(part, name, broken)
    with pytest.raises(error, match="boom"):
        engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)
    monkeypatch.undo()
    reasons = [result["meta_info"]["finish_reason"] for result in stream]
    assert [r["type"] for r in reasons] == ["abort"] and "boom" in reasons[0]["message"]
    assert_whole(engine, zoo)


def test_shutdown_ends_live_requests(engine):
    stream = engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 200}, stream=True)
    next(stream)
    engine.shutdown()
    assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"


# ---- small pools ----


@pytest.mark.parametrize("tree", [None, (3, 1, 4)])
def test_a_pool_of_one_page_runs_what_fits_it(make, zoo, tree):
    """Room is counted in pages: the rest of the prompt's own page is room for the first step."""
    prompt = zoo.prompts((10,), 24)[0]
    result = make(tree=tree, page_size=16, max_total_tokens=16).generate(
        input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 3}
    )
    assert result["output_ids"] == zoo.r0(prompt, max_new_tokens=3)


@pytest.mark.parametrize("chunk", [-1, 3, 4])
def test_a_resumed_request_that_is_read_in_chunks_drafts_as_before(make, zoo, monkeypatch, chunk):
    """At a chunk's end inside the output the draft's pair holds the token there, not the last one."""
    prompts = zoo.prompts((9, 12, 7), 24)
    engine = make(chunked_prefill_size=chunk, disable_radix_cache=True)
    real, retracted = ScheduleBatch.check_decode_mem, []

    def check(batch, *args):
        full = len(retracted) < 2 and min(len(r.output_ids) for r in batch.reqs) >= 9
        if full and batch.batch_size() > 1:
            retracted.append(batch.batch_size())
            return False
        return real(batch, *args)

    monkeypatch.setattr(ScheduleBatch, "check_decode_mem", check)
    done = run(engine, prompts, GREEDY, ref=zoo.ref(), ref_head=zoo.ref_head())
    assert engine.get_server_info()["num_retractions"] == 1
    assert done.tokens == [zoo.r0(p, max_new_tokens=24) for p in prompts]


def test_prompt_scores_of_a_retracted_chunk_come_once(make, monkeypatch):
    """A prompt pushed back between two chunks goes on scoring where it had got to."""
    engine = make(chunked_prefill_size=8)
    real_check, real_add = ScheduleBatch.check_decode_mem, PrefillAdder.add_chunked_req
    calls, retracted = [], []

    def check(batch, *args):
        if engine.scheduler.chunked_req is not None and not retracted:
            retracted.append(engine.scheduler.chunked_req)
            return False
        return real_check(batch, *args)

    def add(adder, req):
        calls.append(req)
        return len(calls) != 2 and real_add(adder, req)

    arguments = {
        "input_ids": [[5, 6, 7], list(range(10, 50))], "sampling_params": GREEDY, "return_logprob": True,
        "logprob_start_len": 0,
    }  # fmt: skip
    wanted = engine.generate(**arguments)[1]
    engine.flush_cache()
    monkeypatch.setattr(ScheduleBatch, "check_decode_mem", check)
    monkeypatch.setattr(PrefillAdder, "add_chunked_req", add)
    calls.clear()
    result = engine.generate(**arguments)[1]
    assert len(retracted) == 1 and engine.get_server_info()["num_retractions"] == 1
    scores = result["meta_info"]["input_token_logprobs"]
    assert [t for _, t, _ in scores] == list(range(10, 50))
    truth = wanted["meta_info"]["input_token_logprobs"]
    assert [s for s, _, _ in scores[1:]] == pytest.approx([s for s, _, _ in truth[1:]], abs=1e-4)
    assert result["output_ids"] == wanted["output_ids"]


# ---- arguments ----

WRONG = [
    {"rid": 5},
    {"rid": [["a"]]},
    {"stream": "no"},
    {"return_logprob": "yes"},
    {"return_hidden_states": [True]},
    {"logprob_start_len": 0},
    {"return_logprob": True, "top_logprobs_num": True},
    {"return_logprob": True, "logprob_start_len": 1.5},
    {"return_logprob": True, "logprob_start_len": "0"},
    {"return_logprob": True, "token_ids_logprob": 5},
    {"return_logprob": True, "token_ids_logprob": [True]},
    {"sampling_params": []},
    {"sampling_params": 0},
    {"sampling_params": {"repetition_penalty": 1e-300}},
    {"input_ids": [[1], 2]},
    {"input_ids": [True, 2]},
    {"input_ids": [None]},
    {"input_ids": "abc"},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_arguments_of_the_wrong_type_are_refused_before_anything_runs(engine, wrong):
    """A step that meets one would break off, and with it everybody's requests."""
    named = next(iter(wrong.get("sampling_params") or [next(reversed(wrong))]))
    with pytest.raises(ValueError, match=named):
        engine.generate(**({"input_ids": [5, 6, 7], "sampling_params": GREEDY} | wrong))
    assert_idle(engine)


@pytest.mark.parametrize("tree", [None, TREE])
@pytest.mark.parametrize(
    "nearly",
    [{"top_p": 1e-50}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-5}, {"top_k": 1}],
    ids=str,
)
def test_sampling_that_leaves_one_token_is_greedy(make, zoo, tree, nearly):
    prompt = zoo.prompts((9,), 24)[0]
    result = make(tree=tree).generate(input_ids=prompt, sampling_params={"max_new_tokens": 24, **nearly})
    assert result["output_ids"] == zoo.r0(prompt, max_new_tokens=24)


def test_more_beams_than_tokens_are_refused(make):
    with pytest.raises(ValueError, match="speculative_eagle_topk=16"):
        make(models.TOY8, (2, 16, 8))


# ---- model folders ----


@pytest.mark.parametrize(
    "change, word",
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_a_config_that_would_change_the_numbers_is_refused(make, zoo, tmp_path, change, word):
    folder = models.copy_with_config(zoo.target(), tmp_path / "changed", **change)
    with pytest.raises(ValueError, match=word):
        make(tree=None, model_path=str(folder))


def test_an_end_token_outside_the_vocabulary_never_comes(make, zoo, tmp_path):
    folder = models.copy_with_config(zoo.target(), tmp_path / "changed", eos_token_id=[2, 500])
    engine = make(tree=None, model_path=str(folder))
    result = engine.generate(input_ids=[5], sampling_params={"min_new_tokens": 3, "max_new_tokens": 4})
    assert len(result["output_ids"]) == 4


@pytest.mark.parametrize(
    "file, content",
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("generation_config.json", b"x"),
        ("model.safetensors", b""),
        ("model.safetensors", None),
    ],
)
def test_a_damaged_folder_is_refused_by_file(make, zoo, tmp_path, file, content):
    folder = models.copy_with_config(zoo.target(), tmp_path / "damaged")
    whole = (folder / file).read_bytes() if content is None else b""
    (folder / file).write_bytes(whole[:-100] if content is None else content)
    with pytest.raises(ValueError, match=file):
        make(tree=None, model_path=str(folder))


# ---- against transformers ----


@pytest.mark.parametrize("spec", [models.BASE, models.TIED, ODD], ids=lambda s: s.name)
def test_tokens_scores_and_states_are_those_of_transformers(make, zoo, spec):
    """Llama 3 rotary scaling, biases, shards, a tied head, and a head size of its own, in float32."""
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(
        zoo.target(spec), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if spec.rope_scaling:
        assert json.loads((zoo.target(spec) / "config.json").read_text())["rope_scaling"]
    prompts = zoo.prompts((5, 100), 24, spec)
    results = make(spec).generate(
        input_ids=prompts, sampling_params={**GREEDY, "ignore_eos": True}, return_logprob=True,
        logprob_start_len=0, return_hidden_states=True,
    )  # fmt: skip
    for prompt, result in zip(prompts, results, strict=True):
        meta, ids = result["meta_info"], prompt + result["output_ids"]
        with torch.no_grad():
            output = reference(torch.tensor([ids]), output_hidden_states=True)
        logprobs = torch.log_softmax(output.logits[0], dim=-1)
        assert logprobs[len(prompt) - 1 : -1].argmax(-1).tolist() == result["output_ids"]
        scored = [score for score, _, _ in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]
        truth = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scored), truth, atol=1e-4, rtol=1e-4)
        states = output.hidden_states[-1][0, len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.tensor(meta["hidden_states"]), states, atol=1e-4, rtol=1e-4)


def test_the_event_loop_runs_until_nothing_is_left(engine):
    """`event_loop_normal` is `step` in a loop: what was admitted before it is done behind it."""
    stream = engine.generate(input_ids=[[5, 6], [7]], sampling_params=GREEDY, stream=True)
    engine.scheduler.event_loop_normal()
    last = {result["index"]: result for result in stream}
    assert [last[i]["meta_info"]["finish_reason"]["type"] for i in (0, 1)] == ["length", "length"]
    assert engine.scheduler.is_idle()
