"""Building the verification tree in Triton: one program per request, the whole tree in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import row_strided


@triton.jit
def _build_tree_kernel(
    selected,
    parent_list,
    seq_lens,
    tree_mask,
    positions,
    retrieve_index,
    next_token,
    next_sibling,
    selected_stride,
    parent_stride,
    TOPK: tl.constexpr,
    COLUMNS: tl.constexpr,
    N: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    drafted = (row > 0) & (row < N)
    candidate = tl.load(selected + request * selected_stride + row - 1, mask=drafted, other=-1)
    block = candidate // TOPK
    known = drafted & (block > 0) & (block < COLUMNS)
    flat = tl.load(parent_list + request * parent_stride + block, mask=known, other=-1)

    # Search the parent's flat index among the selected ones. [child, parent]
    match = (flat[:, None] == candidate[None, :]) & known[:, None] & drafted[None, :]
    found = tl.min(tl.where(match, row[None, :], BLOCK), 1)
    parent = tl.where(found < BLOCK, found, row)
    parent = tl.where(drafted & (block == 0), 0, parent)
    linked = drafted & (parent != row)

    # Pointer doubling, as in the native twin.
    mask = tl.full([BLOCK], 1, tl.int64) << row.to(tl.int64)
    depth = linked.to(tl.int64)
    up = parent
    for _ in tl.static_range(ROUNDS):
        mask |= tl.gather(mask, up, 0)
        depth += tl.gather(depth, up, 0)
        up = tl.gather(up, up, 0)

    # A row that is not linked gets a parent no row has, so that it is nobody's child and nobody's sibling.
    owner = tl.where(linked, parent, -1)
    child = tl.min(tl.where(owner[None, :] == row[:, None], row[None, :], BLOCK), 1)
    later = (owner[None, :] == owner[:, None]) & linked[:, None] & (row[None, :] > row[:, None])
    sibling = tl.min(tl.where(later, row[None, :], BLOCK), 1)

    target = request * N + row
    inside = row < N
    tl.store(tree_mask + target, mask, mask=inside)
    tl.store(positions + target, tl.load(seq_lens + request) + depth, mask=inside)
    tl.store(retrieve_index + target, target, mask=inside)
    tl.store(next_token + target, tl.where(child < BLOCK, child, -1).to(tl.int64), mask=inside)
    tl.store(next_sibling + target, tl.where(sibling < BLOCK, sibling, -1).to(tl.int64), mask=inside)


def build_tree(
    selected: torch.Tensor, parent_list: torch.Tensor, topk: int, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """See the native twin."""
    bs, n = selected.shape[0], selected.shape[1] + 1
    selected, parent_list = row_strided(selected), row_strided(parent_list)
    device = selected.device
    tree_mask = torch.empty(bs, n, 1, dtype=torch.int64, device=device)
    positions = torch.empty(bs * n, dtype=torch.int64, device=device)
    retrieve_index, next_token, next_sibling = (
        torch.empty(bs, n, dtype=torch.int64, device=device) for _ in range(3)
    )
    if bs:
        _build_tree_kernel[(bs,)](
            selected,
            parent_list,
            seq_lens.contiguous(),
            tree_mask,
            positions,
            retrieve_index,
            next_token,
            next_sibling,
            selected.stride(0),
            parent_list.stride(0),
            TOPK=topk,
            COLUMNS=parent_list.shape[1],
            N=n,
            ROUNDS=max(n - 1, 1).bit_length(),
            BLOCK=triton.next_power_of_2(n),
            num_warps=1 if n <= 16 else 4,
        )
    return tree_mask, positions, retrieve_index, next_token, next_sibling
