"""Turn the selected candidates of a draft into a tree: who sees whom, positions, child and sibling links.

Restates sgl-kernel's build_tree_kernel_efficient, which upstream's speculative/build_eagle_tree.py calls at
v0.4.6. Here the prefix is implied and a row of the mask is one 64-bit word, so a mask does not grow with the
context.
"""

from __future__ import annotations

import torch


def _parents(selected: torch.Tensor, parent_list: torch.Tensor, topk: int) -> torch.Tensor:
    """Parent row of every row. The root, and a node whose parent is missing, is its own parent."""
    bs, width = selected.shape
    block = selected // topk  # [bs, n - 1], 0 = child of the root
    columns = parent_list.shape[1]
    if columns:
        flat = parent_list.gather(1, block.clamp(0, columns - 1))  # flat candidate index of the parent
    else:
        flat = torch.full_like(selected, -1)
    known = (block > 0) & (block < columns)
    match = (flat.unsqueeze(2) == selected.unsqueeze(1)) & known.unsqueeze(2)  # [bs, child, parent]
    own = torch.arange(1, width + 1, device=selected.device).expand(bs, -1)
    found = torch.where(match.any(-1), match.to(torch.uint8).argmax(-1) + 1, own)
    found = torch.where(block == 0, torch.zeros_like(found), found)
    return torch.cat((found.new_zeros(bs, 1), found), dim=1)  # [bs, n]


def build_tree(
    selected: torch.Tensor, parent_list: torch.Tensor, topk: int, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Build the verification tree of each request. Row 0 is the root, row i the candidate selected[:, i - 1].

    A candidate of flat index c < topk hangs on the root; the others hang on the candidate whose flat index is
    parent_list[:, c // topk]. A candidate whose parent was not selected (which exact scores cannot bring
    about) is left unlinked: no walk from the root reaches it.

    Args:
        selected: int64 [bs, n - 1], flat candidate indices, ascending. n <= 64.
        parent_list: int64 [bs, P]; P may be 0 if there is one draft step.
        topk: branching factor.
        seq_lens: int64 [bs], position of each root.

    Returns:
        tree_mask: int64 [bs, n, 1], bit c of row i set if c is i or an ancestor of i.
        positions: int64 [bs * n], seq_len + depth.
        retrieve_index: int64 [bs, n], global row number b * n + i.
        retrieve_next_token: int64 [bs, n], first child of a row, -1 if it has none.
        retrieve_next_sibling: int64 [bs, n], next child of the same parent, -1 if it is the last.
    """
    parent = _parents(selected, parent_list, topk)  # [bs, n]
    bs, n = parent.shape
    rows = torch.arange(n, device=selected.device)
    linked = parent != rows  # [bs, n]

    # Pointer doubling: after k rounds a row knows its ancestors nearer than 2**k and points 2**k rows up.
    mask = (torch.ones_like(rows) << rows).expand(bs, -1)
    depth = linked.long()
    up = parent
    for _ in range(max(n - 1, 1).bit_length()):
        mask = mask | mask.gather(1, up)
        depth = depth + depth.gather(1, up)
        up = up.gather(1, up)

    none = torch.full((), n, dtype=torch.int64, device=selected.device)
    child = (parent.unsqueeze(1) == rows.unsqueeze(1)) & linked.unsqueeze(1)  # [bs, parent, child]
    next_token = torch.where(child, rows, none).amin(-1)
    sibling = (parent.unsqueeze(2) == parent.unsqueeze(1)) & linked.unsqueeze(1) & linked.unsqueeze(2)
    sibling = sibling & (rows > rows.unsqueeze(1))  # [bs, i, later row]
    next_sibling = torch.where(sibling, rows, none).amin(-1)

    request = torch.arange(bs, device=selected.device).unsqueeze(1)
    return (
        mask.unsqueeze(-1),
        (seq_lens.unsqueeze(1) + depth).flatten(),
        request * n + rows,
        torch.where(next_token == n, -1, next_token),
        torch.where(next_sibling == n, -1, next_sibling),
    )
