"""What is not there or makes no sense is refused with a sentence, before anything is loaded or started."""

from __future__ import annotations

import pytest

from tests.contract import models
from tests.contract.harness import run, tree_id
from tests.contract.probe import Probe

EAGLE = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "a-head"}
DP = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
# Feature → keywords that ask for it. A stage that lacks the feature must refuse each of them.
REQUESTS = {
    "triton": [{"attention_backend": "triton"}],
    "flashinfer": [{"attention_backend": "flashinfer"}],
    "page": [{"page_size": 16}],
    "eagle": [EAGLE],
    "tree": [
        EAGLE | {"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}
    ],
    "page_tree": [
        EAGLE
        | {
            "page_size": 4,
            "speculative_num_steps": 2,
            "speculative_eagle_topk": 2,
            "speculative_num_draft_tokens": 4,
        }
    ],
    "sampling_verify": [EAGLE | {"speculative_accept_threshold_single": 0.5}],
    "spec_scheduler": [EAGLE | {"chunked_prefill_size": 64}, EAGLE | {"max_prefill_tokens": 64}],
    "nextn": [EAGLE | {"speculative_algorithm": "NEXTN"}],
    "eagle3": [EAGLE | {"speculative_algorithm": "EAGLE3"}],
    "token_map": [EAGLE | {"speculative_token_map": "map.pt"}],
    "cuda_graph": [{"cuda_graph_bs": [1, 2]}, {"cuda_graph_max_bs": 4}],
    "dp_attention": [DP],
    "dp_eagle": [EAGLE | DP],
    "overlap": [],  # on by default upstream; there is only a flag to switch it off
    "standalone": [EAGLE | {"speculative_algorithm": "STANDALONE"}],
    "ngram": [
        {"speculative_algorithm": "NGRAM"},
        {"speculative_algorithm": "NGRAM", "speculative_ngram_capacity": 5},
    ],
    "adaptive": [EAGLE | {"speculative_adaptive": True}],
    "rejection_sampling": [EAGLE | {"speculative_use_rejection_sampling": True}],
    "multi_layer_eagle": [EAGLE | {"enable_multi_layer_eagle": True}],
}


def refused(stage, flags) -> str:
    """The sentence that an engine start with `flags` is refused with; the model path must not even be looked
    at.
    """
    with pytest.raises(ValueError) as caught:
        stage.Engine(**{"model_path": "no-such-model", "device": "cpu", **flags})
    message = str(caught.value)
    assert len(message) > 30 and message.rstrip()[-1] in ".)?" and "no-such-model" not in message, message
    return message


def test_every_missing_feature_is_refused_by_name(stage):
    """The sentence names this stage of fledge, the flag and the stage that brings the feature."""
    assert stage.missing.keys() <= REQUESTS.keys()
    for feature, arrives in stage.missing.items():
        for flags in REQUESTS[feature]:
            message = refused(stage, flags)
            assert stage.name in message and any(flag in message for flag in flags), message
            # EAGLE under DP attention may be refused for DP attention alone, which comes earlier.
            assert arrives in message or (feature == "dp_eagle" and "dp_attention" in stage.missing), message


def test_a_single_missing_feature(stage):
    """One assertion per feature, so that the report names it."""
    for feature in ("ngram", "adaptive", "eagle3", "token_map", "cuda_graph", "dp_attention"):
        if feature in stage.missing:
            refused(stage, REQUESTS[feature][0])


def test_defaults_and_switching_off_are_never_refused(stage, engines, zoo):
    """`disable_*=True` is no request, and get_server_info says what is really on."""
    prompt = zoo.prompts((5,), 8)[0]
    tree = (3, 1, 4) if stage.has("eagle") else None
    with engines.fresh(
        tree=tree,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        tp_size=1,
        dp_size=1,
        enable_dp_attention=False,
    ) as engine:
        assert run(engine, [prompt], {"max_new_tokens": 8}).tokens == [zoo.r0(prompt, max_new_tokens=8)]
        on = engine.get_server_info()["is_on"]
        assert on["cuda_graph"] is False and on["overlap_schedule"] is False
    with engines.fresh(tree=tree) as engine:
        on = engine.get_server_info()["is_on"]
        assert on["cuda_graph"] is stage.has("cuda_graph") and on["overlap_schedule"] is stage.has("overlap")


@pytest.mark.parametrize(
    "flags",
    [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"quantization": "fp8"},
        {"enable_mixed_chunk": True},
        {"enable_hierarchical_cache": True},
        {"disable_cuda_graph_padding": True},
        {"grammar_backend": "xgrammar"},
        {"enable_return_hidden_states": True},
        {"sampling_backend": "pytorch"},
        {"enable_torch_compile": True},
        {"custom_weight_loader": ["x"]},
        {"speculative_attention_mode": "decode"},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_options_of_sglang_that_are_not_here(stage, flags):
    message = refused(stage, flags)
    assert "SGLang" in message and next(iter(flags)) in message


def test_a_misspelt_option_gets_a_hint(stage):
    assert "page_size" in refused(stage, {"pagesize": 4})
    assert "zzz" in refused(stage, {"zzz": 4})


@pytest.mark.parametrize(
    "flags", [{"tp_size": 2}, {"dp_size": 2}, {"tp_size": 2, "dp_size": 4, "enable_dp_attention": True}]
)
def test_ranks_without_dp_attention(stage, flags):
    refused(stage, flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"page_size": 3},
        {"page_size": 0},
        {"page_size": 256},
        {"max_running_requests": 0},
        {"max_total_tokens": 0},
        {"chunked_prefill_size": 0},
        {"mem_fraction_static": 1.5},
        {"attention_backend": "fa3"},
        {"dtype": "fp8"},
        {"device": "tpu"},
        {"page_size": "4"},
        {"disable_radix_cache": 1},
        {"random_seed": -1},
    ],
    ids=lambda flags: "{}={}".format(*next(iter(flags.items()))),
)
def test_values_out_of_range(stage, flags):
    message = refused(stage, flags)
    name, value = next(iter(flags.items()))
    assert name in message and str(value) in message


