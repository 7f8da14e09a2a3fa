"""Walking the verification tree in Triton: one program per request follows links with scalar loads.

The loops are bounded by the number of rows, so that stale links of a padded request cannot hang the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..packed import empty_side_by_side
from ..tree_types import AcceptedPaths
from . import sampling
from .launch import begin, dependent, wait_for_inputs
from .random import USE_ACCEPT, USE_SAMPLE, uniform
from .sampling import draw


@triton.jit
def _store_walk(
    retrieve_index,
    slots,
    seq_lens,
    checks,
    tokens,
    nodes,
    is_finite,
    rows,
    path_slots,
    positions,
    lens,
    kv_lens,
    last_rows,
    verified_id,
    request,
    path,
    emitted,
    depth,
    num_steps,
    N: tl.constexpr,
    STEPS2: tl.constexpr,
):
    """Fill an AcceptedPaths: `path` and `emitted` are its nodes and tokens by level, up to `depth`."""
    level = tl.arange(0, STEPS2)
    inside, there = level <= num_steps, level <= depth
    width = num_steps + 1
    target = request * width + level
    place = request * N + path
    row = tl.load(retrieve_index + place, mask=there, other=0)
    tl.store(tokens + target, tl.where(there, emitted, 0), mask=inside)
    tl.store(nodes + target, tl.where(there, path, -1), mask=inside)
    tl.store(rows + target, row, mask=inside)
    tl.store(path_slots + target, tl.load(slots + place, mask=there, other=0), mask=inside)
    length = tl.load(seq_lens + request)
    tl.store(positions + target, length + level, mask=inside)
    check = tl.load(checks + row, mask=there, other=0)
    spoilt = tl.where(tl.abs(check) < float("inf"), 0.0, float("nan"))
    tl.store(is_finite + request, tl.sum(spoilt, 0))
    count = depth.to(tl.int64) + 1
    tl.store(lens + request, count)
    tl.store(kv_lens + request, length + count)
    tl.store(last_rows + request, request * width + depth)
    tl.store(verified_id + request, tl.sum(tl.where(level == depth, emitted, 0), 0))


@triton.jit
def _greedy_kernel(
    candidates,
    target_predict,
    retrieve_index,
    next_token,
    next_sibling,
    slots,
    seq_lens,
    checks,
    tokens,
    nodes,
    is_finite,
    rows,
    path_slots,
    positions,
    lens,
    kv_lens,
    last_rows,
    verified_id,
    num_steps,
    N: tl.constexpr,
    STEPS2: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait_for_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    base = request * N
    level = tl.arange(0, STEPS2)
    emitted = tl.zeros([STEPS2], tl.int64)
    path = tl.zeros([STEPS2], tl.int64)
    current = request * 0
    depth = num_steps * 0
    left = N - 1
    target = tl.load(target_predict + base)
    child = tl.load(next_token + base)
    while (child >= 0) & (depth < num_steps) & (left > 0):
        if tl.load(candidates + base + child) == target:
            emitted = tl.where(level == depth, target, emitted)
            current = child
            depth += 1
            path = tl.where(level == depth, current, path)
            target = tl.load(target_predict + base + current)
            child = tl.load(next_token + base + current)
        else:
            child = tl.load(next_sibling + base + child)
        left -= 1
    emitted = tl.where(level == depth, target, emitted)
    _store_walk(
        retrieve_index, slots, seq_lens, checks, tokens, nodes, is_finite, rows, path_slots, positions, lens,
        kv_lens, last_rows, verified_id, request, path, emitted, depth, num_steps, N, STEPS2,
    )  # fmt: skip


@triton.jit
def _sampling_kernel(
    candidates,
    target_probs,
    retrieve_index,
    next_token,
    next_sibling,
    slots,
    seq_lens,
    checks,
    seeds,
    output_positions,
    tokens,
    nodes,
    is_finite,
    rows,
    path_slots,
    positions,
    lens,
    kv_lens,
    last_rows,
    verified_id,
    num_steps,
    threshold_single,
    threshold_acc,
    V: tl.constexpr,
    N: tl.constexpr,
    ACCEPT: tl.constexpr,
    SAMPLE: tl.constexpr,
    STEPS2: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_BLOCKS2: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    base = request * N
    level = tl.arange(0, STEPS2)
    emitted = tl.zeros([STEPS2], tl.int64)
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
            emitted = tl.where(level == depth, token, emitted)
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
    emitted = tl.where(level == depth, bonus, emitted)
    _store_walk(
        retrieve_index, slots, seq_lens, checks, tokens, nodes, is_finite, rows, path_slots, positions, lens,
        kv_lens, last_rows, verified_id, request, path, emitted, depth, num_steps, N, STEPS2,
    )  # fmt: skip


def _empty_paths(bs: int, width: int, device: torch.device) -> AcceptedPaths:
    """Uninitialised; what the host reads lies side by side and comes first."""
    shapes = {name: (bs * width,) for name in AcceptedPaths._fields}
    shapes |= dict.fromkeys(("tokens", "nodes"), (bs, width))
    shapes |= dict.fromkeys(("is_finite", "lens", "kv_lens", "last_rows", "verified_id"), (bs,))
    kinds = {"is_finite": torch.float32}
    return AcceptedPaths(
        *empty_side_by_side(
            device, *((shape, kinds.get(name, torch.int64)) for name, shape in shapes.items())
        )
    )


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
    """See the native twin."""
    bs, n = candidates.shape
    paths = _empty_paths(bs, num_steps + 1, slots.device)
    tree = (retrieve_index, retrieve_next_token, retrieve_next_sibling)
    inputs = (candidates, target_predict, *tree, slots, seq_lens, checks)
    if bs:
        _greedy_kernel[(bs,)](
            *(t.contiguous() for t in inputs),
            *paths,
            num_steps,
            N=n,
            STEPS2=triton.next_power_of_2(num_steps + 1),
            num_warps=1,
            **dependent(candidates),
        )
    return paths


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
    """See the native twin."""
    bs, n, vocab = target_probs.shape
    paths = _empty_paths(bs, num_steps + 1, slots.device)
    tree = (retrieve_index, retrieve_next_token, retrieve_next_sibling)
    inputs = (candidates, target_probs, *tree, slots, seq_lens, checks, seeds, output_positions)
    if bs:
        block = min(sampling.BLOCK, triton.next_power_of_2(vocab))
        _sampling_kernel[(bs,)](
            *(t.contiguous() for t in inputs),
            *paths,
            num_steps,
            float(threshold_single),
            float(threshold_acc),
            V=vocab,
            N=n,
            ACCEPT=USE_ACCEPT,
            SAMPLE=USE_SAMPLE,
            STEPS2=triton.next_power_of_2(num_steps + 1),
            V_BLOCK=block,
            V_BLOCKS2=triton.next_power_of_2(triton.cdiv(vocab, block)),
            num_warps=8,
        )
    return paths
