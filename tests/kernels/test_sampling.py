"""Drawing from probabilities: exact against a running sum, right in law, never a token without mass."""

import numpy as np
import pytest
import torch

from stages.part4_worker.kernels.native.random import USE_SAMPLE
from stages.part4_worker.kernels.native.sampling import inverse_cdf

pytestmark = pytest.mark.slow


def draw_oracle(weights, u):
    """weights: floats in vocabulary order, not normalised."""
    total = sum(weights)
    running = 0.0
    chosen = 0
    for token, weight in enumerate(weights):
        running += weight
        if weight > 0:
            chosen = token
            if running > u * total:
                break
    return chosen


def chi_square(counts, expected):
    """Statistic over the cells that can occur; others must be empty."""
    counts, expected = np.asarray(counts, float).ravel(), np.asarray(expected, float).ravel()
    assert not counts[expected == 0].any()
    counts, expected = counts[expected > 0], expected[expected > 0]
    return ((counts - expected) ** 2 / expected).sum(), len(expected) - 1


def critical(freedom, deviations=3.7):
    """Value that chi-square exceeds once in ten thousand times (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + deviations * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("vocab", [1, 5, 300, 2048, 4500])
def test_draws_equal_the_oracles(kernels, native, device, vocab):
    rows = 12
    probs = torch.softmax(torch.randn(rows, vocab) * 3, -1)
    probs[:3, ::2] = 0
    probs[0, 0] = 0.25
    seeds, positions = torch.arange(rows) - 3, torch.arange(rows) * 7
    drawn = kernels.sample_from_probs(probs.to(device), seeds.to(device), positions.to(device))
    assert drawn.dtype == torch.int64
    numbers = native.philox_uniform(seeds, positions, USE_SAMPLE).tolist()
    assert drawn.tolist() == [draw_oracle(p, u) for p, u in zip(probs.tolist(), numbers, strict=True)]


def test_one_hot_rows_are_exact(kernels, device):
    ids = torch.tensor([0, 3, 2999, 1500])
    probs = torch.zeros(4, 3000).scatter_(1, ids.unsqueeze(1), 1.0)
    drawn = kernels.sample_from_probs(probs.to(device), ids.to(device), ids.to(device))
    assert drawn.tolist() == ids.tolist()


def test_extreme_numbers_never_draw_a_token_of_probability_zero(device):
    weights = torch.tensor([[0, 0.1, 0, 0.7, 0.2, 0, 0], [0, 0, 3e-39, 0, 0, 0, 0]], device=device)
    for u, expected in ((0.0, [1, 2]), (1 - 2.0**-24, [4, 2])):
        assert inverse_cdf(weights, torch.full((2,), u, device=device)).tolist() == expected


# Positions where seed 0 gives the least and the greatest number there is.
LEAST, GREATEST = 14883995, 38471471


def test_a_seed_with_an_extreme_number_draws_no_token_of_probability_zero(kernels, device):
    positions = torch.tensor([LEAST, GREATEST], device=device)
    seeds = torch.zeros_like(positions)
    assert kernels.philox_uniform(seeds, positions, USE_SAMPLE).tolist() == [0, 1 - 2.0**-24]
    probs = torch.zeros(2, 4200, device=device)
    probs[:, [3, 2100, 4000]] = torch.tensor([0.3, 0.3, 0.4], device=device)
    assert kernels.sample_from_probs(probs, seeds, positions).tolist() == [3, 4000]


def test_a_row_depends_on_nothing_but_itself(kernels, device):
    probs = torch.softmax(torch.randn(5, 40, device=device), -1)
    seeds, positions = torch.arange(5, device=device), torch.full((5,), 9, device=device)
    together = kernels.sample_from_probs(probs, seeds, positions)
    for row in (4, 1):
        part = slice(row, row + 1)
        assert kernels.sample_from_probs(probs[part], seeds[part], positions[part]) == together[row]


@pytest.mark.parametrize("name", ["native", pytest.param("triton", marks=pytest.mark.gpu)])
def test_law(request, device, name):
    kernels = request.getfixturevalue("native" if name == "native" else "triton_kernels")
    probs = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.25])
    count = 40_000
    drawn = kernels.sample_from_probs(
        probs.expand(count, -1).contiguous().to(device),
        torch.arange(count, device=device),
        torch.full((count,), 11, device=device),
    )
    statistic, freedom = chi_square(torch.bincount(drawn.cpu(), minlength=5), probs * count)
    assert statistic < critical(freedom)
