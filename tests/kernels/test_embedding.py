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
