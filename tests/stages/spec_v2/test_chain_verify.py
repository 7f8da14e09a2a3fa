"""Rejection sampling of a chain: both sets of kernels against a walk that is spelled out, and the law."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stages.spec_v2.kernels import KERNEL_SETS, load_kernels

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NATIVE = load_kernels("native")


@pytest.fixture(params=KERNEL_SETS)
def kernels(request):
    return load_kernels(request.param)


def walk(tokens, p, q, coins, draws):
    """Accepted drafts and the token behind them; tokens [n], p float32 [n, V], q float32 [n - 1, V]."""
    steps, weights = len(tokens) - 1, [float(x) for x in p[-1]]
    depth = steps
    for j in range(steps):
        x = tokens[j + 1]
        if not coins[j] * q[j, x] < p[j, x]:
            depth = j
            weights = [float(max(a - b, np.float32(0))) for a, b in zip(p[j], q[j], strict=True)]
            if sum(weights) <= 0:
                weights = [float(x) for x in p[j]]
            break
    running, target = 0.0, float(draws[depth]) * sum(weights)
    for token, weight in enumerate(weights):
        running += weight
        if weight > 0 and running > target:
            return depth, token
    raise AssertionError("nothing left to draw from")


def verify(kernels, tokens, p, q, seeds, positions):
    """As the engine calls it, with slots, lengths and checks that tell every row from every other."""
    bs, n = tokens.shape
    index = torch.arange(bs * n).view(bs, n)
    checks = index.flatten().float()
    checks[2] = float("nan")
    inputs = (tokens, p, q, index, 1000 + 3 * index, 50 + 7 * torch.arange(bs), checks, seeds, positions)
    return kernels.chain_speculative_sampling(*(tensor.to(DEVICE) for tensor in inputs))


@pytest.mark.parametrize("vocab", [7, 40, 2100])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_against_a_walk(kernels, vocab, steps):
    bs, generator = (12 if vocab < 100 else 4), torch.Generator().manual_seed(vocab + steps)
    p = torch.softmax(2 * torch.randn(bs, steps + 1, vocab, generator=generator), -1)
    noise = torch.softmax(2 * torch.randn(bs, steps, vocab, generator=generator), -1)
    q = 0.6 * p[:, :-1] + 0.4 * noise
    q[1], p[2] = p[1, :-1], torch.eye(vocab)[torch.arange(steps + 1) % vocab]  # equal laws; a greedy request
    tokens = torch.cat([torch.zeros(bs, 1).long(), torch.multinomial(q.flatten(0, 1), 1, generator=generator)
                        .view(bs, steps)], 1)  # fmt: skip
    tokens[2, 1:] = torch.arange(steps) % vocab
    seeds = torch.randint(0, 2**62, (bs,), generator=generator)
    positions = torch.randint(0, 1000, (bs,), generator=generator)
    got, width = verify(kernels, tokens, p, q, seeds, positions), steps + 1
    lens = set()
    for b in range(bs):
        at = positions[b] + torch.arange(width)
        coins, draws = (
            NATIVE.philox_uniform(seeds[b].expand_as(at), at, use).numpy()
            for use in (NATIVE.USE_ACCEPT, NATIVE.USE_SAMPLE)
        )
        depth, bonus = walk(tokens[b].tolist(), p[b].numpy(), q[b].numpy(), coins, draws)
        behind, flat = steps - depth, slice(b * width, (b + 1) * width)
        numbers = [b * width + j for j in range(depth + 1)]
        assert got.tokens[b].tolist() == [*tokens[b, 1 : depth + 1].tolist(), bonus] + [0] * behind
        assert got.nodes[b].tolist() == [*range(depth + 1)] + [-1] * behind
        assert got.rows[flat].tolist() == numbers + [0] * behind
        assert got.slots[flat].tolist() == [1000 + 3 * number for number in numbers] + [0] * behind
        assert got.positions[flat].tolist() == [50 + 7 * b + j for j in range(width)]
        assert int(got.lens[b]) == depth + 1 and int(got.kv_lens[b]) == 51 + 7 * b + depth
        assert int(got.last_rows[b]) == b * width + depth and int(got.verified_id[b]) == bonus
        assert math.isnan(float(got.is_finite[b])) == (2 in numbers)
        lens.add(depth)
    assert steps in lens and (len(lens) > 1 or steps == 1)


def test_equal_laws_accept_everything(kernels):
    bs, steps, vocab = 6, 3, 11
    p = torch.softmax(torch.randn(1, steps + 1, vocab, generator=torch.Generator().manual_seed(1)), -1)
    p = p.repeat(bs, 1, 1)
    tokens = torch.arange(bs * (steps + 1)).view(bs, -1) % vocab
    got = verify(kernels, tokens, p, p[:, :-1], torch.arange(bs), torch.arange(bs))
    assert got.lens.tolist() == [steps + 1] * bs


def test_a_stale_law_does_no_harm_to_a_greedy_request(kernels):
    """Its own law is one-hot; what the draft's row holds may be of an earlier round, or was never written."""
    tokens = torch.tensor([[9, 2, 4], [9, 2, 3]]).repeat(3, 1)
    p = torch.eye(6)[torch.tensor([2, 4, 1])].expand(6, 3, 6)
    q = torch.zeros(6, 2, 6)
    q[2:4] = torch.eye(6)[torch.tensor([5, 4])]
    q[4:] = torch.eye(6)[torch.tensor([2, 3])]
    got = verify(kernels, tokens, p, q, torch.arange(6), torch.arange(6))
    assert got.lens.tolist() == [3, 2] * 3
    assert got.tokens.tolist() == [[2, 4, 1], [2, 4, 0]] * 3


