"""The target's law: against a loop, independent of the batch, and without a sort nobody asked for."""

import math
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.part4_worker.kernels import load_kernels
from stages.part4_worker.layers.sampler import Sampler, target_probs
from stages.part4_worker.sampling.sampling_batch_info import SamplingBatchInfo
from stages.part4_worker.sampling.sampling_params import SamplingParams

VOCAB = 24


def make_info(*params, vocab=VOCAB):
    reqs = [
        types.SimpleNamespace(
            sampling_params=SamplingParams.from_dict(item, vocab), seed=item.get("sampling_seed", 7)
        )
        for item in params
    ]
    return SamplingBatchInfo.from_reqs(reqs, vocab, "cpu")


def oracle(logits, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    """One row in Python floats: temperature, top-k, top-p, min-p, each on the renormalised rest."""
    values = logits.tolist()
    if temperature == 0 or top_k == 1:
        return [float(token == values.index(max(values))) for token in range(len(values))]
    largest = max(values)
    weights = [math.exp((value - largest) / temperature) for value in values]
    probs = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(probs)), key=lambda token: (-values[token], token))
    kept = order[:top_k] if top_k > 0 else order
    mass = sum(probs[token] for token in kept)
    nucleus, reached = [], 0.0
    for token in kept:
        if reached < top_p or top_p >= 1:
            nucleus.append(token)
        reached += probs[token] / mass
    floor = min_p * probs[order[0]]
    final = [token for token in nucleus if probs[token] >= floor]
    mass = sum(probs[token] for token in final)
    return [probs[token] / mass if token in final else 0.0 for token in range(len(probs))]


filters = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 1, 2, 5, VOCAB]),
        "top_p": st.sampled_from([0.05, 0.5, 0.71, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.03, 0.31, 1.0]),
    },
)


@settings(deadline=None, max_examples=150)
@given(st.lists(filters, min_size=1, max_size=5), st.integers(0, 2**31))
def test_the_law_equals_the_loop(params, seed):
    logits = 2 * torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(seed))
    probs = target_probs(logits, make_info(*params))
    assert probs.dtype == torch.float32
    for row, item in enumerate(params):
        torch.testing.assert_close(
            probs[row], torch.tensor(oracle(logits[row], **item)), rtol=1e-5, atol=1e-7
        )


@settings(deadline=None, max_examples=100)
@given(st.lists(filters, min_size=2, max_size=6), st.integers(0, 2**31))
def test_a_row_does_not_depend_on_its_neighbours(params, seed):
    logits = 2 * torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(seed))
    together = target_probs(logits, make_info(*params))
    for row, item in enumerate(params):
        assert torch.equal(together[row], target_probs(logits[row : row + 1], make_info(item))[0])


def test_rows_of_a_tree_take_the_parameters_of_their_request():
    params = [{"top_k": 3}, {"temperature": 0}, {"temperature": 0.5, "min_p": 0.2}]
    info, row_to_req = make_info(*params), torch.tensor([0, 0, 1, 1, 2, 2])
    logits = torch.randn(6, VOCAB)
    probs = target_probs(logits, info, row_to_req)
    for row, req in enumerate(row_to_req.tolist()):
        torch.testing.assert_close(
            probs[row], torch.tensor(oracle(logits[row], **params[req])), rtol=1e-5, atol=1e-7
        )


def test_ties_at_a_boundary_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]]).repeat(3, 1)
    probs = target_probs(logits, make_info({"top_k": 2}, {"top_p": 0.4}, {"temperature": 0}, vocab=5))
    assert probs[0].nonzero().flatten().tolist() == [1, 2]
    assert probs[1].nonzero().flatten().tolist() == [1, 2]
    assert probs[2].tolist() == [0, 1, 0, 0, 0]


def test_top_p_includes_the_token_that_reaches_the_mass_and_no_more():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log().repeat(3, 1)
    probs = target_probs(logits, make_info({"top_p": 0.5}, {"top_p": 0.51}, {"top_p": 1e-6}, vocab=4))
    assert [(row > 0).sum().item() for row in probs] == [1, 2, 1]


def test_a_greedy_row_is_exactly_one_hot_beside_any_sampled_one():
    logits = torch.randn(2, VOCAB) * 40
    probs = target_probs(logits, make_info({"temperature": 0}, {"temperature": 2.0, "top_p": 0.9}))
    assert sorted(probs[0].tolist()) == [0.0] * (VOCAB - 1) + [1.0]
    assert probs[0].argmax() == logits[0].argmax()


