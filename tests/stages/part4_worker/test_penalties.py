"""Penalties, bias and minimum length against a plain loop, along every path of a tree."""

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.part4_worker.sampling.penaltylib import FORBIDDEN_LOGIT
from stages.part4_worker.sampling.sampling_batch_info import SamplingBatchInfo
from stages.part4_worker.sampling.sampling_params import SamplingParams

VOCAB = 12
EOS = 3


def make_req(prompt=(), output=(), **params):
    return types.SimpleNamespace(
        sampling_params=SamplingParams.from_dict(params, VOCAB),
        origin_input_ids=list(prompt),
        output_ids=list(output),
        seed=0,
        eos_token_ids=frozenset({EOS}),
    )


def make_info(reqs):
    return SamplingBatchInfo.from_reqs(reqs, VOCAB, "cpu")


def oracle(logits, req, output):
    """One row, one token at a time; `output` is every output token before the one that the row decides."""
    params = req.sampling_params
    result = []
    for token, logit in enumerate(logits.tolist()):
        count = list(output).count(token)
        if token in req.origin_input_ids or count:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * count
        logit -= params.presence_penalty * (count > 0)
        logit += params.logit_bias.get(token, 0)
        if len(output) < params.min_new_tokens and token in req.eos_token_ids | params.stop_token_ids:
            logit = FORBIDDEN_LOGIT
        result.append(logit)
    return torch.tensor(result)


def assert_row(row, logits, req, output):
    torch.testing.assert_close(row, oracle(logits, req, output), rtol=1e-5, atol=1e-5)


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=6)
requests = st.builds(
    make_req,
    prompt=tokens,
    output=tokens,
    frequency_penalty=st.sampled_from([0, 0.5, -1.5]),
    presence_penalty=st.sampled_from([0, 0.75]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100, 2.5]), max_size=2),
    min_new_tokens=st.integers(0, 8),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(requests, min_size=1, max_size=4), st.integers(0, 2**31))
def test_plain_decoding_equals_the_loop(reqs, seed):
    logits = torch.randn(len(reqs), VOCAB, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    positions = torch.tensor([len(req.output_ids) for req in reqs])
    changed = make_info(reqs).apply_logits_bias(logits, positions)
    assert torch.equal(logits, before)
    for row, req in enumerate(reqs):
        assert_row(changed[row], logits[row], req, req.output_ids)


@settings(deadline=None, max_examples=60)
@given(st.lists(requests, min_size=1, max_size=3), st.data())
def test_each_node_of_a_tree_counts_the_tokens_on_its_own_path(reqs, data):
    depth = 3
    paths = [[data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=depth)) for _ in range(4)] for _ in reqs]
    rows = [(row, path) for row in range(len(reqs)) for path in paths[row]]
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(1))
    path_tokens = torch.tensor(
        [(path + [-1] * depth)[:depth] for _, path in rows]
    )  # beyond the path: rubbish
    path_lens = torch.tensor([len(path) for _, path in rows])
    row_to_req = torch.tensor([row for row, _ in rows])
    positions = torch.tensor([len(reqs[row].output_ids) + len(path) for row, path in rows])
    info = make_info(reqs)
    changed = info.apply_logits_bias(logits, positions, row_to_req, path_tokens, path_lens)
    for number, (row, path) in enumerate(rows):
        assert_row(changed[number], logits[number], reqs[row], reqs[row].output_ids + path)
    again = info.apply_logits_bias(logits, positions, row_to_req, path_tokens, path_lens)
    assert torch.equal(changed, again), "a drafted path must leave no trace in the counts"


def test_one_row_per_request_without_row_to_req_leaves_no_trace_either():
    req = make_req(output=[1], frequency_penalty=1)
    info = make_info([req])
    logits = torch.zeros(1, VOCAB)
    info.apply_logits_bias(logits, torch.tensor([2]), None, torch.tensor([[5]]), torch.tensor([1]))
    assert_row(info.apply_logits_bias(logits, torch.tensor([1]))[0], logits[0], req, [1])


@settings(deadline=None, max_examples=40)
@given(st.lists(requests, min_size=1, max_size=4), st.data())
def test_committed_runs_count_up_to_their_length(reqs, data):
    runs = [data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=3)) for _ in reqs]
    info = make_info(reqs)
    info.append_tokens(
        torch.tensor([(run + [-1, 99, -7])[:3] for run in runs]), torch.tensor([len(run) for run in runs])
    )
    logits = torch.randn(len(reqs), VOCAB, generator=torch.Generator().manual_seed(2))
    outputs = [req.output_ids + run for req, run in zip(reqs, runs, strict=True)]
    changed = info.apply_logits_bias(logits, torch.tensor([len(output) for output in outputs]))
    for row, req in enumerate(reqs):
        assert_row(changed[row], logits[row], req, outputs[row])


