"""Trees against an oracle that finds ancestors by walking from parent to parent."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def draft(data, topk, steps):
    """Flat scores and recorded parents of a draft, as draft_forward makes them, with many equal scores."""
    chance = st.sampled_from([1.0, 0.5, 0.25, 0.125])
    beam = [data.draw(chance) for _ in range(topk)]  # score of each kept branch
    scores, parents = list(beam), [-1, *range(topk)]
    for step in range(1, steps):
        children = [score * data.draw(chance) for score in beam for _ in range(topk)]  # topk * topk
        kept = sorted(range(len(children)), key=lambda i: (-children[i], i))[:topk]
        scores += children
        if step < steps - 1:
            parents += [i + topk + topk * topk * (step - 1) for i in kept]
        beam = [children[i] for i in kept]
    return scores, parents if steps > 1 else []


def tree_oracle(selected, parents, topk, seq_len):
    """selected: flat candidate index of rows 1 to n - 1."""
    n = len(selected) + 1

    def parent(row):
        candidate = selected[row - 1]
        block = candidate // topk
        return 0 if block == 0 else selected.index(parents[block]) + 1

    masks, positions = [], []
    for row in range(n):
        bits, depth, at = 1 << row, 0, row
        while at != 0:
            at = parent(at)
            bits |= 1 << at
            depth += 1
        masks.append(bits)
        positions.append(seq_len + depth)
    children = {row: [c for c in range(1, n) if parent(c) == row] for row in range(n)}
    first = [children[row][0] if children[row] else -1 for row in range(n)]
    sibling = [-1] * n
    for family in children.values():
        for one, following in zip(family, family[1:], strict=False):
            sibling[one] = following
    return masks, positions, first, sibling


def unsigned(words):
    return [w & (2**64 - 1) for w in words]


@settings(max_examples=25)
@given(data=st.data())
def test_build_tree(kernels, device, data):
    topk, steps, bs = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    total = topk + (steps - 1) * topk * topk
    n = data.draw(st.integers(1, min(total, 63))) + 1
    drafts = [draft(data, topk, steps) for _ in range(bs)]
    selected = [sorted(sorted(range(total), key=lambda i: (-scores[i], i))[: n - 1]) for scores, _ in drafts]
    seq_lens = [data.draw(st.integers(1, 100)) for _ in range(bs)]
    parent_list = torch.tensor([parents for _, parents in drafts], dtype=torch.int64).view(bs, -1)
    assert parent_list.shape[1] == (topk * (steps - 1) + 1 if steps > 1 else 0)
    mask, positions, index, first, sibling = kernels.build_tree(
        torch.tensor(selected, device=device),
        parent_list.to(device),
        topk,
        torch.tensor(seq_lens, device=device),
    )
    assert mask.shape == (bs, n, 1) and positions.shape == (bs * n,)
    assert all(t.dtype == torch.int64 for t in (mask, positions, index, first, sibling))
    assert index.tolist() == [[b * n + i for i in range(n)] for b in range(bs)]
    for b, (_, parents) in enumerate(drafts):
        masks, depths, firsts, siblings = tree_oracle(selected[b], parents, topk, seq_lens[b])
        assert unsigned(mask[b, :, 0].tolist()) == masks
        assert positions.view(bs, n)[b].tolist() == depths
        assert first[b].tolist() == firsts
        assert sibling[b].tolist() == siblings


def test_a_chain_of_64_uses_the_sign_bit(kernels, device):
    selected = torch.arange(63, device=device).unsqueeze(0)
    parents = (torch.arange(63, device=device) - 1).unsqueeze(0)
    mask, positions, _, first, sibling = kernels.build_tree(
        selected, parents, 1, torch.tensor([5], device=device)
    )
    assert unsigned(mask[0, :, 0].tolist()) == [2 ** (i + 1) - 1 for i in range(64)]
    assert positions.tolist() == list(range(5, 69))
    assert first[0].tolist() == [*range(1, 64), -1] and sibling[0].tolist() == [-1] * 64


def test_a_node_whose_parent_was_not_selected_is_left_out(kernels, device):
    # topk 2: candidate 4 hangs on the candidate parent_list[2] = 1, which is not selected; 5 likewise.
    selected = torch.tensor([[0, 4, 5]], device=device)
    parents = torch.tensor([[-1, 0, 1]], device=device)
    mask, positions, _, first, sibling = kernels.build_tree(
        selected, parents, 2, torch.tensor([9], device=device)
    )
    assert mask[0, :, 0].tolist() == [0b1, 0b11, 0b100, 0b1000]
    assert positions.tolist() == [9, 10, 9, 9]
    assert first[0].tolist() == [1, -1, -1, -1] and sibling[0].tolist() == [-1] * 4
