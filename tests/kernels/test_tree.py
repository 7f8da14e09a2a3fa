"""Drafts grown and built step by step, against an oracle of nodes that know their parents."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.part4_worker.kernels.tree_types import Beams, Candidates

pytestmark = pytest.mark.slow

NAN = float("nan")


class Node:
    """A candidate: `number` counts all of them, level by level, children beam by beam."""

    def __init__(self, number, parent, score, token):
        self.number, self.parent, self.token = number, parent, token
        self.score = 0.0 if math.isnan(score) else score

    def ancestors(self):
        return [] if self.parent is None else [self.parent, *self.parent.ancestors()]


def best(nodes, count):
    return sorted(nodes, key=lambda node: (-node.score, node.number))[:count]


class Draft:
    """One request's draft: `first` [topk] and `levels` [levels][topk][topk] of (probability, token)."""

    def __init__(self, first, levels):
        topk = len(first)
        self.nodes = [Node(i, None, p, token) for i, (p, token) in enumerate(first)]
        self.beams = [self.nodes]
        for level in levels:
            parents, children = self.beams[-1], []
            for parent, proposed in zip(parents, level, strict=True):
                for p, token in proposed:
                    number = len(self.nodes) + len(children)
                    children.append(Node(number, parent, parent.score * p, token))
            self.nodes = self.nodes + children
            self.beams.append(best(children, topk))

    def columns(self, level, beam):
        """Columns of a beam of a level (from 0 on) and of its ancestors, which were beams themselves."""
        topk, node = len(self.beams[0]), self.beams[level][beam]
        line = [node, *node.ancestors()]
        return [depth * topk + self.beams[depth].index(one) for depth, one in enumerate(reversed(line))]

    def tree(self, n):
        """Token, ancestor bits, depth, first child and next sibling of each of n rows."""
        rows = sorted(best(self.nodes, n - 1), key=lambda node: node.number)
        place = {None: 0} | {node: row for row, node in enumerate(rows, 1)}

        def parent(node):  # where a parent is missing, a node hangs on nothing
            return place.get(node.parent, place[node])

        masks, depths = [1], [0]
        for node in rows:
            path = [node]
            while parent(path[-1]) not in (0, place[path[-1]]):
                path.append(rows[parent(path[-1]) - 1])
            to_root = parent(path[-1]) == 0
            masks.append(sum(1 << place[one] for one in path) + to_root)
            depths.append(len(path) - 1 + to_root)
        children = [[place[c] for c in rows if parent(c) == row != place[c]] for row in range(n)]
        first = [family[0] if family else -1 for family in children]
        sibling = [-1] * n
        for family in children:
            for one, following in zip(family, family[1:], strict=False):
                sibling[one] = following
        return [node.token for node in rows], masks, depths, first, sibling


def unsigned(words):
    return [w & (2**64 - 1) for w in words]