def test_one_token_per_request_is_counted():
    reqs = [make_req(presence_penalty=1), make_req(frequency_penalty=1)]
    info = make_info(reqs)
    info.append_tokens(torch.tensor([[4], [5]]), torch.tensor([1, 1]))
    changed = info.apply_logits_bias(torch.zeros(2, VOCAB), torch.tensor([1, 1]))
    assert_row(changed[0], torch.zeros(VOCAB), reqs[0], [4])
    assert_row(changed[1], torch.zeros(VOCAB), reqs[1], [5])


@settings(deadline=None, max_examples=60)
@given(st.lists(requests, min_size=1, max_size=3), st.lists(requests, min_size=1, max_size=3), st.data())
def test_filter_and_merge_keep_every_row_with_its_request(left, right, data):
    info = make_info(left)
    info.merge_batch(make_info(right))
    reqs = left + right
    for _ in range(2):
        keep = data.draw(st.permutations(range(len(reqs))))[: data.draw(st.integers(1, len(reqs)))]
        info.filter_batch(keep)
        reqs = [reqs[row] for row in keep]
        logits = torch.randn(len(reqs), VOCAB, generator=torch.Generator().manual_seed(3))
        changed = info.apply_logits_bias(logits, torch.tensor([len(req.output_ids) for req in reqs]))
        for row, req in enumerate(reqs):
            assert_row(changed[row], logits[row], req, req.output_ids)


@pytest.mark.parametrize("order", ["plain first", "penalised first"])
def test_a_batch_without_penalties_merges_with_one_that_has_them(order):
    plain, penalised = (
        make_req(prompt=[1], output=[1]),
        make_req(prompt=[2], output=[2, 2], repetition_penalty=1.5),
    )
    reqs = [plain, penalised] if order == "plain first" else [penalised, plain]
    info = make_info(reqs[:1])
    info.merge_batch(make_info(reqs[1:]))
    logits = torch.randn(2, VOCAB)
    changed = info.apply_logits_bias(logits, torch.tensor([len(req.output_ids) for req in reqs]))
    assert torch.equal(changed[reqs.index(plain)], logits[reqs.index(plain)])
    assert_row(changed[reqs.index(penalised)], logits[reqs.index(penalised)], penalised, [2, 2])


def test_without_penalties_nothing_is_done():
    info = make_info([make_req(temperature=0), make_req(top_p=0.5)])
    logits = torch.randn(2, VOCAB)
    info.append_tokens(torch.tensor([[1], [2]]), torch.tensor([1, 1]))
    assert info.apply_logits_bias(logits, torch.tensor([0, 0])) is logits
    assert info.penalties is None


def test_penalties_go_with_the_last_request_that_asks_for_them():
    info = make_info([make_req(), make_req(frequency_penalty=1), make_req(logit_bias={1: 1})])
    assert info.penalties.counts is not None and info.penalties.in_prompt is None
    info.filter_batch([0, 2])
    assert info.penalties.counts is None and info.penalties.bias is not None
    info.filter_batch([0])
    assert info.penalties is None


def test_a_bias_of_minus_hundred_bans_a_token_and_no_bias_lifts_the_minimum_length():
    req = make_req(logit_bias={5: -100, EOS: 100}, min_new_tokens=2, stop_token_ids=[7])
    logits = torch.zeros(3, VOCAB)
    logits[:, 5] = 50
    changed = make_info([req]).apply_logits_bias(
        logits,
        torch.tensor([0, 1, 2]),
        torch.tensor([0, 0, 0]),
        torch.zeros(3, 2, dtype=torch.int64),
        torch.arange(3),
    )
    probs = torch.softmax(changed, dim=-1)
    assert (probs[:, 5] < 1e-20).all()
    assert (probs[:2, [EOS, 7]] == 0).all()
    assert probs[2].argmax() == EOS


def test_bfloat16_logits_are_penalised_in_float32():
    info = make_info([make_req(output=[1], frequency_penalty=0.001)])
    changed = info.apply_logits_bias(torch.full((1, VOCAB), 8.0, dtype=torch.bfloat16), torch.tensor([1]))
    assert changed.dtype == torch.float32
    assert changed[0, 1] < changed[0, 2]
