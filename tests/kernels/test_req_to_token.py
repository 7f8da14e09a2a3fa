"""Writes to the request table, one element at a time."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=12)
@given(data=st.data())
def test_assign_req_to_token(kernels, device, data):
    bs, width = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 3, 8, 130]))
    table = torch.arange(6 * 140, dtype=torch.int32).view(6, 140)
    expected = table.clone()
    requests = data.draw(st.permutations(range(6)))[:bs]
    start = [data.draw(st.integers(0, 140 - width)) for _ in range(bs)]
    lens = [data.draw(st.integers(0, width)) for _ in range(bs)]
    slots = -1 - torch.arange(bs * width).view(bs, width)
    for b in range(bs):
        for j in range(lens[b]):
            expected[requests[b], start[b] + j] = slots[b, j]
    table = table.to(device)
    arguments = (torch.tensor(requests), torch.tensor(start), slots, torch.tensor(lens))
    kernels.assign_req_to_token(table, *(t.to(device) for t in arguments))
    assert torch.equal(table.cpu(), expected)


@settings(max_examples=12)
@given(data=st.data())
def test_assign_draft_cache_locs(kernels, device, data):
    bs, topk, levels = (
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 16)),
        data.draw(st.integers(0, 5)),
    )
    width = levels * topk
    table = torch.arange(6 * 140, dtype=torch.int32).view(6, 140)
    expected = table.clone()
    requests = data.draw(st.permutations(range(6)))[:bs]
    lens = [data.draw(st.integers(0, 140 - width)) for _ in range(bs)]
    slots = -1 - torch.arange(bs * width).view(bs, width)
    locs, positions, kv_lens = ([[] for _ in range(levels)] for _ in range(3))
    for level in range(levels):
        for b in range(bs):
            for beam in range(topk):
                column = level * topk + beam
                expected[requests[b], lens[b] + column] = slots[b, column]
                locs[level].append(int(slots[b, column]))
                positions[level].append(lens[b] + level)
            kv_lens[level].append(lens[b] + (level + 1) * topk)
    table = table.to(device)
    arguments = (torch.tensor(requests), torch.tensor(lens), slots)
    laid_out = kernels.assign_draft_cache_locs(table, *(t.to(device) for t in arguments), topk)
    assert torch.equal(table.cpu(), expected)
    for have, want in zip(laid_out, (locs, positions, kv_lens), strict=True):
        assert have.dtype == torch.int64 and have.tolist() == want


def test_all_slots_are_entered_where_no_lengths_are_given(kernels, device):
    table = torch.zeros(3, 9, dtype=torch.int32, device=device)
    requests, start = torch.tensor([2, 0], device=device), torch.tensor([1, 5], device=device)
    kernels.assign_req_to_token(table, requests, start, torch.tensor([[7, 8, 9], [4, 5, 6]], device=device))
    assert table.tolist() == [[0, 0, 0, 0, 0, 4, 5, 6, 0], [0] * 9, [0, 7, 8, 9, 0, 0, 0, 0, 0]]