def column_bits(columns):
    words = -(-columns // 64)
    bits = [[(1 << c % 64) if c // 64 == word else 0 for word in range(words)] for c in range(columns)]
    signed = [[b - 2**64 if b >= 2**63 else b for b in row] for row in bits]
    return torch.tensor(signed, dtype=torch.int64).view(columns, words)


def run(kernels, device, drafts, levels, n, verified, seq_lens):
    """Feed proposals to the kernels as the draft loop does; checks beams on the way and returns the tree.

    drafts: Draft of each request, `levels` [steps − 1] of (topk_p, topk_index) [bs, topk, topk], and first.
    """
    (first_p, first_ids), *later = levels
    bs, topk = first_p.shape
    total, bits = topk + topk * topk * len(later), column_bits(topk * max(len(later), 1)).to(device)
    # Garbage where nothing has been written yet.
    candidates = Candidates(
        torch.full((bs, total), NAN, device=device),
        torch.full((bs, total), -7, device=device),
        torch.full((bs, 1 + topk * max(len(later), 1)), 10**6, device=device),
    )
    requests = torch.arange(bs, device=device)[:, None].expand(-1, topk)
    beams = Beams(first_p.to(device), first_ids.to(device), requests, bits[:topk].expand(bs, -1, -1))
    proposals = [(p.view(-1, topk).to(device), ids.view(-1, topk).to(device)) for p, ids in later]
    for level, (topk_p, topk_index) in enumerate(proposals[:-1], 1):
        own = bits[level * topk : (level + 1) * topk]
        beams = kernels.grow_tree(candidates, level, beams, topk_p, topk_index, own)
        assert beams.hidden_rows.dtype == beams.input_ids.dtype == beams.ancestors.dtype == torch.int64
        for b, draft in enumerate(drafts):
            want, before = draft.beams[level], draft.beams[level - 1]
            assert beams.scores[b].tolist() == [node.score for node in want]
            assert beams.input_ids[b].tolist() == [node.token for node in want]
            assert beams.hidden_rows[b].tolist() == [b * topk + before.index(node.parent) for node in want]
            for beam in range(topk):
                words = unsigned(beams.ancestors[b, beam].tolist())
                seen = [64 * w + c for w, word in enumerate(words) for c in range(64) if word >> c & 1]
                assert seen == draft.columns(level, beam)
    last = proposals[-1] if proposals else (None, None)
    return kernels.build_tree(
        candidates,
        max(len(later), 1),
        beams,
        *last,
        torch.tensor(verified, device=device),
        torch.tensor(seq_lens, device=device),
        n,
    )


def check(kernels, device, proposals, n):
    """proposals: for each request (first, levels) as Draft takes them."""
    drafts = [Draft(*each) for each in proposals]
    depth = len(proposals[0][1])
    tables = [[first for first, _ in proposals]] + [[ls[i] for _, ls in proposals] for i in range(depth)]
    levels = []
    for table in tables:
        pairs = torch.tensor(table, dtype=torch.float64)
        levels.append((pairs[..., 0].float(), pairs[..., 1].long()))
    bs = len(drafts)
    verified, seq_lens = [100 + b for b in range(bs)], [7 * b + 1 for b in range(bs)]
    built = run(kernels, device, drafts, levels, n, verified, seq_lens)
    token, mask, positions, index, first, sibling = built
    assert all(t.dtype == torch.int64 for t in built)
    assert mask.shape == (bs, n, 1) and positions.shape == (bs * n,)
    assert index.tolist() == [[b * n + i for i in range(n)] for b in range(bs)]
    for b, draft in enumerate(drafts):
        tokens, masks, depths, firsts, siblings = draft.tree(n)
        assert token[b].tolist() == [verified[b], *tokens]
        assert unsigned(mask[b, :, 0].tolist()) == masks
        assert positions.view(bs, n)[b].tolist() == [seq_lens[b] + d for d in depths]
        assert first[b].tolist() == firsts
        assert sibling[b].tolist() == siblings


@settings(max_examples=25)
@given(data=st.data())
def test_a_draft_of_ties_and_nan(kernels, device, data):
    """Few different probabilities, all powers of two: products are exact and many of them are equal."""
    topk, steps, bs = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    chances = [1.0, 0.5, 0.25, 0.125, 0.0, *([NAN] if data.draw(st.booleans()) else [])]
    one = st.tuples(st.sampled_from(chances), st.integers(0, 2**31))
    beam = st.lists(one, min_size=topk, max_size=topk)
    level = st.lists(beam, min_size=topk, max_size=topk)
    proposals = [
        (data.draw(beam), data.draw(st.lists(level, min_size=steps - 1, max_size=steps - 1)))
        for _ in range(bs)
    ]
    total = topk + (steps - 1) * topk * topk
    check(kernels, device, proposals, data.draw(st.integers(1, min(total, 63))) + 1)


@pytest.mark.parametrize("topk, steps, n", [(16, 2, 64), (16, 5, 33), (9, 8, 64), (1, 63, 64), (1, 1, 2)])
def test_large_drafts(kernels, device, topk, steps, n):
    """More beams than a word of the ancestor mask has bits, and rows up to the sign bit of the tree mask."""

    def some(*shape):
        p = 0.5 ** torch.randint(0, 3, shape)
        return torch.stack([p.double(), torch.randint(0, 50_000, shape).double()], -1).tolist()

    check(kernels, device, [(some(topk), some(steps - 1, topk, topk)) for _ in range(2)], n)


def test_a_node_whose_parent_was_not_chosen_is_left_out(kernels, device):
    """Only "probabilities" above one can do it: the children of candidate 1 beat everything, itself too."""
    first, one = [(0.5, 10), (0.25, 11)], [[(0.5, 20), (0.5, 21)], [(8.0, 22), (8.0, 23)]]
    check(kernels, device, [(first, [one])], 4)
    levels = [(torch.tensor([[0.5, 0.25]]), torch.tensor([[10, 11]]))]
    levels.append((torch.tensor([[[0.5, 0.5], [8.0, 8.0]]]), torch.tensor([[[20, 21], [22, 23]]])))
    token, mask, positions, _, child, sibling = run(kernels, device, [], levels, 4, [9], [9])
    assert token[0].tolist() == [9, 10, 22, 23]
    assert mask[0, :, 0].tolist() == [0b1, 0b11, 0b100, 0b1000]
    assert positions.tolist() == [9, 10, 9, 9]
    assert child[0].tolist() == [1, -1, -1, -1] and sibling[0].tolist() == [-1] * 4
