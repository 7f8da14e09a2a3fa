"""Writes to the KV pool and to the request table, one element at a time."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def test_store_kv(kernels, device, dtype):
    fused = torch.randn(4, 2 * 3 * 20 + 4, device=device, dtype=dtype)
    k, v = (fused[:, i * 60 : (i + 1) * 60].view(4, 3, 20) for i in range(2))
    pool = torch.full(
        (2, 2, 11, 3, 20), float("nan"), device=device, dtype=dtype
    )  # [k or v, layers, slots, ...]
    loc = torch.tensor([7, 0, 3, 10], device=device)
    kernels.store_kv(k, v, pool[0, 1], pool[1, 1], loc)
    for which, rows in enumerate((k, v)):
        for slot in range(11):
            if slot in loc.tolist():
                assert torch.equal(pool[which, 1, slot], rows[loc.tolist().index(slot)])
            else:
                assert pool[which, 1, slot].isnan().all()
    assert pool[:, 0].isnan().all()


def test_store_kv_lets_padded_rows_share_the_padding_slot(kernels, device):
    k, v = torch.randn(2, 3, 1, 8, device=device)
    k_cache, v_cache = torch.zeros(2, 4, 1, 8, device=device)
    kernels.store_kv(k, v, k_cache, v_cache, torch.tensor([2, 0, 0], device=device))
    assert torch.equal(k_cache[2], k[0]) and torch.equal(v_cache[2], v[0])
    assert not k_cache[[1, 3]].any() and not v_cache[[1, 3]].any()


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
