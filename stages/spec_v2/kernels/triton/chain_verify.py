"""Verification of a chain by rejection sampling in Triton: one program per request, sums in float64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..tree_types import AcceptedPaths
from . import sampling
from .random import USE_ACCEPT, USE_SAMPLE, uniform
from .sampling import _first_above
from .verify import _empty_paths, _store_walk


@triton.jit
def _rest(p, q, known, token, V: tl.constexpr):
    """float64 weights of a block of tokens: max(p - q, 0) of those below `known` (V or 0), p of others."""
    weight = tl.load(p + token, mask=token < V, other=0)
    minus = tl.load(q + token, mask=token < known, other=0)
    return tl.maximum(weight - minus, 0.0).to(tl.float64)


@triton.jit
def _block_sums(p, q, known, V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS2: tl.constexpr):
    number = tl.arange(0, BLOCKS2)
    sums = tl.zeros([BLOCKS2], tl.float64)
    for block in range(tl.cdiv(V, BLOCK)):
        part = tl.sum(_rest(p, q, known, block * BLOCK + tl.arange(0, BLOCK), V), 0)
        sums = tl.where(number == block, part, sums)
    return sums


@triton.jit
def _draw_rest(p, q, known, u, V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS2: tl.constexpr):
    """A token by those weights; as sampling.draw."""
    sums = _block_sums(p, q, known, V, BLOCK, BLOCKS2)
    if (known > 0) & (tl.sum(sums, 0) <= 0):
        # Rounding left nothing though the coin said no; then any possible token will do.
        known = known * 0
        sums = _block_sums(p, q, known, V, BLOCK, BLOCKS2)
    target = u.to(tl.float64) * tl.sum(sums, 0)
    block = _first_above(tl.cumsum(sums, 0), sums, target, BLOCKS2)
    before = tl.sum(tl.where(tl.arange(0, BLOCKS2) < block, sums, 0.0), 0)
    weight = _rest(p, q, known, block * BLOCK + tl.arange(0, BLOCK), V)
    return (block * BLOCK + _first_above(before + tl.cumsum(weight, 0), weight, target, BLOCK)).to(tl.int64)


@triton.jit
def _chain_kernel(
    candidates,
    target_probs,
    draft_probs,
    retrieve_index,
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
    seed = tl.load(seeds + request)
    position = tl.load(output_positions + request)
    depth = num_steps * 0
    left = num_steps
    while left > 0:
        token = tl.load(candidates + base + depth + 1)
        p = tl.load(target_probs + (base + depth) * V + token)
        q = tl.load(draft_probs + (request * num_steps + depth) * V + token)
        if uniform(seed, position + depth, ACCEPT) * q < p:
            emitted = tl.where(level == depth, token, emitted)
            depth += 1
            left -= 1
        else:
            left = left * 0
    bonus = _draw_rest(
        target_probs + (base + depth) * V,
        draft_probs + (request * num_steps + tl.minimum(depth, num_steps - 1)) * V,
        tl.where(depth < num_steps, V, 0),
        uniform(seed, position + depth, SAMPLE),
        V,
        V_BLOCK,
        V_BLOCKS2,
    )
    emitted = tl.where(level == depth, bonus, emitted)
    _store_walk(
        retrieve_index, slots, seq_lens, checks, tokens, nodes, is_finite, rows, path_slots, positions, lens,
        kv_lens, last_rows, verified_id, request, level.to(tl.int64), emitted, depth, num_steps, N, STEPS2,
    )  # fmt: skip


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
    """See the native twin."""
    bs, n, vocab = target_probs.shape
    paths = _empty_paths(bs, n, slots.device)
    inputs = (candidates, target_probs, draft_probs, retrieve_index, slots, seq_lens, checks, seeds)
    if bs:
        block = min(sampling.BLOCK, triton.next_power_of_2(vocab))
        _chain_kernel[(bs,)](
            *(t.contiguous() for t in (*inputs, output_positions)),
            *paths,
            n - 1,
            V=vocab,
            N=n,
            ACCEPT=USE_ACCEPT,
            SAMPLE=USE_SAMPLE,
            STEPS2=triton.next_power_of_2(n),
            V_BLOCK=block,
            V_BLOCKS2=triton.next_power_of_2(triton.cdiv(vocab, block)),
            num_warps=8,
        )
    return paths
