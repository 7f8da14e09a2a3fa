"""Philox against the published vectors and against a version with Python's integers."""

import pytest
import torch

from stages.part4_worker.kernels.native.random import USE_ACCEPT, USE_SAMPLE, philox4x32

WORD = 0xFFFFFFFF


def philox_oracle(counter, key):
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & WORD, (p0 >> 32) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def uniform_oracle(seed, position, use):
    counter = (position & WORD, (position >> 32) & WORD, use, 0)
    return (philox_oracle(counter, (seed & WORD, (seed >> 32) & WORD))[0] >> 8) * 2.0**-24


# Known answers of Random123's test suite: counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize("counter,key,expected", VECTORS)
def test_known_answers(device, counter, key, expected):
    counter, key, expected = (tuple(int(w, 16) for w in text.split()) for text in (counter, key, expected))
    assert philox_oracle(counter, key) == expected
    words = philox4x32(*(tuple(torch.tensor(w, device=device) for w in t) for t in (counter, key)))
    assert tuple(int(w) for w in words) == expected


@pytest.mark.parametrize("use", [USE_SAMPLE, USE_ACCEPT])
def test_uniform_is_bit_identical_to_the_oracle(kernels, device, use):
    seeds = torch.randint(-(2**63), 2**63 - 1, (150,))
    positions = torch.randint(0, 2**40, (150,))
    seeds[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    positions[:4] = torch.tensor([0, 1, 2**32, 2**33 + 1])
    expected = [uniform_oracle(s, p, use) for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)]
    actual = kernels.philox_uniform(seeds.to(device), positions.to(device), use)
    assert actual.dtype == torch.float32
    assert actual.tolist() == expected
    assert kernels.philox_uniform(
        seeds.view(10, 15).to(device), positions.view(10, 15).to(device), use
    ).shape == (
        10,
        15,
    )


def test_numbers_look_uniform_and_uses_independent(native, device):
    count = 1 << 16
    seeds = torch.full((count,), 3, device=device)
    positions = torch.arange(count, device=device)
    sample, accept = (
        native.philox_uniform(seeds, positions, use).double() for use in (USE_SAMPLE, USE_ACCEPT)
    )
    for numbers in (sample, accept):
        assert 0 <= numbers.min() and numbers.max() < 1
        assert abs(numbers.mean() - 0.5) < 4 / (12 * count) ** 0.5
        assert abs((numbers[1:] * numbers[:-1]).mean() - 0.25) < 4 * 0.3 / count**0.5
    assert abs(((sample - 0.5) * (accept - 0.5)).mean()) < 4 / 12 / count**0.5
