"""Walk the verification tree and decide which drafted tokens stand, in plain PyTorch and Python.

Restates sgl-kernel's verify_tree_greedy and tree_speculative_sampling_target_only, which upstream's v0.4.6
calls. The final draw takes a number of its own: reusing the coin that rejected the children, as v0.4.6 did,
can only draw from the upper part of what is left. And what comes back is the path itself, as the draft extend
and the host need it, where theirs is a token for every row of the batch.
"""

from __future__ import annotations

import numpy as np
import torch

from ..tree_types import AcceptedPaths
from .random import USE_ACCEPT, USE_SAMPLE, philox_uniform
from .sampling import inverse_cdf


def _accepted(
    paths: list[list[int]],
    emitted: list[list[int]],
    retrieve_index: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    checks: torch.Tensor,
    num_steps: int,
) -> AcceptedPaths:
    """What a walk returns, from the nodes it visited and the token that each of them emits."""

    def padded(lists: list[list[int]], filler: int) -> torch.Tensor:  # [bs, width]
        rows = [numbers + [filler] * (num_steps + 1 - len(numbers)) for numbers in lists]
        return torch.tensor(rows, dtype=torch.int64, device=slots.device).view(-1, num_steps + 1)

    tokens, nodes = padded(emitted, 0), padded(paths, -1)
    there, lens = nodes >= 0, torch.tensor([len(path) for path in paths], device=slots.device)
    at = nodes.clamp(min=0)
    rows = torch.where(there, retrieve_index.gather(1, at), 0)
    first_rows = torch.arange(0, nodes.numel(), num_steps + 1, device=slots.device)
    return AcceptedPaths(
        tokens=tokens,
        nodes=nodes,
        is_finite=torch.where(there, checks[rows] * 0, 0).sum(-1),
        rows=rows.flatten(),
        slots=torch.where(there, slots.gather(1, at), 0).flatten(),
        positions=(seq_lens.unsqueeze(1) + torch.arange(num_steps + 1, device=slots.device)).flatten(),
        lens=lens,
        kv_lens=seq_lens + lens,
        last_rows=first_rows + lens - 1,
        verified_id=tokens.gather(1, lens.unsqueeze(1) - 1).squeeze(1),
    )


def _children(first: int, siblings: list[int]):
    """Rows of a sibling list. Bounded, so that a padded request's stale links cannot loop for ever."""
    row = first
    for _ in range(len(siblings) - 1):
        if row < 0:
            return
        yield row
        row = siblings[row]


def verify_tree_greedy(
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    checks: torch.Tensor,
    num_steps: int,
) -> AcceptedPaths:
    """Follow, from the root, the child that is the target's argmax, as long as there is one.

    Args:
        candidates: int64 [bs, n], token of each row, row 0 the root.
        target_predict: int64 [bs, n], the target's argmax after each row.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: int64 [bs, n], see build_tree.
        slots: int64 [bs, n], where the KV of each row is.
        seq_lens: int64 [bs], position of each root.
        checks: float32 [bs * n], NaN or infinite where the target's logits were.
        num_steps: deepest level that may be accepted.

    Returns the paths; a row emits the target's argmax after it.
    """
    tokens, targets = candidates.tolist(), target_predict.tolist()
    firsts, siblings = retrieve_next_token.tolist(), retrieve_next_sibling.tolist()
    paths, emitted = [], []
    for b in range(len(tokens)):
        row, path = 0, [0]
        while len(path) <= num_steps:
            match = (c for c in _children(firsts[b][row], siblings[b]) if tokens[b][c] == targets[b][row])
            child = next(match, -1)
            if child < 0:
                break
            row = child
            path.append(row)
        paths.append(path)
        emitted.append([targets[b][row] for row in path])
    return _accepted(paths, emitted, retrieve_index, slots, seq_lens, checks, num_steps)


def tree_speculative_sampling_target_only(
    candidates: torch.Tensor,
    target_probs: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    checks: torch.Tensor,
    seeds: torch.Tensor,
    output_positions: torch.Tensor,
    num_steps: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> AcceptedPaths:
    """Accept drafted tokens so that, with both thresholds at 1, each output token follows the target's law.

    At a row of depth d one coin u is thrown. The children's probabilities are added up in sibling order and
    a child is accepted once u < sum / threshold_acc, or if its own probability reaches threshold_single. If
    none is, the last token is drawn from the target's probabilities with all children set to zero; at a leaf
    nothing is set to zero. Siblings must carry different tokens.

    Args:
        candidates: int64 [bs, n].
        target_probs: float32 [bs, n, V], what the target would sample from after each row.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: int64 [bs, n], see build_tree.
        slots, seq_lens, checks: see verify_tree_greedy.
        seeds: int64 [bs].
        output_positions: int64 [bs], output position of the token after the root.
        num_steps: deepest level that may be accepted.
        threshold_single, threshold_acc: in (0, 1]; below 1 the result is biased towards the draft.

    Returns the paths; a row emits the child that was accepted, the last one what was drawn.
    """
    device = retrieve_index.device
    depths = torch.arange(num_steps + 1, device=device)
    seed_grid = seeds.unsqueeze(1).expand(-1, num_steps + 1)
    position_grid = output_positions.unsqueeze(1) + depths  # [bs, num_steps + 1]
    coins = philox_uniform(seed_grid, position_grid, USE_ACCEPT).cpu().numpy()
    draws = philox_uniform(seed_grid, position_grid, USE_SAMPLE)
    # The target's probability of every row's token after every row: all that the walk reads. [bs, n, n]
    bs, n = candidates.shape
    probability = target_probs.gather(2, candidates.unsqueeze(1).expand(bs, n, n)).cpu().numpy()
    tokens, firsts, siblings = (t.tolist() for t in (candidates, retrieve_next_token, retrieve_next_sibling))
    single, acc = np.float32(threshold_single), np.float32(threshold_acc)
    paths, rejected = [], []
    for b in range(bs):
        row, path, tried = 0, [0], []
        while len(path) <= num_steps:
            mass, accepted, tried = np.float32(0), -1, []
            for child in _children(firsts[b][row], siblings[b]):
                p = probability[b, row, child]
                mass = mass + p
                if coins[b, len(path) - 1] * acc < mass or p >= single:
                    accepted = child
                    break
                tried.append(child)
            if accepted < 0:
                break
            row, tried = accepted, []
            path.append(row)
        paths.append(path)
        rejected.append([tokens[b][r] for r in tried])

    last_rows = torch.tensor([path[-1] for path in paths], device=device)
    weights = target_probs[torch.arange(bs, device=device), last_rows]  # [bs, V], a copy
    for b, ids in enumerate(rejected):
        if ids:
            rest = weights[b].index_fill(0, torch.tensor(ids, device=device), 0)
            # Rounding can leave nothing though the coin said no; then any possible token will do.
            weights[b] = torch.where(rest.sum() > 0, rest, weights[b])
    levels = torch.tensor([[len(path) - 1] for path in paths], device=device)
    bonus = inverse_cdf(weights, draws.gather(1, levels).squeeze(1)).tolist()
    emitted = [[*(tokens[b][r] for r in path[1:]), bonus[b]] for b, path in enumerate(paths)]
    return _accepted(paths, emitted, retrieve_index, slots, seq_lens, checks, num_steps)
