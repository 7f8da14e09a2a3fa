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
