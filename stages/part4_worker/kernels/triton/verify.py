"""Walking the verification tree in Triton: one program per request follows links with scalar loads.

The loops are bounded by the number of rows, so that stale links of a padded request cannot hang the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import sampling
from .random import USE_ACCEPT, USE_SAMPLE, uniform
from .sampling import draw


@triton.jit
def _store_walk(
    predict,
    accept_index,
    accept_length,
    retrieve_index,
    request,
    ids,
    path,
    depth,
    num_steps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS2: tl.constexpr,
):
    row, level = tl.arange(0, BLOCK), tl.arange(0, STEPS2)
    place = tl.load(retrieve_index + request * N + row, mask=row < N, other=0)
    tl.store(predict + place, ids, mask=row < N)
    visited = level <= depth
    number = tl.load(retrieve_index + request * N + path, mask=visited, other=-1)
    tl.store(accept_index + request * (num_steps + 1) + level, number, mask=level <= num_steps)
    tl.store(accept_length + request, depth.to(tl.int64))


@triton.jit
def _greedy_kernel(
    candidates,
    target_predict,
    retrieve_index,
    next_token,
    next_sibling,
    predict,
    accept_index,
    accept_length,
    num_steps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS2: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    base = request * N
    row, level = tl.arange(0, BLOCK), tl.arange(0, STEPS2)
    ids = tl.zeros([BLOCK], tl.int64)
    path = tl.zeros([STEPS2], tl.int64)
    current = request * 0
    depth = num_steps * 0
    left = N - 1
    target = tl.load(target_predict + base)
    child = tl.load(next_token + base)
    while (child >= 0) & (depth < num_steps) & (left > 0):
        if tl.load(candidates + base + child) == target:
            ids = tl.where(row == current, target, ids)
            current = child
            depth += 1
            path = tl.where(level == depth, current, path)
            target = tl.load(target_predict + base + current)
            child = tl.load(next_token + base + current)
        else:
            child = tl.load(next_sibling + base + child)
        left -= 1
    ids = tl.where(row == current, target, ids)
    _store_walk(
        predict, accept_index, accept_length, retrieve_index, request, ids, path, depth, num_steps,
        N, BLOCK, STEPS2,
    )  # fmt: skip


@triton.jit
def _sampling_kernel(
    candidates,
    target_probs,
    retrieve_index,
    next_token,
    next_sibling,
    seeds,
    output_positions,
    predict,
    accept_index,
    accept_length,
    num_steps,
    threshold_single,
    threshold_acc,
    V: tl.constexpr,
    N: tl.constexpr,
    ACCEPT: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS2: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_BLOCKS2: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    base = request * N
    row, level = tl.arange(0, BLOCK), tl.arange(0, STEPS2)
    ids = tl.zeros([BLOCK], tl.int64)
    path = tl.zeros([STEPS2], tl.int64)
    seed = tl.load(seeds + request)
    position = tl.load(output_positions + request)
    current = request * 0
    depth = num_steps * 0
    left = N - 1
    mass = 0.0
    coin = uniform(seed, position, ACCEPT)
    child = tl.load(next_token + base)
    while (child >= 0) & (depth < num_steps) & (left > 0):
        token = tl.load(candidates + base + child)
        p = tl.load(target_probs + (base + current) * V + token)
        mass += p
        if (coin * threshold_acc < mass) | (p >= threshold_single):
            ids = tl.where(row == current, token, ids)
            current = child
            depth += 1
            path = tl.where(level == depth, current, path)
            mass = mass * 0.0
            coin = uniform(seed, position + depth, ACCEPT)
            child = tl.load(next_token + base + current)
        else:
            child = tl.load(next_sibling + base + child)
        left -= 1
    # Rejected children are left out of the last draw; at the deepest level none was tried.
    first = tl.load(next_token + base + current)
    first = tl.where(depth < num_steps, first, -1)
    u = uniform(seed, position + depth, SAMPLE)
    bonus = draw(
        target_probs + (base + current) * V, u, candidates + base, next_sibling + base, first,
        V, N, V_BLOCK, V_BLOCKS2,
    )  # fmt: skip
    ids = tl.where(row == current, bonus, ids)
    _store_walk(
        predict, accept_index, accept_length, retrieve_index, request, ids, path, depth, num_steps,
        N, BLOCK, STEPS2,
    )  # fmt: skip


def _outputs(retrieve_index: torch.Tensor, num_steps: int) -> tuple[torch.Tensor, ...]:
    bs, n = retrieve_index.shape
    device = retrieve_index.device
    shapes = ((bs * n,), (bs, num_steps + 1), (bs,))
    return tuple(torch.empty(shape, dtype=torch.int64, device=device) for shape in shapes)


def verify_tree_greedy(
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    num_steps: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the native twin."""
    bs, n = candidates.shape
    outputs = _outputs(retrieve_index, num_steps)
    inputs = (candidates, target_predict, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    if bs:
        _greedy_kernel[(bs,)](
            *(t.contiguous() for t in inputs),
            *outputs,
            num_steps,
            N=n,
            BLOCK=triton.next_power_of_2(n),
            STEPS2=triton.next_power_of_2(num_steps + 1),
            num_warps=1,
        )
    return outputs


def tree_speculative_sampling_target_only(
    candidates: torch.Tensor,
    target_probs: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    seeds: torch.Tensor,
    output_positions: torch.Tensor,
    num_steps: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the native twin."""
    bs, n, vocab = target_probs.shape
    outputs = _outputs(retrieve_index, num_steps)
    inputs = (candidates, target_probs, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    if bs:
        block = min(sampling.BLOCK, triton.next_power_of_2(vocab))
        _sampling_kernel[(bs,)](
            *(t.contiguous() for t in inputs),
            seeds.contiguous(),
            output_positions.contiguous(),
            *outputs,
            num_steps,
            float(threshold_single),
            float(threshold_acc),
            V=vocab,
            N=n,
            ACCEPT=USE_ACCEPT,
            SAMPLE=USE_SAMPLE,
            BLOCK=triton.next_power_of_2(n),
            STEPS2=triton.next_power_of_2(num_steps + 1),
            V_BLOCK=block,
            V_BLOCKS2=triton.next_power_of_2(triton.cdiv(vocab, block)),
            num_warps=8,
        )
    return outputs
