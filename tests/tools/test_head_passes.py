"""The unrolled passes against drafting done one token at a time, and the loss mask."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.tools.head_helpers import fed_states, tiny_setting
from tools.models.head_batches import WIDTH, epoch_batches, loss_mask
from tools.models.head_model import rotary_table
from tools.models.head_passes import unrolled_passes


@pytest.fixture(scope="module", params=["EAGLE", "EAGLE3"])
def setting(request, tmp_path_factory):
    return tiny_setting(tmp_path_factory.mktemp("target"), request.param, std=0.08)


def attend(head, q, keys, values):
    """One query `[Hk, G, D]` over lists of keys and values `[Hk, D]`, head by head."""
    out = torch.zeros_like(q)
    for h in range(q.shape[0]):
        for g in range(q.shape[1]):
            scores = torch.stack([q[h, g] @ key[h] for key in keys]) / q.shape[2] ** 0.5
            out[h, g] = scores.softmax(0) @ torch.stack([value[h] for value in values])
    return out


def draft_by_hand(head, target, tokens, hidden, start, passes):
    """Draft from position `start` as an engine would: committed pairs first, then the head on its own
    outputs.

    tokens `[L]`, hidden `[L, h]`. The drafted tokens are the true ones, as they are in any round that goes
    on.
    """
    w = head.weights(torch.float32)
    table = rotary_table(head.config, len(tokens) + passes, "cpu")
    keys, values, outputs = [], [], []

    def step(token, state, position):
        x = head.fuse(w, F.embedding(token, target.embedding), state)[None, None]
        q, k, v = head.qkv(w, x, table[:, position : position + 1])
        keys.append(k[0, :, 0])
        values.append(v[0, :, 0])
        attended = attend(head, q[0, :, :, 0], keys, values)[None, :, :, None]
        return head.finish(w, x, attended)[0, 0]

    for p in range(start + 1):
        out = step(tokens[p + 1], hidden[p], p)
    outputs.append(out)
    for k in range(2, passes + 1):
        outputs.append(step(tokens[start + k], outputs[-1], start + k - 1))
    return torch.stack(outputs)


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_passes_equal_drafting_position_by_position(setting, passes):
    target, head = setting
    torch.manual_seed(passes)
    tokens = torch.randint(3, 61, (2, 14))
    hidden = fed_states(head, target, tokens)
    embeds = F.embedding(tokens, target.embedding)
    table = rotary_table(head.config, 32, "cpu")
    with torch.no_grad():
        outputs = unrolled_passes(head, head.weights(torch.float32), embeds, hidden, table, passes)
        for row in range(2):
            for start in (0, 3, 14 - passes - 1):
                expected = draft_by_hand(head, target, tokens[row], hidden[row], start, passes)
                got = torch.stack([out[row, start] for out in outputs])
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_the_future_does_not_reach_back(setting):
    """Changing token t+k+1 changes nothing that pass k gave at t."""
    target, head = setting
    torch.manual_seed(5)
    tokens = torch.randint(3, 61, (1, 12))
    other = tokens.clone()
    other[0, 8:] = torch.randint(3, 61, (4,))
    table = rotary_table(head.config, 32, "cpu")

    def run(ids):
        with torch.no_grad():
            embeds, hidden = F.embedding(ids, target.embedding), fed_states(head, target, ids)
            return unrolled_passes(head, head.weights(torch.float32), embeds, hidden, table, 3)

    for k, (first, second) in enumerate(zip(run(tokens), run(other), strict=True), 1):
        torch.testing.assert_close(first[0, : 8 - k], second[0, : 8 - k], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(first[0, 8 - k], second[0, 8 - k])


def test_loss_begins_at_the_last_prompt_position_with_the_second_answer_token():
    """Contract case B128."""
    prompt, answer = [7, 8, 9, 10], [21, 22, 23, 24, 25]
    tokens = prompt + answer
    mask = loss_mask(np.array([4]), np.array([9]), 16)[0]
    assert mask[: len(prompt) - 1].sum() == 0
    assert mask[3] == 1 and tokens[3 + 2] == answer[1]
    # The last index with a label is the one before the last but one.
    assert np.nonzero(mask)[0].tolist() == [3, 4, 5, 6] and tokens[6 + 2] == answer[-1]


def test_an_answer_of_one_token_has_no_loss():
    assert loss_mask(np.array([4]), np.array([5]), 8).sum() == 0


def test_an_epoch_takes_every_sequence_once_in_batches_that_fit():
    lengths = np.random.default_rng(0).integers(5, 700, 500)
    batches = epoch_batches(lengths, 4096, 3, 0)
    assert sorted(np.concatenate([numbers for _, numbers in batches])) == list(range(500))
    for width, numbers in batches:
        assert width % WIDTH == 0 and lengths[numbers].max() <= width
        assert width * len(numbers) <= 4096
    again = epoch_batches(lengths, 4096, 3, 0)
    assert all((a[1] == b[1]).all() for a, b in zip(batches, again, strict=True))
    assert any(
        len(a[1]) != len(b[1]) or (a[1] != b[1]).any()
        for a, b in zip(batches, epoch_batches(lengths, 4096, 3, 1), strict=False)
    )
