"""Verification against recursive oracles, and the law of what sampling verification emits."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.part4_worker.kernels.native import verify
from stages.part4_worker.kernels.native.random import USE_ACCEPT, USE_SAMPLE

pytestmark = pytest.mark.slow


class Tree:
    """A tree given by the parent of each row; the links are found by looking at all rows."""

    def __init__(self, parents):
        self.n = len(parents)
        self.children = {r: [c for c in range(1, self.n) if parents[c] == r] for r in range(self.n)}
        self.first = [self.children[r][0] if self.children[r] else -1 for r in range(self.n)]
        self.sibling = [-1] * self.n
        for family in self.children.values():
            for one, following in zip(family, family[1:], strict=False):
                self.sibling[one] = following


@st.composite
def trees(draw, largest=10):
    n = draw(st.integers(1, largest))
    return Tree([0, *(draw(st.integers(0, row - 1)) for row in range(1, n))])


@st.composite
def batches(draw, vocab):
    """Trees of one size whose siblings carry different tokens, and their tokens."""
    first = draw(trees())
    forest = [first]
    for _ in range(draw(st.integers(0, 2))):
        forest.append(Tree([0, *(draw(st.integers(0, row - 1)) for row in range(1, first.n))]))
    tokens = []
    for tree in forest:
        ids = [draw(st.integers(0, vocab - 1))] * tree.n
        for family in tree.children.values():
            for row, token in zip(family, draw(st.permutations(range(vocab))), strict=False):
                ids[row] = token
        tokens.append(ids)
    return forest, tokens


def links(forest, device, spoilt=()):
    """The links of the trees, then slots, positions and checks that tell every row from every other.

    The checks of `spoilt` rows are not finite.
    """
    bs, n = len(forest), forest[0].n
    index = torch.arange(bs * n, device=device).view(bs, n)
    checks = index.flatten().float() - 2
    for number, row in enumerate(spoilt):
        checks[row] = (float("nan"), float("inf"), -float("inf"))[number % 3]
    return (
        index,
        torch.tensor([t.first for t in forest], device=device),
        torch.tensor([t.sibling for t in forest], device=device),
        1000 + 3 * index,
        50 + 7 * torch.arange(bs, device=device),
        checks,
    )


def check(result, paths, emitted, n, num_steps, spoilt=()):
    """paths: visited rows of each request; emitted: one token for each of them; the rest as links says."""
    width = num_steps + 1
    for name, value in result._asdict().items():
        assert value.dtype == (torch.float32 if name == "is_finite" else torch.int64), name
    got = {name: value.tolist() for name, value in result._asdict().items()}
    for b, path in enumerate(paths):
        behind, flat = width - len(path), slice(b * width, (b + 1) * width)
        numbers = [b * n + row for row in path]
        assert got["tokens"][b] == emitted[b] + [0] * behind
        assert got["nodes"][b] == path + [-1] * behind
        assert got["rows"][flat] == numbers + [0] * behind
        assert got["slots"][flat] == [1000 + 3 * number for number in numbers] + [0] * behind
        assert got["positions"][flat] == [50 + 7 * b + j for j in range(width)]
        assert got["lens"][b] == len(path) and got["kv_lens"][b] == 50 + 7 * b + len(path)
        assert got["last_rows"][b] == b * width + len(path) - 1
        assert got["verified_id"][b] == emitted[b][-1]
        assert math.isnan(got["is_finite"][b]) if {*numbers} & {*spoilt} else got["is_finite"][b] == 0


def greedy_oracle(tree, tokens, targets, row, levels):
    if levels:
        for child in tree.children[row]:
            if tokens[child] == targets[row]:
                return [row, *greedy_oracle(tree, tokens, targets, child, levels - 1)]
    return [row]


@settings(max_examples=25)
@given(data=st.data())
def test_greedy(kernels, device, data):
    forest, tokens = data.draw(batches(vocab=12))
    n, num_steps = forest[0].n, data.draw(st.integers(0, 6))
    # The target mostly agrees with some child, or walks would end at once.
    targets = [
        [data.draw(st.sampled_from([ids[c] for c in tree.children[row]] * 4 + [3, 7])) for row in range(n)]
        for tree, ids in zip(forest, tokens, strict=True)
    ]
    candidates, target_predict = (torch.tensor(t, device=device) for t in (tokens, targets))
    spoilt = data.draw(st.lists(st.integers(0, len(forest) * n - 1), max_size=3, unique=True))
    known = links(forest, device, spoilt)
    result = kernels.verify_tree_greedy(candidates, target_predict, *known, num_steps)
    paths = [greedy_oracle(*each, 0, num_steps) for each in zip(forest, tokens, targets, strict=True)]
    emitted = [[targets[b][row] for row in path] for b, path in enumerate(paths)]
    check(result, paths, emitted, n, num_steps, spoilt)


def sampling_oracle(tree, tokens, probs, coins, draws, row, depth, num_steps, single, acc):
    """Visited rows and emitted tokens from a row on; probs: float32 [n, V]."""
    weights = [float(p) for p in probs[row]]
    if depth < num_steps:
        mass = np.float32(0)
        for child in tree.children[row]:
            mass = mass + probs[row, tokens[child]]
            if coins[depth] * np.float32(acc) < mass or probs[row, tokens[child]] >= np.float32(single):
                path, emitted = sampling_oracle(
                    tree, tokens, probs, coins, draws, child, depth + 1, num_steps, single, acc
                )
                return [row, *path], [tokens[child], *emitted]
        for child in tree.children[row]:
            weights[tokens[child]] = 0.0
    running, target = 0.0, float(draws[depth]) * sum(weights)
    for token, weight in enumerate(weights):
        running += weight
        if weight > 0 and running > target:
            return [row], [token]
    raise AssertionError("nothing left to draw from")


@settings(max_examples=25)
@given(data=st.data())
def test_sampling(kernels, native, device, data):
    vocab = data.draw(st.sampled_from([11, 40]))
    forest, tokens = data.draw(batches(vocab=11))
    bs, n, num_steps = len(forest), forest[0].n, data.draw(st.integers(0, 6))
    single, acc = data.draw(st.sampled_from([(1.0, 1.0), (0.3, 1.0), (1.0, 0.5)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    probs = torch.softmax(torch.randn(bs, n, vocab, generator=generator) * 3, -1)
    if data.draw(st.booleans()):  # a greedy request in the batch: one-hot rows
        ids = torch.tensor([[tokens[0][(t.children[r] or [0])[-1]] for r in range(n)] for t in forest[:1]])
        probs[0] = torch.zeros(n, vocab).scatter_(1, ids[0].unsqueeze(1), 1.0)
    seeds = torch.randint(0, 2**62, (bs,), generator=generator)
    positions = torch.randint(0, 1000, (bs,), generator=generator)
    check_sampling(kernels, native, device, forest, tokens, probs, seeds, positions, num_steps, single, acc)


def test_sampling_at_every_depth(kernels, native, device):
    """Three levels whose drafts are right about half the time, so that paths have every length."""
    tree = Tree([0, 0, 0, 0, 1, 1, 2, 4, 4, 6])
    tokens, bs = [5, 0, 1, 2, 0, 1, 0, 0, 1, 0], 24
    probs = torch.tensor([0.35, 0.2, 0.1, 0.15, 0.1, 0.1]).repeat(bs, tree.n, 1)
    seeds, positions = torch.arange(bs), torch.arange(bs) // 2
    lens = check_sampling(
        kernels, native, device, [tree] * bs, [tokens] * bs, probs, seeds, positions, 3, 1.0, 1.0
    )
    assert set(lens) == {1, 2, 3, 4}


def check_sampling(kernels, native, device, forest, tokens, probs, seeds, positions, num_steps, single, acc):
    """Verify a batch and compare it with the oracle; returns the lengths of the paths."""
    bs, n = len(forest), forest[0].n
    result = kernels.tree_speculative_sampling_target_only(
        torch.tensor(tokens, device=device),
        probs.to(device),
        *links(forest, device),
        seeds.to(device),
        positions.to(device),
        num_steps,
        single,
        acc,
    )
    paths, emitted = [], []
    for b in range(bs):
        at = positions[b] + torch.arange(num_steps + 1)
        coins, draws = (
            native.philox_uniform(seeds[b].expand_as(at), at, use).numpy() for use in (USE_ACCEPT, USE_SAMPLE)
        )
        path, ids = sampling_oracle(
            forest[b], tokens[b], probs[b].numpy(), coins, draws, 0, 0, num_steps, single, acc
        )
        paths.append(path)
        emitted.append(ids)
    check(result, paths, emitted, n, num_steps)
    return [len(path) for path in paths]


def test_one_hot_rows_verify_as_greedy_does(kernels, device):
    forest = [Tree([0, 0, 0, 1, 1, 2, 4, 6])] * 6
    tokens = torch.tensor([[9, 1, 2, 3, 4, 3, 0, 5]] * 6)
    targets = torch.randint(0, 6, (6, 8))
    targets[:3] = torch.tensor([[1, 4, 9, 9, 0, 9, 5, 2], [2, 9, 3, 9, 9, 7, 9, 9], [7] * 8])
    probs = torch.zeros(6, 8, 10).scatter_(2, targets.unsqueeze(-1), 1.0)
    greedy = kernels.verify_tree_greedy(tokens.to(device), targets.to(device), *links(forest, device), 4)
    seeds = torch.arange(6, device=device)
    sampled = kernels.tree_speculative_sampling_target_only(
        tokens.to(device), probs.to(device), *links(forest, device), seeds, seeds, 4
    )
    assert greedy.lens.tolist()[:3] == [5, 3, 1]
    for first, second in zip(greedy, sampled, strict=True):
        assert torch.equal(first, second)


def test_when_rounding_leaves_nothing_a_possible_token_is_drawn(kernels, native, device):
    # Two children hold all the mass, but their sum falls short of one and the coin can fall into the gap.
    tree = [Tree([0, 0, 0])]
    probs = torch.zeros(1, 3, 4, device=device)
    probs[:, :, 1:3] = 0.25
    arguments = (torch.tensor([[0, 1, 2]], device=device), probs, *links(tree, device))
    drawn = set()
    for seed in range(12):
        number = torch.tensor([seed], device=device)
        coin = float(native.philox_uniform(number, number, USE_ACCEPT))
        paths = kernels.tree_speculative_sampling_target_only(*arguments, number, number, 1)
        assert int(paths.lens) == 1 + (coin < 0.5)
        drawn.add(int(paths.tokens[0, 0]))
    assert drawn == {1, 2}


def test_at_the_deepest_level_nothing_is_left_out(kernels, device):
    # Token 1 is rejected at the root and token 2 accepted; one level deeper 1 and 2 are as good as any other.
    tree = [Tree([0, 0, 0, 2])] * 24
    probs = torch.zeros(24, 4, 4, device=device)
    probs[:, 0, 2] = 1
    probs[:, 2, :3] = torch.tensor([0.2, 0.4, 0.4], device=device)
    candidates = torch.tensor([[0, 1, 2, 2]] * 24, device=device)
    seeds = torch.arange(24, device=device)
    paths = kernels.tree_speculative_sampling_target_only(
        candidates, probs, *links(tree, device), seeds, seeds, 1
    )
    assert paths.nodes[:, 1].tolist() == [2] * 24
    assert set(paths.tokens[:, 1].tolist()) == {0, 1, 2}


def test_stale_links_of_padded_requests_end(kernels, device):
    zeros = torch.zeros(2, 4, dtype=torch.int64, device=device)  # every row is its own child and sibling
    probs = torch.full((2, 4, 3), 1 / 3, device=device)
    seeds = torch.zeros(2, dtype=torch.int64, device=device)
    for target in (0, 1):
        known = (zeros, zeros, zeros, zeros, seeds, torch.zeros(8, device=device))
        result = kernels.verify_tree_greedy(zeros, zeros + target, *known, 3)
        assert result.tokens.shape == result.nodes.shape == (2, 4) and result.lens.shape == (2,)
    kernels.tree_speculative_sampling_target_only(zeros, probs, *known, seeds, seeds, 3)


# A toy target: the law of the next token depends on the last one.
LAW = np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [1 / 3, 1 / 3, 1 / 3]])


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum()), counts.size - 1


def critical(freedom, deviations=3.7):
    """Value that chi-square exceeds once in ten thousand times (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + deviations * math.sqrt(2 / (9 * freedom))) ** 3


