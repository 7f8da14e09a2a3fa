"""Verify a chain whose tokens were drawn, against the probabilities they were drawn with, in plain PyTorch.

Restates chain_speculative_sampling_triton of sglang/srt/speculative/reject_sampling.py (#26312): speculative
sampling as Leviathan et al. (ICML 2023) and Chen et al. (2023) have it.
"""

from __future__ import annotations

import torch

from ..tree_types import AcceptedPaths
from .random import USE_ACCEPT, USE_SAMPLE, philox_uniform
from .sampling import inverse_cdf
from .verify import _accepted


def chain_speculative_sampling(
    candidates: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    retrieve_index: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    checks: torch.Tensor,
    seeds: torch.Tensor,
    output_positions: torch.Tensor,
) -> AcceptedPaths:
    """Accept drafted tokens so that each output token follows the target's law p, whatever the draft's law q.

    A token x is accepted with probability min(1, p(x) / q(x)). The first that is not is replaced by a draw
    from max(p - q, 0); behind the last draft p itself is drawn from. Where p is one-hot any q will do.

    Args:
        candidates: int64 [bs, n], the root and the chain behind it.
        target_probs: float32 [bs, n, V], what the target would sample from after each row.
        draft_probs: float32 [bs, n - 1, V], what row j + 1 was drawn from.
        retrieve_index: int64 [bs, n], row of each node in the flat batch.
        slots, seq_lens, checks: see verify_tree_greedy.
        seeds: int64 [bs].
        output_positions: int64 [bs], output position of the token after the root.

    Returns the paths; a row emits the draft that was accepted, the last one what was drawn.
    """
    bs, steps = candidates.shape[0], candidates.shape[1] - 1
    device = candidates.device
    drafts = candidates[:, 1:]
    p, q = (
        probs[:, :steps].gather(2, drafts.unsqueeze(-1)).squeeze(-1) for probs in (target_probs, draft_probs)
    )
    positions = output_positions.unsqueeze(1) + torch.arange(steps, device=device)  # [bs, steps]
    coins = philox_uniform(seeds.unsqueeze(1).expand_as(positions), positions, USE_ACCEPT)
    accepted = (coins * q < p).long().cumprod(-1).sum(-1)  # [bs]
    request = torch.arange(bs, device=device)
    weights = target_probs[request, accepted]  # [bs, V]
    rest = (weights - draft_probs[request, accepted.clamp(max=steps - 1)]).clamp(min=0)
    # Rounding can leave nothing though the coin said no; then any possible token will do.
    takes_rest = (accepted < steps) & (rest.sum(-1) > 0)
    weights = torch.where(takes_rest.unsqueeze(1), rest, weights)
    bonus = inverse_cdf(weights, philox_uniform(seeds, output_positions + accepted, USE_SAMPLE)).tolist()
    counts, drafts = accepted.tolist(), drafts.tolist()
    paths = [list(range(count + 1)) for count in counts]
    emitted = [[*drafts[b][:count], bonus[b]] for b, count in enumerate(counts)]
    return _accepted(paths, emitted, retrieve_index, slots, seq_lens, checks, steps)
