"""Reading reserved slots out of the request table: both sets of kernels against loops."""

from __future__ import annotations

import pytest
import torch

from stages.spec_v2.kernels import KERNEL_SETS, load_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=KERNEL_SETS)
def kernels(request):
    return load_kernels(request.param)


@pytest.fixture
def table():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 10**6, (6, 50), generator=generator, dtype=torch.int32).to(DEVICE)


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.mark.parametrize("width", [1, 4, 7])
def test_slots_of_an_extend(kernels, table, width):
    rows, start = [3, 0, 5], [0, 17, 43]
    slots = kernels.assign_extend_cache_locs(table, column(*rows), column(*start), width)
    assert slots.dtype == torch.int64
    for b, (row, first) in enumerate(zip(rows, start, strict=True)):
        assert slots[b].tolist() == table[row, first : first + width].tolist()


@pytest.mark.parametrize("topk, levels", [(1, 2), (2, 3), (4, 2)])
def test_slots_of_a_draft_by_level(kernels, table, topk, levels):
    rows, seq_lens, before = [2, 4], [11, 30], table.clone()
    out, positions, kv_lens = kernels.assign_draft_cache_locs(
        table, column(*rows), column(*seq_lens), levels * topk, topk
    )
    assert out.shape == positions.shape == (levels, 2 * topk) and kv_lens.shape == (levels, 2)
    for level in range(levels):
        for b, (row, length) in enumerate(zip(rows, seq_lens, strict=True)):
            for beam in range(topk):
                place = b * topk + beam
                assert int(out[level, place]) == int(table[row, length + level * topk + beam])
                assert int(positions[level, place]) == length + level
            assert int(kv_lens[level, b]) == length + (level + 1) * topk
    assert torch.equal(table, before), "only the scheduler writes to the table"


def test_nothing_to_draft(kernels, table):
    """One step: the only level needs no forward, so there are no columns."""
    out, positions, kv_lens = kernels.assign_draft_cache_locs(table, column(1), column(5), 0, 4)
    assert out.shape == positions.shape == (0, 4) and kv_lens.shape == (0, 1)
