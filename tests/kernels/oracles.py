"""What a layer computes, in loops over single numbers or plain float64: the judges of the kernel tests."""

from __future__ import annotations

import math

import torch


def norm(x, weight, eps):
    """RMSNorm of x [rows, hidden], float64."""
    rows = []
    for row in x.double().tolist():
        scale = 1 / math.sqrt(sum(v * v for v in row) / len(row) + eps)
        rows.append([v * scale * w for v, w in zip(row, weight.double().tolist(), strict=True)])
    return torch.tensor(rows, dtype=torch.float64)


def product(x, weight, bias=None):
    """x Wᵀ + bias, float64 on the host."""
    y = x.double().cpu() @ weight.double().cpu().t()
    return y if bias is None else y + bias.double().cpu()


def gate(x):
    """silu(first half) · second half of x [rows, 2 · width]."""
    width = x.shape[1] // 2
    rows = [
        [g / (1 + math.exp(-g)) * u for g, u in zip(row[:width], row[width:], strict=True)]
        for row in x.double().tolist()
    ]
    return torch.tensor(rows, dtype=torch.float64)


def angles(positions, dim):
    """A rotary table [positions, dim] with the angle of each pair, [positions, dim / 2], beside it."""
    angle = torch.arange(positions).unsqueeze(1) / 100 ** (torch.arange(dim // 2) / dim)
    return torch.cat((angle.cos(), angle.sin()), dim=1), angle


def rotate(x, positions, angle):
    """x [rows, heads, D] turned by the angles of its positions: pairs are (i, i + D / 2)."""
    x, dim = x.double().cpu(), x.shape[-1]
    out = torch.empty(x.shape, dtype=torch.float64)
    for row, position in enumerate(positions.tolist()):
        for head in range(x.shape[1]):
            for i in range(dim // 2):
                a, b = x[row, head, i].item(), x[row, head, i + dim // 2].item()
                turn = angle[position, i].item()
                out[row, head, i] = a * math.cos(turn) - b * math.sin(turn)
                out[row, head, i + dim // 2] = b * math.cos(turn) + a * math.sin(turn)
    return out


def close(actual, expected, tolerance):
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), atol=tolerance, rtol=tolerance)


def guarded(*shape, device, dtype=torch.float32, scale=1.0):
    """Random numbers in the middle of a larger tensor that is NaN everywhere else.

    Rows of a matrix keep a distance, as those of a fused projection do; longer shapes stay contiguous.
    """
    nan = float("nan")
    if len(shape) == 2:
        outer = torch.full((shape[0] + 6, shape[1] + 5), nan, device=device, dtype=dtype)
        inner = outer[3 : 3 + shape[0], : shape[1]]
    else:
        outer = torch.full((shape[0] + 6, *shape[1:]), nan, device=device, dtype=dtype)
        inner = outer[3 : 3 + shape[0]]
    inner.copy_(torch.randn(shape) * scale)
    return inner


def guarded_rows(rows, width, device, dtype=torch.float32, scale=1.0):
    """A contiguous random matrix with rows of NaN before and behind it."""
    outer = torch.full((rows + 6, width), float("nan"), device=device, dtype=dtype)
    outer[3 : 3 + rows] = torch.randn(rows, width) * scale
    return outer[3 : 3 + rows]