def test_the_law_of_what_is_emitted():
    """The first two tokens of many chains, drafts drawn as the engine draws them, against p."""
    bs, vocab, generator = 40_000, 5, torch.Generator().manual_seed(3)
    first, second = (
        torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0]),
        torch.softmax(torch.randn(5, 5, generator=generator), -1),
    )
    q = torch.tensor([[0.1, 0.1, 0.3, 0.3, 0.2], [0.5, 0.0, 0.2, 0.2, 0.1]])
    seeds, positions = torch.arange(bs), torch.full((bs,), 4)
    drafts = [
        NATIVE.sample_from_probs(q[j].expand(bs, -1), seeds, positions + j, NATIVE.USE_DRAFT) for j in (0, 1)
    ]
    tokens = torch.stack([torch.zeros(bs).long(), *drafts], 1)
    p = torch.stack([first.expand(bs, -1), second[drafts[0]], second[drafts[1]]], 1)
    got = verify(NATIVE, tokens, p, q.expand(bs, -1, -1), seeds, positions)
    seen = torch.bincount(got.tokens[:, 0], minlength=vocab) / bs
    torch.testing.assert_close(seen, first, atol=0.01, rtol=0)
    for token in range(4):  # behind an accepted draft
        rows = (got.lens >= 2) & (got.tokens[:, 0] == token)
        seen = torch.bincount(got.tokens[rows, 1], minlength=vocab) / rows.sum()
        torch.testing.assert_close(seen, second[token], atol=0.03, rtol=0)


def test_a_draw_for_a_draft_is_another_than_for_an_output(kernels):
    probs = torch.full((64, 50), 0.02, device=DEVICE)
    seeds, positions = torch.arange(64, device=DEVICE), torch.zeros(64, dtype=torch.int64, device=DEVICE)
    one, other = (kernels.sample_from_probs(probs, seeds, positions, use) for use in (0, kernels.USE_DRAFT))
    assert int((one == other).sum()) < 10
    assert torch.equal(one, kernels.sample_from_probs(probs, seeds, positions))
    assert torch.equal(other.cpu(), NATIVE.sample_from_probs(probs.cpu(), seeds.cpu(), positions.cpu(), 2))
