"""Flags are checked before anything is loaded, and a missing feature is refused only when it is asked for."""

import dataclasses
import inspect

import pytest

from stages.part4_worker import server_args as module
from stages.part4_worker.server_args import FEATURES, Features, ServerArgs, draft_capacity

EVERYTHING = Features("whole", frozenset(FEATURES), {})
CHAIN_ONLY = Features("early", frozenset({"torch_native", "page", "eagle"}), {})
TREE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def make(features=None, **flags):
    return ServerArgs.from_kwargs(features, **{"model_path": "target", "device": "cpu", **flags})


def make_eagle(features=None, steps=None, topk=None, nodes=None, **flags):
    tree = dict(zip(TREE, (steps, topk, nodes), strict=True))
    return make(features, speculative_algorithm="EAGLE", speculative_draft_model_path="head", **tree, **flags)


def tree_of(args):
    return tuple(getattr(args, name) for name in TREE)


def test_the_defaults_are_plain_decoding():
    args = make(device=None)
    assert args.speculative_algorithm is None and tree_of(args) == (None, None, None)
    assert args.tokenizer_path == "target"
    assert args.chunked_prefill_size is None
    assert (args.device, args.attention_backend) in {("cpu", "torch_native"), ("cuda", "triton")}


def test_every_flag_has_a_check_and_a_default():
    fields = {field.name for field in dataclasses.fields(ServerArgs)} - {"features"}
    assert fields == set(module._CHECKS)
    given = {name: None for name in fields if name not in ("model_path", "device")}
    assert make(**given) == make(), "None stands for the default"


def test_get_server_info_shows_every_flag():
    shown = make().to_dict()
    assert set(shown) == set(module._CHECKS)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None, None), (5, 4, 8)),
        ((3, None, None), (3, 4, 8)),
        ((1, None, None), (1, 4, 5)),
        ((None, 1, None), (5, 1, 6)),
        ((None, 2, None), (5, 2, 8)),
        ((None, None, 16), (5, 4, 16)),
        ((None, None, 2), (1, 4, 2)),
        ((3, 1, None), (3, 1, 4)),
        ((1, 1, 2), (1, 1, 2)),
        ((None, 1, 4), (3, 1, 4)),
        ((1, None, 16), (1, 15, 16)),
        ((None, 2, 30), (8, 2, 30)),
        ((3, 4, 8), (3, 4, 8)),
        ((3, 4, 37), (3, 4, 37)),
        ((2, 16, 64), (2, 16, 64)),
    ],
)
def test_what_is_not_given_follows_from_what_is(given, expected):
    assert tree_of(make_eagle(None, *given)) == expected


def test_a_stage_without_trees_drafts_a_chain_by_default():
    assert tree_of(make_eagle(CHAIN_ONLY)) == (5, 1, 6)
    assert tree_of(make_eagle(CHAIN_ONLY, nodes=4)) == (3, 1, 4)
    no_tree_pages = Features("early", frozenset(FEATURES) - {"page_tree"}, {"page_tree": "late"})
    assert tree_of(make_eagle(no_tree_pages, page_size=4)) == (5, 1, 6)
    with pytest.raises(ValueError, match="late"):
        make_eagle(no_tree_pages, page_size=4, topk=2)


@pytest.mark.parametrize("steps", range(1, 6))
@pytest.mark.parametrize("topk", [1, 2, 4])
def test_a_tree_may_be_as_large_as_its_candidates_and_no_larger(steps, topk):
    capacity = draft_capacity(steps, topk)
    assert capacity == 1 + topk + (steps - 1) * topk**2
    if capacity > module.MAX_DRAFT_TOKENS:
        return
    assert tree_of(make_eagle(None, steps, topk, capacity)) == (steps, topk, capacity)
    with pytest.raises(ValueError) as caught:
        make_eagle(None, steps, topk, capacity + 1 if capacity < module.MAX_DRAFT_TOKENS else capacity - 1)
    sentence = str(caught.value)
    assert f"speculative_num_steps={steps}" in sentence and f"speculative_eagle_topk={topk}" in sentence