def first_two_tokens(kernels, device, count, tree, tokens):
    """Counts [3, 3] of the first two output tokens after root token 0, over `count` seeds."""
    law = torch.tensor(LAW, dtype=torch.float32)
    probs = law[torch.tensor(tokens)].unsqueeze(0).expand(count, -1, -1).contiguous().to(device)
    seeds = torch.arange(count, device=device)
    positions = torch.full((count,), 5, device=device)
    candidates = torch.tensor([tokens] * count, device=device)
    paths = kernels.tree_speculative_sampling_target_only(
        candidates, probs, *links([tree] * count, device), seeds, positions, 2
    )
    first, second = paths.tokens[:, :2].unbind(1)
    # Where only one token came out, the next round samples the second from what follows the first.
    following = kernels.sample_from_probs(law.to(device)[first], seeds, positions + 1)
    second = torch.where(paths.lens == 1, following, second)
    return torch.bincount((first * 3 + second).cpu(), minlength=9).view(3, 3).numpy()


# Children of the root, then grandchildren; root token 0.
LAW_TREES = {
    "one child": ([0, 0], [0, 0]),
    "chain": ([0, 0, 1], [0, 1, 2]),
    "two levels": ([0, 0, 0, 1, 1, 2], [0, 2, 0, 1, 0, 2]),
    "all children": ([0, 0, 0, 0, 2], [0, 1, 2, 0, 0]),
}


