"""The LM head's top-k without logits, against float64; whole numbers make ties and their sums are exact."""

import math

import pytest
import torch

from tests.kernels.oracles import product

pytestmark = pytest.mark.slow

NAN = float("nan")


def oracle(logits, k):
    """The k likeliest tokens of each row, ties to the lowest id, with their probabilities."""
    probs, ids = [], []
    for row in logits.tolist():
        best = sorted(range(len(row)), key=lambda token: (-row[token], token))[:k]
        total = sum(math.exp(value - row[best[0]]) for value in row)
        probs.append([math.exp(row[token] - row[best[0]]) / total for token in best])
        ids.append(best)
    return torch.tensor(probs), torch.tensor(ids)


def numbers(rows, width, device, low=-2, high=3):
    """Small whole numbers, with NaN around them: every logit is exact and many are equal."""
    outer = torch.full((rows + 70, width + 3), NAN, device=device)
    inner = outer[3 : 3 + rows, :width]
    inner.copy_(torch.randint(low, high, (rows, width)))
    return inner


def head(vocab, width, device, dtype=torch.float32):
    outer = torch.full((vocab + 140, width), NAN, device=device, dtype=dtype)
    outer[3 : 3 + vocab] = torch.randint(-1, 2, (vocab, width)).to(dtype)
    return outer[3 : 3 + vocab]


# Vocabularies that fill no block, a block and a bit, and several; widths that fill no block either.
@pytest.mark.parametrize("rows, vocab, width, k", [
    (1, 300, 8, 1), (3, 300, 70, 4), (3, 129, 8, 16), (17, 100, 64, 4), (40, 150, 8, 2), (2, 8, 8, 8),
])  # fmt: skip
def test_linear_topk(kernels, device, dtype, rows, vocab, width, k):
    x, weight = numbers(rows, width, device).to(dtype), head(vocab, width, device, dtype)
    probs, ids = kernels.linear_topk(x, weight, k)
    expected_probs, expected_ids = oracle(product(x, weight), k)
    assert probs.dtype == torch.float32 and ids.dtype == torch.int64 and ids.shape == (rows, k)
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(probs.cpu(), expected_probs, atol=1e-6, rtol=1e-5)


def test_ties_across_blocks_go_to_the_lowest_id(kernels, device):
    """Every token is as likely as every other."""
    x, weight = torch.ones(2, 16, device=device), torch.ones(300, 16, device=device)
    probs, ids = kernels.linear_topk(x, weight, 16)
    assert ids.tolist() == [list(range(16))] * 2
    torch.testing.assert_close(probs, torch.full((2, 16), 1 / 300, device=device))
    weight[[200, 299, 130]] = 2
    assert kernels.linear_topk(x, weight, 5)[1].tolist() == [[130, 200, 299, 0, 1]] * 2


# Written into row 1 of x: all of its logits are NaN, or one that is far from the best is infinite.
SPOILS = {
    "NaN": (0, NAN),
    "infinity": (0, float("inf")),
    "one logit is -infinity": (1, 3e38),
    "one logit is +infinity": (1, -3e38),
}


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("kind", SPOILS)
@pytest.mark.parametrize("k", [1, 4])
def test_what_is_not_finite_spoils_its_own_row(kernels, device, kind, k):
    x, weight = numbers(3, 8, device), head(300, 8, device)
    weight[:, 1] = 0
    weight[290, 1] = -10  # times 3e38 is beyond float32
    expected_probs, expected_ids = (t.clone() for t in kernels.linear_topk(x, weight, k))
    column, value = SPOILS[kind]
    x[1, column] = value
    probs, ids = kernels.linear_topk(x, weight, k)
    assert probs[1].isnan().all()
    assert torch.equal(probs[[0, 2]], expected_probs[[0, 2]]) and probs[[0, 2]].isfinite().all()
    assert torch.equal(ids[[0, 2]], expected_ids[[0, 2]])
    # Whoever goes on with the tokens of such a row finds tokens there.
    assert ids.min() >= 0 and ids.max() < 300 and len(set(ids[1].tolist())) == k


def test_large_logits_do_not_overflow(kernels, device):
    x, weight = torch.full((1, 8), 100.0, device=device), head(300, 8, device)
    weight[7], weight[250] = 2, 2
    probs, ids = kernels.linear_topk(x, weight, 3)
    assert ids[0, :2].tolist() == [7, 250]
    torch.testing.assert_close(probs[0], torch.tensor([0.5, 0.5, 0.0], device=device))


def test_what_lies_behind_the_vocabulary_counts_for_nothing(kernels, device):
    """Every logit is far below the zero that a token beyond the last would have."""
    x, weight = torch.full((2, 8), -100.0, device=device), head(300, 8, device).fill_(2)
    probs, ids = kernels.linear_topk(x, weight, 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    torch.testing.assert_close(probs, torch.full((2, 4), 1 / 300, device=device))


def test_no_rows(kernels, device):
    probs, ids = kernels.linear_topk(torch.empty(0, 8, device=device), head(20, 8, device), 4)
    assert probs.shape == ids.shape == (0, 4)


def test_results_go_where_they_are_wanted(kernels, device):
    x, weight = numbers(3, 8, device), head(300, 8, device)
    expected = kernels.linear_topk(x, weight, 4)
    places = (torch.empty(3, 4, device=device), torch.empty(3, 4, dtype=torch.int64, device=device))
    results = kernels.linear_topk(x, weight, 4, *places)
    for result, place, value in zip(results, places, expected, strict=True):
        assert result.data_ptr() == place.data_ptr() and torch.equal(place, value)


@pytest.mark.parametrize("vocab, k", [(300, 4), (9, 2)])
def test_rows_may_be_for_other_tokens_than_their_numbers(kernels, device, vocab, k):
    """Chosen as without names, ties to the lower row, and then named; written to where they are wanted."""
    x, weight = numbers(3, 8, device), head(vocab, 8, device)
    names = torch.arange(vocab, device=device) * 5 + 7
    probs, rows = kernels.linear_topk(x, weight, k)
    places = (torch.empty(3, k, device=device), torch.empty(3, k, dtype=torch.int64, device=device))
    assert kernels.linear_topk(x, weight, k, *places, names)[1] is places[1]
    assert torch.equal(places[1], rows * 5 + 7) and torch.equal(places[0], probs)