@pytest.mark.needs("spec_scheduler", "tree")
@pytest.mark.parametrize(
    "given, resolved",
    [
        ({}, (5, 4, 8)),
        ({"steps": 3}, (3, 4, 8)),
        ({"topk": 1}, (5, 1, 6)),
        ({"steps": 3, "topk": 1}, (3, 1, 4)),
        ({"topk": 1, "draft_tokens": 4}, (3, 1, 4)),
        ({"steps": 1, "topk": 1}, (1, 1, 2)),
        ({"steps": 1}, (1, 4, 5)),
        ({"steps": 2, "topk": 2, "draft_tokens": 7}, (2, 2, 7)),
        ({"steps": 3, "topk": 4, "draft_tokens": 37}, (3, 4, 37)),
        ({"steps": 2, "topk": 2}, (2, 2, 7)),
    ],
    ids=str,
)
def test_numbers_of_a_tree(stage, engines, zoo, given, resolved):
    """None given: documented defaults; some given: the others follow; what runs is what
    get_server_info says.
    """
    names = {
        "steps": "speculative_num_steps",
        "topk": "speculative_eagle_topk",
        "draft_tokens": "speculative_num_draft_tokens",
    }
    head = str(zoo.head())
    flags = {names[key]: value for key, value in given.items()}
    with engines.fresh(speculative_algorithm="EAGLE", speculative_draft_model_path=head, **flags) as engine:
        info = engine.get_server_info()
        assert tuple(info[name] for name in names.values()) == resolved
        prompts = zoo.prompts((5, 9), 8)
        assert run(engine, prompts, {"max_new_tokens": 8}, ref_head=zoo.ref_head()).tokens == [
            zoo.r0(p, max_new_tokens=8) for p in prompts
        ]


@pytest.mark.needs("spec_scheduler", "tree")
@pytest.mark.parametrize(
    "steps, topk, draft_tokens",
    [(3, 1, 5), (3, 1, 3), (2, 2, 8), (1, 4, 6), (3, 4, 38), (3, 17, 8), (0, 1, 1), (3, 4, 65), (3, 2, 1)],
)
def test_trees_that_cannot_be(stage, steps, topk, draft_tokens):
    """A chain has steps + 1 nodes, a tree at most 1 + topk + (steps − 1)·topk²; the sentence names the
    values.
    """
    message = refused(
        stage,
        EAGLE
        | {
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": draft_tokens,
        },
    )
    assert any(str(value) in message for value in (steps, topk, draft_tokens))


@pytest.mark.needs("spec_scheduler")
def test_speculation_flags_that_need_each_other(stage):
    assert "speculative_draft_model_path" in refused(stage, {"speculative_algorithm": "EAGLE"})
    assert "speculative_algorithm" in refused(stage, {"speculative_draft_model_path": "a-head"})
    assert "speculative_algorithm" in refused(stage, {"speculative_num_steps": 3})
    assert "MEDUSA" in refused(stage, EAGLE | {"speculative_algorithm": "MEDUSA"})


def test_model_path_is_needed(stage):
    with pytest.raises(ValueError, match="model_path"):
        stage.Engine()


BAD_PARAMS = [
    {"temperature": -1},
    {"top_p": 0},
    {"top_p": 1.2},
    {"top_k": 0},
    {"min_p": 2},
    {"max_new_tokens": 0},
    {"max_new_tokens": 4, "min_new_tokens": 5},
    {"frequency_penalty": 3},
    {"repetition_penalty": 0},
    {"stop_token_ids": [128]},
    {"stop_token_ids": [-1]},
    {"logit_bias": {"500": 1.0}},
    {"logit_bias": {"5": 1000.0}},
    {"stop": [""]},
    {"stop_regex": "("},
    {"temprature": 0},
    {"n": 2},
    {"json_schema": "{}"},
    {"regex": "a+"},
    {"ebnf": "root ::= 'a'"},
    {"structural_tag": "{}"},
    {"custom_params": {}},
    {"temperature": float("nan")},
    {"sampling_seed": -1},
    {"max_new_tokens": 2.5},
    {"skip_special_tokens": False},
]