def test_a_large_vocabulary_keeps_every_tail_token_where_no_filter_is_asked():
    logits = torch.randn(2, 50_000)
    probs = target_probs(logits, make_info({"top_p": 0.9}, {}, vocab=50_000))
    assert (probs[1] > 0).all()
    assert 0 < (probs[0] == 0).sum() < 50_000


@pytest.mark.parametrize(
    ("params", "sorts"),
    [
        ([{}, {"temperature": 0.3}], 0),
        ([{"temperature": 0}, {"temperature": 0, "top_p": 0.5}], 0),
        ([{"min_p": 0.1}], 0),
        ([{"top_k": VOCAB}, {"top_p": 1}], 0),
        ([{}, {"top_p": 0.9}], 1),
        ([{"top_k": 5}, {"top_p": 0.9}], 1),
    ],
)
def test_the_vocabulary_is_sorted_only_when_a_request_needs_it(monkeypatch, params, sorts):
    calls = []
    real = torch.sort
    monkeypatch.setattr(torch, "sort", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    target_probs(torch.randn(len(params), VOCAB), make_info(*params))
    assert len(calls) == sorts


def test_a_greedy_batch_uploads_nothing_and_takes_the_argmax():
    info = make_info({"temperature": 0}, {"top_k": 1})
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 1.0]])
    assert Sampler(load_kernels("native")).forward(logits, info, torch.tensor([0, 0])).tolist() == [1, 0]
    assert info._on_device is None


def test_what_is_drawn_depends_on_seed_and_position_only():
    sampler = Sampler(load_kernels("native"))
    params = [{"sampling_seed": seed} for seed in range(6)]
    logits, positions = torch.randn(1, VOCAB).repeat(6, 1), torch.arange(6)
    together = sampler.forward(logits, make_info(*params), positions)
    order = [4, 0, 2]
    again = sampler.forward(logits[order], make_info(*(params[row] for row in order)), positions[order])
    assert again.tolist() == together[order].tolist()
    later = sampler.forward(logits.repeat(8, 1), make_info(*params * 8), torch.arange(48))
    assert len(set(later.tolist())) > 3


def test_the_draws_follow_the_law():
    draws, vocab = 20_000, 8
    info = make_info(*[{"top_p": 0.8, "temperature": 1.3, "sampling_seed": 5}] * draws, vocab=vocab)
    row = torch.tensor([0.1, 1.5, -0.7, 0.9, 0.2, -2.0, 1.1, 0.4])
    ids = Sampler(load_kernels("native")).forward(row.repeat(draws, 1), info, torch.arange(draws))
    law = torch.tensor(oracle(row, temperature=1.3, top_p=0.8))
    counts = torch.bincount(ids, minlength=vocab).float()
    allowed = law > 0
    assert counts[~allowed].sum() == 0
    chi_square = ((counts - draws * law)[allowed] ** 2 / (draws * law)[allowed]).sum()
    assert chi_square < 25  # at most 7 degrees of freedom: p < 0.001 beyond 24.3


def test_parameters_follow_filter_and_merge():
    params = [{"temperature": 0.5, "top_k": 3, "sampling_seed": 1}, {"top_p": 0.5, "sampling_seed": 2}]
    info = make_info(*params)
    info.merge_batch(make_info({"min_p": 0.25, "sampling_seed": 3}, {"temperature": 0, "sampling_seed": 4}))
    info.filter_batch([3, 0, 2])
    assert info.temperatures.tolist() == [1.0, 0.5, 1.0]
    assert info.top_ks.tolist() == [1, 3, VOCAB]
    assert info.top_ps.tolist() == [1.0, 1.0, 1.0]
    assert info.min_ps.tolist() == [0.0, 0.0, 0.25]
    assert info.seeds.tolist() == [4, 1, 3]
    assert (info.need_top_p, info.need_top_k, info.need_min_p) == (False, True, True)
    assert not info.is_all_greedy and info.is_any_greedy
    info.filter_batch([0])
    assert info.is_all_greedy and len(info) == 1


def test_a_step_without_change_uploads_once():
    info = make_info({}, {"top_p": 0.9})
    first = info.temperatures
    info.filter_batch([0, 1])
    assert info.temperatures.data_ptr() == first.data_ptr()
