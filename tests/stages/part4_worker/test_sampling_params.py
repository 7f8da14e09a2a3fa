"""A request's parameters are honoured or refused in a sentence; nothing is ignored."""

import dataclasses

import pytest

from stages.part4_worker.sampling.sampling_params import DEFAULT_MAX_NEW_TOKENS, SamplingParams

VOCAB = 16


def make(**params):
    return SamplingParams.from_dict(params, VOCAB)


def test_nothing_asked_gives_the_documented_defaults():
    assert SamplingParams.from_dict(None, VOCAB) == SamplingParams()
    assert make().max_new_tokens == DEFAULT_MAX_NEW_TOKENS
    assert make(temperature=None, stop=None, top_k=None) == SamplingParams()


def test_max_new_tokens_none_is_not_the_default():
    assert make(max_new_tokens=None).max_new_tokens is None


def test_forms_that_clients_send_are_taken():
    made = make(
        stop="END", stop_regex=["a+", "b"], logit_bias={"3": -100, 4: 1.5}, top_k=VOCAB + 5, temperature=1
    )
    assert made.stop == ("END",)
    assert made.stop_regex == ("a+", "b")
    assert made.logit_bias == {3: -100.0, 4: 1.5}
    assert made.top_k == -1
    assert isinstance(made.temperature, float)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1e-9}, {"top_k": 1}])
def test_greedy(params):
    assert make(**params).is_greedy
    assert not make().is_greedy


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {1: 1}},
        {"min_new_tokens": 1},
    ],
)
def test_what_changes_logits_says_so(params):
    assert make(**params).needs_penalties
    assert not make().needs_penalties


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", 0),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.0),
        ("min_new_tokens", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 3),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 3),
        ("stop_regex", "("),
        ("stop_regex", "a*"),
        ("no_stop_trim", 1),
        ("ignore_eos", "yes"),
        ("frequency_penalty", 2.1),
        ("presence_penalty", float("inf")),
        ("repetition_penalty", 0),
        ("logit_bias", {VOCAB: 1}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", [1]),
        ("sampling_seed", -1),
        ("sampling_seed", 2**63),
    ],
)
def test_out_of_range_is_refused_by_name_and_value(key, value):
    with pytest.raises(ValueError, match=key) as caught:
        make(**{key: value})
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert any(word in sentence for word in ("give", "mend"))


def test_contradiction_is_refused():
    with pytest.raises(ValueError, match="min_new_tokens=5 is larger than max_new_tokens=4"):
        make(min_new_tokens=5, max_new_tokens=4)


def test_unknown_key_gets_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        make(temprature=1)
    with pytest.raises(ValueError, match="known are: temperature"):
        make(qqqq=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n", 2),
        ("json_schema", "{}"),
        ("regex", "a"),
        ("ebnf", "root"),
        ("structural_tag", "x"),
        ("skip_special_tokens", False),
        ("spaces_between_special_tokens", False),
        ("custom_params", {}),
        ("stream_interval", 4),
    ],
)
def test_keys_of_sglang_that_are_not_honoured_say_so(key, value):
    with pytest.raises(ValueError, match=f"{key}=.* is not honoured here"):
        make(**{key: value})


def test_keys_of_sglang_at_the_value_that_holds_anyway_are_fine():
    assert make(n=1, skip_special_tokens=True, spaces_between_special_tokens=True, json_schema=None) == make()


def test_something_else_than_a_dict_is_refused():
    with pytest.raises(ValueError, match="give a dict"):
        SamplingParams.from_dict([("temperature", 0)], VOCAB)


def test_every_field_can_be_set_from_a_dict():
    values = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "max_new_tokens": 7,
        "min_new_tokens": 2,
        "stop": ("a",),
        "stop_token_ids": frozenset({1}),
        "stop_regex": ("b",),
        "no_stop_trim": True,
        "ignore_eos": True,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
        "repetition_penalty": 1.5,
        "logit_bias": {2: 3.0},
        "sampling_seed": 11,
    }
    assert set(values) == {field.name for field in dataclasses.fields(SamplingParams)}
    assert dataclasses.asdict(make(**values)) == values
