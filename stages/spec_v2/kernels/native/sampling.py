"""Draw one token per row from given probabilities, by inverse CDF in vocabulary order, in plain PyTorch.

Restates flashinfer's sampling_from_probs as upstream's layers/sampler.py uses it, with counter-based numbers.
The CDF is summed in float64, so that this twin and the Triton one, which add in another order, draw alike.
"""

from __future__ import annotations

import torch

from .random import USE_SAMPLE, philox_uniform


def inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulated weight exceeds uniform * total. Never one of weight zero.

    Args:
        weights: float32 [rows, V], not negative, need not sum to one.
        uniform: float32 [rows] in [0, 1).

    Returns:
        int64 [rows]; 0 for a row that is all zero.
    """
    cdf = weights.double().cumsum(-1)  # [rows, V]
    positive = weights > 0
    hit = positive & (cdf > uniform.double().unsqueeze(-1) * cdf[:, -1:])
    last = (positive * torch.arange(weights.shape[-1], device=weights.device)).amax(-1)
    return torch.where(hit.any(-1), hit.to(torch.uint8).argmax(-1), last)


def sample_from_probs(
    probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, use: int = USE_SAMPLE
) -> torch.Tensor:
    """One token per row.

    Args:
        probs: float32 [rows, V].
        seeds: int64 [rows]; positions: int64 [rows], output position of the token drawn.
        use: what the token is drawn for, see philox_uniform.

    Returns:
        int64 [rows].
    """
    return inverse_cdf(probs, philox_uniform(seeds, positions, use))