def test_a_chain_of_other_than_steps_plus_one_is_refused():
    with pytest.raises(ValueError, match="speculative_num_draft_tokens=4 or leave it out"):
        make_eagle(None, 3, 1, 8)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("speculative_num_steps", 0),
        ("speculative_num_steps", 64),
        ("speculative_num_steps", True),
        ("speculative_eagle_topk", 0),
        ("speculative_eagle_topk", 17),
        ("speculative_num_draft_tokens", 1),
        ("speculative_num_draft_tokens", 65),
        ("speculative_accept_threshold_single", 0),
        ("speculative_accept_threshold_acc", 1.5),
        ("speculative_algorithm", "DFLASH"),
        ("speculative_algorithm", 3),
        ("page_size", 3),
        ("page_size", 256),
        ("page_size", 0),
        ("mem_fraction_static", 0),
        ("mem_fraction_static", 1),
        ("device", "tpu"),
        ("dtype", "int8"),
        ("attention_backend", "fa3"),
        ("max_total_tokens", 0),
        ("max_running_requests", -1),
        ("max_prefill_tokens", 1.5),
        ("chunked_prefill_size", 0),
        ("chunked_prefill_size", -2),
        ("context_length", "4k"),
        ("disable_radix_cache", 1),
        ("cuda_graph_bs", []),
        ("cuda_graph_bs", [0]),
        ("random_seed", -1),
        ("log_level", "loud"),
        ("model_path", ""),
        ("dist_timeout", 0),
    ],
)
def test_out_of_range_is_refused_by_flag_and_value(flag, value):
    with pytest.raises(ValueError, match=flag) as caught:
        make(EVERYTHING, **{flag: value})
    assert repr(value) in str(caught.value) and str(caught.value).endswith(".")


def test_other_spellings_of_a_value_are_taken(tmp_path):
    args = make(model_path=tmp_path, dtype="half", chunked_prefill_size=-1)
    assert (args.model_path, args.dtype, args.chunked_prefill_size) == (str(tmp_path), "float16", None)
    assert make(dtype="float").dtype == "float32"
    assert make(chunked_prefill_size=7).chunked_prefill_size == 7
    assert make(EVERYTHING, cuda_graph_bs=[4, 1, 4]).cuda_graph_bs == (1, 4)
    eagle = make(EVERYTHING, speculative_algorithm="nextn", speculative_draft_model_path="head")
    assert eagle.speculative_algorithm == "EAGLE"


def test_no_model_is_refused():
    with pytest.raises(ValueError, match="model_path is missing"):
        ServerArgs.from_kwargs(None, device="cpu")


def test_eagle_without_a_draft_model_is_refused_before_loading():
    with pytest.raises(ValueError, match="speculative_draft_model_path"):
        make(speculative_algorithm="EAGLE")


@pytest.mark.parametrize(
    "flags",
    [
        {"speculative_draft_model_path": "head"},
        {"speculative_num_steps": 1},
        {"speculative_eagle_topk": 1},
        {"speculative_num_draft_tokens": 4},
        {"speculative_accept_threshold_acc": 0.5},
        {"speculative_token_map": "map.pt"},
    ],
)
def test_a_speculative_flag_without_an_algorithm_is_refused(flags):
    with pytest.raises(ValueError, match="needs a speculative_algorithm"):
        make(EVERYTHING, **flags)
    assert make(speculative_accept_threshold_acc=1.0) == make()


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="contradicts disable_cuda_graph"):
        make(EVERYTHING, disable_cuda_graph=True, cuda_graph_max_bs=4)
    with pytest.raises(ValueError, match="tp_size equal to dp_size, and they are 1 and 2"):
        make(EVERYTHING, enable_dp_attention=True, dp_size=2)
    for flag in ("dp_size", "tp_size"):
        with pytest.raises(ValueError, match=f"{flag}=2 alone"):
            make(EVERYTHING, **{flag: 2})
    assert make(EVERYTHING, enable_dp_attention=True, dp_size=2, tp_size=2).dp_size == 2


def test_a_device_or_backend_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert make(device=None).device == "cpu"
    with pytest.raises(ValueError, match="torch finds no GPU"):
        make(device="cuda")
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        make(attention_backend="triton")
    with pytest.raises(ValueError, match="needs a GPU"):
        make(EVERYTHING, attention_backend="flashinfer")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    args = make(device=None)
    assert (args.device, args.attention_backend) == ("cuda", "triton")
    reference = {"device": "cuda", "attention_backend": "torch_native"}
    assert not make(EVERYTHING, **reference).cuda_graph
    for flag in ({"cuda_graph_bs": [2]}, {"cuda_graph_max_bs": 4}):
        with pytest.raises(ValueError, match=f"{next(iter(flag))}=.*which no graph can hold"):
            make(EVERYTHING, **reference, **flag)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"flashinfer-python.*pip install '\.\[gpu\]'"):
        make(EVERYTHING, device="cuda", attention_backend="flashinfer")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert make(EVERYTHING, device="cuda", attention_backend="flashinfer").attention_backend == "flashinfer"
    assert make(CHAIN_ONLY, device=None).attention_backend == "torch_native"


