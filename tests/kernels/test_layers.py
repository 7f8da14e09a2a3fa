"""RMSNorm, rotary embedding and SiLU-and-mul against loops over single numbers."""

import math

import pytest
import torch


def norm_oracle(x, weight, eps):
    rows = []
    for row in x.double().tolist():
        scale = 1 / math.sqrt(sum(v * v for v in row) / len(row) + eps)
        rows.append([v * scale * w for v, w in zip(row, weight.double().tolist(), strict=True)])
    return torch.tensor(rows, dtype=torch.float64)


def close(actual, expected, tolerance):
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows,hidden", [(1, 16), (3, 96), (2, 576)])
def test_rms_norm(kernels, device, dtype, tolerance, rows, hidden):
    x = torch.randn(rows, hidden, device=device, dtype=dtype)
    weight = torch.rand(hidden, device=device, dtype=dtype) + 0.5
    before = x.clone()
    y = kernels.rms_norm(x, weight, 1e-5)
    assert y.dtype == dtype and torch.equal(x, before)
    close(y, norm_oracle(x, weight, 1e-5), tolerance)


def test_rms_norm_with_residual_adds_first_and_returns_the_sum(kernels, device, dtype, tolerance):
    x, residual = (torch.randn(3, 40, device=device, dtype=dtype) for _ in range(2))
    weight = torch.rand(40, device=device, dtype=dtype)
    before = residual.clone()
    y, summed = kernels.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(summed, x + residual) and torch.equal(residual, before)
    close(y, norm_oracle(summed, weight, 1e-6), tolerance)


def test_rms_norm_keeps_the_scale_of_small_rows(kernels, device):
    x = torch.full((1, 8), 1e-4, device=device)
    close(kernels.rms_norm(x, torch.ones(8, device=device), 1e-8), torch.full((1, 8), 2**-0.5), 1e-5)


@pytest.mark.parametrize("q_heads,k_heads,dim", [(9, 3, 64), (4, 2, 16), (5, 1, 80), (3, 3, 6)])
def test_rotary(kernels, device, dtype, tolerance, q_heads, k_heads, dim):
    positions = torch.tensor([0, 7, 31, 7], device=device)
    angle = torch.arange(32).unsqueeze(1) / 100 ** (torch.arange(dim // 2) / dim)  # [32, D / 2]
    cache = torch.cat((angle.cos(), angle.sin()), dim=1).to(device)
    # Views of one projection, as a model makes them: rows are further apart than they are long.
    fused = torch.randn(4, (q_heads + k_heads) * dim + 5, device=device, dtype=dtype)
    q = fused[:, : q_heads * dim].view(4, q_heads, dim)
    k = fused[:, q_heads * dim : (q_heads + k_heads) * dim].view(4, k_heads, dim)
    for x, y in zip((q, k), kernels.apply_rotary(q, k, positions, cache), strict=True):
        assert y.dtype == dtype and y.shape == x.shape
        expected = torch.empty(x.shape, dtype=torch.float64)
        for row, position in enumerate(positions.tolist()):
            for head in range(x.shape[1]):
                for i in range(dim // 2):
                    a, b = x[row, head, i].item(), x[row, head, i + dim // 2].item()
                    turn = angle[position, i].item()
                    expected[row, head, i] = a * math.cos(turn) - b * math.sin(turn)
                    expected[row, head, i + dim // 2] = b * math.cos(turn) + a * math.sin(turn)
        close(y, expected, tolerance)


@pytest.mark.parametrize("rows,width", [(1, 8), (3, 1536)])
def test_silu_and_mul(kernels, device, dtype, tolerance, rows, width):
    x = torch.randn(rows, 2 * width, device=device, dtype=dtype) * 3
    y = kernels.silu_and_mul(x)
    assert y.dtype == dtype
    expected = [
        [g / (1 + math.exp(-g)) * u for g, u in zip(row[:width], row[width:], strict=True)]
        for row in x.double().tolist()
    ]
    close(y, torch.tensor(expected), tolerance)


def test_no_rows(kernels, device):
    empty = torch.empty(0, 16, device=device)
    assert kernels.rms_norm(empty, torch.ones(16, device=device), 1e-5).shape == (0, 16)
    assert kernels.silu_and_mul(empty).shape == (0, 8)
