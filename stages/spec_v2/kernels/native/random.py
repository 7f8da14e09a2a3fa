"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011), the same bits as the Triton twin.

A number depends only on (seed, output position, use), so neither the batch a request shares nor the order in
which rows are computed can change what it samples.
"""

from __future__ import annotations

import torch

USE_SAMPLE = 0
USE_ACCEPT = 1
USE_DRAFT = 2

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: tuple, key: tuple) -> tuple:
    """Ten rounds over a counter of four and a key of two int64 tensors that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # An int64 product wraps, but the arithmetic shift and the mask still give its true upper word.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def philox_uniform(seeds: torch.Tensor, positions: torch.Tensor, use: int) -> torch.Tensor:
    """One uniform number in [0, 1) per row, a multiple of 2**-24.

    Args:
        seeds: int64, any shape; all 64 bits form the key.
        positions: int64, same shape; output position of the token the number is for.
        use: USE_SAMPLE, USE_ACCEPT or USE_DRAFT, so that what is drawn at one position is independent.

    Returns:
        float32, same shape.
    """
    counter = (
        positions & _MASK,
        (positions >> 32) & _MASK,
        torch.full_like(positions, use),
        torch.zeros_like(positions),
    )
    word = philox4x32(counter, (seeds & _MASK, (seeds >> 32) & _MASK))[0]
    return (word >> 8).to(torch.float32) * 2.0**-24