@pytest.mark.parametrize("name", ["native", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", LAW_TREES)
def test_joint_law_of_the_first_two_tokens(request, device, name, shape):
    """Chi-square of how often each pair of tokens came, against the target's law: it stays under the value
    that chance exceeds once in ten thousand times.
    """
    kernels = request.getfixturevalue("native" if name == "native" else "triton_kernels")
    parents, tokens = LAW_TREES[shape]
    counts = first_two_tokens(kernels, device, 10_000, Tree(parents), tokens)
    expected = counts.sum() * LAW[0][:, None] * LAW
    statistic, freedom = chi_square(counts, expected)
    assert statistic < critical(freedom), (counts, expected)


def test_reusing_the_coin_for_the_last_draw_is_seen(native, device, monkeypatch):
    """Upstream's v0.4.6: with one child that holds half the mass, token 1 can never be drawn."""
    monkeypatch.setattr(verify, "USE_SAMPLE", USE_ACCEPT)
    parents, tokens = LAW_TREES["one child"]
    counts = first_two_tokens(native, device, 4_000, Tree(parents), tokens)
    assert counts[1].sum() == 0
    statistic, freedom = chi_square(counts, counts.sum() * LAW[0][:, None] * LAW)
    assert statistic > 10 * critical(freedom)


def test_the_same_request_is_verified_alike_in_any_company(kernels, device):
    tree, tokens = Tree([0, 0, 0, 1, 2]), [0, 1, 2, 2, 1]
    probs = torch.softmax(torch.randn(4, 5, 3), -1).to(device)
    candidates = torch.tensor([tokens] * 4, device=device)
    seeds, positions = torch.arange(4, device=device), torch.arange(4, device=device) + 7

    def run(order):
        order = torch.tensor(order, device=device)
        paths = kernels.tree_speculative_sampling_target_only(
            candidates[order],
            probs[order],
            *links([tree] * len(order), device),
            seeds[order],
            positions[order],
            2,
        )
        return list(itertools.chain(paths.tokens.tolist(), paths.lens.tolist()))

    whole = run([0, 1, 2, 3])
    for b in range(4):
        assert run([b]) == [whole[b], whole[4 + b]]
