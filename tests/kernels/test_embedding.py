"""The input of a draft model, row by row."""

import pytest
import torch

from tests.kernels.oracles import guarded, guarded_rows


@pytest.mark.parametrize("hidden", [1, 24, 70])
@pytest.mark.parametrize(
    "ids, rows", [([3], [0]), ([4, 0, 4, 2, 1], [2, 2, 0, 1, 0]), ([1, 0, 3], None), ([], [])]
)
def test_embed_with_hidden(kernels, device, dtype, hidden, ids, rows):
    """Each row has its own token's embedding before its own hidden state; a row may be used by many."""
    embed = guarded_rows(5, hidden, device, dtype)
    states = guarded(3, hidden, device=device, dtype=dtype)  # rows keep a distance
    input_ids = torch.tensor(ids, dtype=torch.int64, device=device)
    hidden_rows = None if rows is None else torch.tensor(rows, dtype=torch.int64, device=device)
    fused = kernels.embed_with_hidden(input_ids, embed, states, hidden_rows)
    assert fused.shape == (len(ids), 2 * hidden) and fused.dtype == dtype
    for i, (token, row) in enumerate(zip(ids, range(3) if rows is None else rows, strict=False)):
        assert torch.equal(fused[i, :hidden], embed[token]) and torch.equal(fused[i, hidden:], states[row])


@pytest.mark.parametrize("hidden", [24, 70])
@pytest.mark.parametrize("ids, rows", [([4, 0, 4, 2, 1], [2, 2, 0, 1, 0]), ([1, 0, 3], None), ([], [])])
def test_norm_embed_with_hidden(kernels, device, dtype, tolerance, hidden, ids, rows):
    """Either half has the mean square of its own norm's weight; the residual is the state as it was."""
    embed = guarded_rows(5, hidden, device, dtype)
    states = guarded(3, hidden, device=device, dtype=dtype)
    norms = torch.rand(2, hidden, device=device, dtype=dtype) + 0.5
    input_ids = torch.tensor(ids, dtype=torch.int64, device=device)
    hidden_rows = None if rows is None else torch.tensor(rows, dtype=torch.int64, device=device)
    pairs, residual = kernels.norm_embed_with_hidden(
        input_ids, embed, norms[0], states, hidden_rows, norms[1], 1e-5
    )
    assert pairs.shape == (len(ids), 2 * hidden) and pairs.dtype == residual.dtype == dtype
    for i, (token, row) in enumerate(zip(ids, range(3) if rows is None else rows, strict=False)):
        assert torch.equal(residual[i], states[row])
        halves = pairs[i].float().split(hidden)
        for half, source, norm in zip(halves, (embed[token], states[row]), norms.float(), strict=True):
            want = source.float() / (source.float().square().mean() + 1e-5).sqrt() * norm
            torch.testing.assert_close(half, want, atol=tolerance, rtol=tolerance)