def test_unknown_flags_get_a_suggestion_or_say_that_sglang_has_them():
    with pytest.raises(ValueError, match="did you mean 'speculative_num_steps'"):
        make(speculative_num_step=3)
    with pytest.raises(ValueError, match="known are: model_path"):
        make(qqqqqq=3)
    for name in (
        "kv_cache_dtype",
        "quantization",
        "enable_torch_compile",
        "disaggregation_new",
        "trust_remote_code",
    ):
        with pytest.raises(ValueError, match=f"{name} is an SGLang option fledge does not have"):
            make(**{name: 1})
    assert len(module._SGLANG_OPTIONS) > 120
    assert not module._SGLANG_OPTIONS & set(module._CHECKS)


REQUESTS = [
    ("attention_backend", "triton", "triton"),
    ("attention_backend", "flashinfer", "flashinfer"),
    ("page_size", 2, "page"),
    ("speculative_algorithm", "EAGLE", "eagle"),
    ("speculative_algorithm", "NEXTN", "nextn"),
    ("speculative_algorithm", "EAGLE3", "eagle3"),
    ("speculative_algorithm", "STANDALONE", "standalone"),
    ("speculative_algorithm", "NGRAM", "ngram"),
    ("speculative_eagle_topk", 2, "tree"),
    ("speculative_accept_threshold_single", 0.5, "sampling_verify"),
    ("speculative_token_map", "map.pt", "token_map"),
    ("speculative_use_rejection_sampling", True, "rejection_sampling"),
    ("speculative_adaptive", True, "adaptive"),
    ("speculative_adaptive_config", "x.json", "adaptive"),
    ("speculative_ngram_capacity", 10, "ngram"),
    ("enable_multi_layer_eagle", True, "multi_layer_eagle"),
    ("cuda_graph_bs", [1, 2], "cuda_graph"),
    ("cuda_graph_max_bs", 4, "cuda_graph"),
    ("enable_dp_attention", True, "dp_attention"),
]


@pytest.mark.parametrize(("flag", "value", "feature"), REQUESTS)
def test_an_explicit_request_for_a_missing_feature_names_the_stage_that_brings_it(flag, value, feature):
    rest = frozenset(FEATURES) - {feature}
    with pytest.raises(ValueError) as caught:
        make(Features("early", rest, {feature: "late"}), **{flag: value})
    assert str(caught.value) == (
        f"fledge's early does not have {FEATURES[feature]}, which {flag}={value!r} asks for: "
        "it arrives in late; leave the flag out."
    )
    with pytest.raises(ValueError, match="not yet in this stage"):
        make(Features("early", rest, {feature: "early"}), **{flag: value})


def test_defaults_and_switching_off_are_never_refused():
    bare = Features(
        "bare", frozenset({"torch_native"}), dict.fromkeys(set(FEATURES) - {"torch_native"}, "late")
    )
    args = make(
        bare,
        disable_cuda_graph=False,
        disable_overlap_schedule=False,
        page_size=1,
        dp_size=1,
        enable_dp_attention=False,
        speculative_algorithm=None,
        attention_backend="torch_native",
    )
    assert not args.cuda_graph and not args.overlap_schedule
    args = make(bare, disable_cuda_graph=True, disable_overlap_schedule=True, disable_radix_cache=True)
    assert not args.cuda_graph and not args.overlap_schedule
    assert not make(EVERYTHING).cuda_graph, "without a GPU padding only costs"
    assert make(EVERYTHING, cuda_graph_max_bs=4).cuda_graph and make(EVERYTHING, cuda_graph_bs=[2]).cuda_graph


def test_the_stage_file_sorts_every_feature(tmp_path):
    features = Features.load()
    assert features.present | set(features.missing) == set(FEATURES)
    assert {"torch_native", "triton", "eagle", "tree", "page_tree"} <= features.present
    broken = tmp_path / "stage.toml"
    broken.write_text(
        'name = "x"\n[features]\npresent = ["eagle"]\n[features.missing]\neagle = {arrives = "y"}\n'
    )
    with pytest.raises(ValueError, match="name each feature once"):
        Features.load(broken)


def test_the_file_names_no_stage():
    source = inspect.getsource(module)
    assert not any(word in source for word in ("part1", "part2", "part3", "part4", "spec_v2"))