@pytest.mark.parametrize("tree", [None, (3, 1, 4)], ids=tree_id)
def test_bad_requests_leave_the_engine_whole(stage, engines, zoo, tree):
    """Each bad argument gets a sentence that names it; nothing of the call has started; the
    next call works.
    """
    engine = engines.get(tree=tree, skip_tokenizer_init=False, context_length=64)
    prompt = zoo.prompts((9,), 24)[0]
    for params in BAD_PARAMS:
        with pytest.raises(ValueError) as caught:
            engine.generate(input_ids=[prompt, prompt], sampling_params=[{"temperature": 0}, params])
        named = "min_new_tokens" if "min_new_tokens" in params else next(iter(params))
        assert named in str(caught.value), caught.value
    calls = [
        {"input_ids": []},
        {"input_ids": [[], prompt]},
        {"input_ids": [128]},
        {"input_ids": [-1]},
        {"input_ids": [3] * 64},
        {"input_ids": prompt, "prompt": "both"},
        {},
        {"input_ids": ["x"]},
        {"input_ids": [prompt, prompt], "sampling_params": [{}]},
        {"input_ids": prompt, "top_logprobs_num": 3},
        {"input_ids": prompt, "return_logprob": True, "top_logprobs_num": -1},
        {"input_ids": prompt, "return_logprob": True, "token_ids_logprob": [128]},
        {"input_ids": prompt, "return_logprob": True, "logprob_start_len": 9},
        {"input_ids": [prompt, prompt], "rid": ["same", "same"]},
        {"input_ids": prompt, "routed_dp_rank": 3},
        {"prompt": 5},
        {"input_ids": 5},
        {"prompt": ["fine", 5]},
        {"prompt": ""},
    ]
    for call in calls:
        with pytest.raises(ValueError) as caught:
            engine.generate(**call)
        assert len(str(caught.value)) > 20, call
    Probe(engine).check_idle()
    assert run(engine, [prompt]).tokens == [zoo.r0(prompt)]


@pytest.mark.parametrize("tree", [None, (3, 1, 4)], ids=tree_id)
@pytest.mark.parametrize(
    "key, value",
    [("json_schema", "{}"), ("regex", "a{3}"), ("ebnf", "root ::= 'a'"), ("structural_tag", "{}")],
)
def test_grammars_are_refused(stage, engines, zoo, tree, key, value):
    """There is no constrained decoding, so nothing may pretend to obey a grammar."""
    engine = engines.get(tree=tree)
    with pytest.raises(ValueError, match=f"{key}.*grammar"):
        engine.generate(input_ids=zoo.prompts((9,), 24)[0], sampling_params={key: value})
    Probe(engine).check_idle()


@pytest.mark.parametrize("tree", [None, (3, 1, 4)], ids=tree_id)
def test_text_needs_a_tokenizer(stage, engines, zoo, tree):
    engine, prompt = engines.get(tree=tree), zoo.prompts((9,), 24)[0]
    for call in (
        {"prompt": "text"},
        {"input_ids": prompt, "sampling_params": {"stop": "a"}},
        {"input_ids": prompt, "sampling_params": {"stop_regex": "a"}},
    ):
        with pytest.raises(ValueError, match="tokenizer"):
            engine.generate(**call)


def test_prompts_of_text_equal_prompts_of_ids(stage, engines, zoo):
    engine = engines.get(skip_tokenizer_init=False)
    params = {"temperature": 0, "max_new_tokens": 8}
    text = "Hi there"
    ids = engine.tokenizer.encode(text)
    single, many = engine.generate(text, params), engine.generate([text, "abc"], params)
    assert isinstance(single, dict) and isinstance(many, list)
    assert (
        single["output_ids"]
        == many[0]["output_ids"]
        == engine.generate(input_ids=ids, sampling_params=params)["output_ids"]
        == zoo.r0(ids, max_new_tokens=8)
    )


def test_nothing_outlives_shutdown(stage, engines, zoo):
    prompt = zoo.prompts((9,), 24)[0]
    engine = engines.fresh()
    stream = engine.generate(input_ids=prompt, sampling_params={"temperature": 0}, stream=True)
    next(stream)
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate(input_ids=prompt)
    assert not [part for part in stream if part["meta_info"]["finish_reason"] is None]


def test_weights_are_loaded_once_and_for_all(stage, engines):
    """There is no call to change them, so target and drafter cannot drift apart."""
    engine = engines.get()
    assert not [name for name in dir(engine) if "weights" in name]
    assert models.EOS in engine.scheduler.model_config.eos_token_ids
