"""RMSNorm, rotary embedding with the KV store, and SiLU-and-mul against loops over single numbers."""

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.oracles import close, guarded


@pytest.mark.parametrize("rows,hidden", [(1, 16), (3, 96), (2, 576)])
def test_rms_norm(kernels, device, dtype, tolerance, rows, hidden):
    x = guarded(rows, hidden, device=device, dtype=dtype)
    weight = torch.rand(hidden, device=device, dtype=dtype) + 0.5
    before = x.clone()
    y = kernels.rms_norm(x, weight, 1e-5)
    assert y.dtype == dtype and torch.equal(x, before)
    close(y, oracles.norm(x, weight, 1e-5), tolerance)


def test_rms_norm_keeps_the_scale_of_small_rows(kernels, device):
    x = torch.full((1, 8), 1e-4, device=device)
    close(kernels.rms_norm(x, torch.ones(8, device=device), 1e-8), torch.full((1, 8), 2**-0.5), 1e-5)


@pytest.mark.parametrize("q_heads,kv_heads,dim", [(9, 3, 64), (4, 2, 16), (5, 1, 80), (3, 3, 6)])
def test_rotary_store(kernels, device, dtype, tolerance, q_heads, kv_heads, dim):
    """Queries and keys turn, values do not; of two pools of NaN only the named slots are written."""
    positions, loc = torch.tensor([0, 7, 31, 7], device=device), torch.tensor([7, 1, 3, 10], device=device)
    table, angle = oracles.angles(32, dim)
    table[[p for p in range(32) if p not in (0, 7, 31)]] = float("nan")
    qkv = guarded(4, (q_heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
    # The pools of one layer stand between those of others.
    pool = torch.full((2, 3, 11, kv_heads, dim), float("nan"), device=device, dtype=dtype)
    k_cache, v_cache = pool[:, 1]
    q = kernels.rotary_store(qkv, positions, table.to(device), k_cache, v_cache, loc)
    assert q.dtype == dtype and q.shape == (4, q_heads, dim)
    heads = qkv.reshape(4, -1, dim).split((q_heads, kv_heads, kv_heads), dim=1)
    close(q, oracles.rotate(heads[0], positions, angle), tolerance)
    close(k_cache[loc], oracles.rotate(heads[1], positions, angle), tolerance)
    assert torch.equal(v_cache[loc], heads[2])
    untouched = [slot for slot in range(11) if slot not in loc.tolist()]
    assert pool[:, [0, 2]].isnan().all() and pool[:, 1, untouched].isnan().all()


def test_padded_rows_share_the_padding_slot(kernels, device):
    """Two rows of NaN write to slot 0; the row beside them is what it is alone."""
    positions, table = torch.tensor([3, 0, 0], device=device), oracles.angles(8, 16)[0].to(device)
    qkv = torch.randn(3, 4 * 16, device=device)
    results = []
    for padding in (1.0, float("nan")):
        qkv[1:] = padding
        caches = torch.zeros(2, 4, 1, 16, device=device)
        q = kernels.rotary_store(qkv, positions, table, *caches, torch.tensor([2, 0, 0], device=device))
        assert not caches[:, [1, 3]].any()
        results.append((q[0], caches[:, 2]))
    assert results[0][0].all() and results[0][1].all()
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


@pytest.mark.parametrize("rows,width", [(1, 8), (3, 1536)])
def test_silu_and_mul(kernels, device, dtype, tolerance, rows, width):
    x = guarded(rows, 2 * width, device=device, dtype=dtype, scale=3)
    y = kernels.silu_and_mul(x)
    assert y.dtype == dtype
    close(y, oracles.gate(x), tolerance)


def test_no_rows(kernels, device):
    empty = torch.empty(0, 16, device=device)
    assert kernels.rms_norm(empty, torch.ones(16, device=device), 1e-5).shape == (0, 16)
    assert kernels.silu_and_mul(empty).shape == (0, 8)
    caches, none = torch.zeros(2, 3, 1, 4, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    q = kernels.rotary_store(empty, none, torch.ones(2, 4, device=device), *caches, none)
    assert q.shape == (0, 2, 4)
    assert not caches.any()
