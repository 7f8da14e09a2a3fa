"""Slots and mask bits laid out for FlashInfer, one element at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

POISON = 99


def indptr(lens, device):
    return torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32)


@settings(max_examples=12)
@given(data=st.data())
def test_create_kv_indices(kernels, device, data):
    """Lengths that were planned too long repeat the last slot; the table behind the end is not followed."""
    bs, page = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 4, 16]))
    width = data.draw(st.sampled_from([32, 528]))
    lens = [data.draw(st.integers(0, width)) for _ in range(bs)]
    planned = [data.draw(st.integers(n, min(n + 9, width))) if n else 0 for n in lens]
    requests = data.draw(st.permutations(range(5)))[:bs]
    pages = torch.randperm(5 * width // page) * page
    table = (pages.repeat_interleave(page) + torch.arange(page).repeat(len(pages))).view(5, width).int()
    expected = []
    for request, n, longer in zip(requests, lens, planned, strict=True):
        slots = table[request].tolist()
        expected += slots[:n] + slots[n - 1 : n] * (longer - n)
        table[request, n if page == 1 else -(-n // page) * page :] = -7
        if page > 1:
            table[request, torch.arange(width) % page != 0] = -7  # only the first entry of a page counts
    out = torch.full((sum(planned) + 3,), POISON, dtype=torch.int32, device=device)
    kernels.create_kv_indices(
        table.to(device),
        torch.tensor(requests, device=device),
        torch.tensor(lens, device=device),
        indptr(planned, device),
        out,
        page,
    )
    assert out.tolist() == expected + [POISON] * 3


def test_a_request_of_no_length_that_was_planned_longer_reads_its_first_column(kernels, device):
    """A padded row of a graph: its table row names the padding slot."""
    table = torch.tensor([[0, 5], [3, 4]], dtype=torch.int32, device=device)
    out = torch.full((3,), POISON, dtype=torch.int32, device=device)
    kernels.create_kv_indices(
        table,
        torch.tensor([1, 0], device=device),
        torch.tensor([1, 0], device=device),
        indptr([1, 2], device),
        out,
        1,
    )
    assert out.tolist() == [3, 0, 0]


@pytest.mark.parametrize("q_len, columns", [(1, 3), (4, 4), (8, 8), (4, 70), (64, 64)])
def test_create_custom_mask(kernels, device, q_len, columns):
    words = -(-columns // 64)
    prefixes, tails = [0, 5, 63, 600, 0, 7], [columns, columns, 2, columns, 0, columns + 3]
    lens = [p + t for p, t in zip(prefixes, tails, strict=True)]
    tree_mask = torch.randint(-(2**63), 2**63 - 1, (len(lens), q_len, words + 1))[:, :, :words]  # strided
    out = torch.full((q_len * sum(lens) + 5,), POISON, dtype=torch.uint8, device=device)
    kernels.create_custom_mask(
        tree_mask.to(device),
        torch.tensor(prefixes, device=device),
        indptr(lens, device),
        out,
        max(lens),
    )
    out, begin = out.tolist(), 0
    for b, (prefix, kv_len) in enumerate(zip(prefixes, lens, strict=True)):
        size = -(-q_len * kv_len // 8)
        bits = [out[begin + i // 8] >> i % 8 & 1 for i in range(8 * size)]
        for i in range(8 * size):
            row, column = divmod(i, kv_len)
            tail = column - prefix
            seen = (
                0 <= tail < 64 * words and row < q_len and int(tree_mask[b, row, tail // 64]) >> tail % 64 & 1
            )
            assert bits[i] == (row < q_len and (column < prefix or seen)), (b, row, column)
        assert set(out[begin + size : begin + q_len * kv_len]) <= {POISON}  # nothing is written between
        begin += q_len * kv_len
    assert out[begin:] == [POISON] * 5
