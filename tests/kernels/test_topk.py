"""The largest entries and their order among equals, against a sort of Python tuples."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.part4_worker.kernels.native.topk import topk_softmax

pytestmark = pytest.mark.slow

INF = float("inf")


def top_k_oracle(row, k):
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


@settings(max_examples=15)
@given(data=st.data())
def test_top_k_with_many_ties(kernels, device, data):
    n = data.draw(st.integers(1, 40))
    k = data.draw(st.integers(1, n))
    number = st.sampled_from([0.0, -0.0, 1.0, 0.5, -2.0, -INF, 2.0**-100])
    rows = [data.draw(st.lists(number, min_size=n, max_size=n)) for _ in range(2)]
    x = torch.tensor(rows, device=device)
    values, indices = kernels.top_k(x, k)
    assert indices.dtype == torch.int64 and values.dtype == x.dtype
    for row, got, value in zip(rows, indices.tolist(), values.tolist(), strict=True):
        assert got == top_k_oracle(row, k)
        assert value == [row[i] for i in got]
    assert kernels.argmax(x).tolist() == [top_k_oracle(row, 1)[0] for row in rows]


@pytest.mark.parametrize("n,k", [(2048, 16), (2049, 3), (5000, 16), (4097, 20)])
def test_top_k_of_long_rows(kernels, device, n, k):
    rows = torch.randint(-300, 300, (3, n)) / 4  # each value several times, so ties cross block borders
    rows[0, [5, n - 1]] = 1000
    rows[1] = -INF
    rows[2] = 7
    values, indices = kernels.top_k(rows.to(device), k)
    for row, got, value in zip(rows.tolist(), indices.tolist(), values.tolist(), strict=True):
        assert got == top_k_oracle(row, k)
        assert value == [row[i] for i in got]
    assert kernels.argmax(rows.to(device)).tolist() == [5, 0, 0]


def test_top_k_of_strided_rows(kernels, device):
    x = torch.randn(4, 30).to(device)
    for view in (x[:, 3:20], x[::2], x.T):
        expected = kernels.top_k(view.clone(memory_format=torch.contiguous_format), 2)
        assert torch.equal(kernels.top_k(view, 2)[1], expected[1])


@pytest.mark.parametrize("vocab,k", [(12, 12), (300, 4), (5000, 8)])
def test_topk_softmax(vocab, k):
    logits = torch.randn(3, vocab) * 4
    logits[0, : vocab // 2] = logits[0].max() + 1
    logits[1, 3:] = -INF
    logits[2] += 1e4  # would overflow if the maximum were not taken out
    probs, ids = topk_softmax(logits, k)
    assert probs.dtype == torch.float32 and ids.dtype == torch.int64
    for row, got_ids, got in zip(logits.tolist(), ids.tolist(), probs.tolist(), strict=True):
        assert got_ids == top_k_oracle(row, k)
        top = max(row)
        total = math.fsum(math.exp(v - top) for v in row)
        expected = [math.exp(row[i] - top) / total for i in got_ids]
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-7)
        assert all(a >= b for a, b in zip(got, got[1:], strict=False))


@pytest.mark.gpu
def test_vocabulary_sized_rows_agree_on_the_gpu(native, triton_kernels, device):
    logits = torch.randn(8, 49152, device=device)
    for first, second in zip(native.top_k(logits, 8), triton_kernels.top_k(logits, 8), strict=True):
        assert torch.equal(first, second)
    assert torch.equal(native.argmax(logits), triton_kernels.argmax(logits))
