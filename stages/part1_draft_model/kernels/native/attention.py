"""Attention over the KV pool, request by request, with PyTorch's scaled_dot_product_attention.

The reference of kernels/triton/attention.py: it gathers exactly the slots a request may read. Giving
SDPA more rows and masking them would not do, since 0 * NaN is NaN and unused slots may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..host_metadata import HostMetadata


@dataclass
class _Request:
    """One request's part of a step: its rows, its part of the gathered slots and, where needed, a mask."""

    rows: slice
    columns: slice
    bias: torch.Tensor | None  # [q_len, kv_len], 0 or -inf
    blind: torch.Tensor | None  # [q_len, 1], True where a row sees nothing
    causal: bool
    single: bool  # one row that sees everything


@dataclass
class _Plan:
    requests: list[_Request]
    slots: torch.Tensor  # [sum of kv_len], what all requests read
    # Where the keys and values of these slots are gathered, [sum of kv_len, kv_heads, D]. Kept from layer to
    # layer: asking the system for fresh memory each time costs four times the copy.
    keys: torch.Tensor
    values: torch.Tensor


def _visible(q_len, kv_len, prefix, tree_mask, device):
    """Bool [q_len, kv_len], or None if every row sees every column."""
    column = torch.arange(kv_len, device=device)
    if tree_mask is None:
        if prefix + 1 >= kv_len:
            return None
        return column <= prefix + torch.arange(q_len, device=device).unsqueeze(1)
    visible = (column < prefix).expand(q_len, kv_len).clone()
    bit = torch.arange(min(max(kv_len - prefix, 0), tree_mask.shape[-1] * 64), device=device)
    words = tree_mask[:q_len, bit // 64]  # [q_len, tree columns]
    visible[:, prefix : prefix + len(bit)] = ((words >> (bit % 64)) & 1).bool()
    return visible


def _slots(table_row, kv_len, page_size):
    if page_size == 1:
        return table_row[:kv_len].long()
    pages = table_row[0:kv_len:page_size].long().unsqueeze(1)  # [pages, 1], first slot of each
    return (pages + torch.arange(page_size, device=pages.device)).flatten()[:kv_len]


def _make_plan(k_cache, v_cache, req_to_token, req_pool_indices, host, page_size, tree_mask) -> _Plan:
    device = req_to_token.device
    slots, requests, column = [req_pool_indices.new_zeros(0)], [], 0
    for b, req in enumerate(req_pool_indices.tolist()):
        begin, end = host.q_start_loc[b], host.q_start_loc[b + 1]
        kv_len, prefix, q_len = host.kv_lens[b], host.prefix_lens[b], end - begin
        if kv_len == 0 or q_len == 0:
            continue
        slots.append(_slots(req_to_token[req], kv_len, page_size))
        causal = tree_mask is None and prefix == 0 and q_len == kv_len and q_len > 1
        visible = bias = blind = None
        if not causal:
            visible = _visible(q_len, kv_len, prefix, None if tree_mask is None else tree_mask[b], device)
        if visible is not None and not bool(visible.all()):
            bias = torch.zeros(q_len, kv_len, dtype=k_cache.dtype, device=device)
            bias.masked_fill_(~visible, float("-inf"))
            sees_none = ~visible.any(-1, keepdim=True)
            blind = sees_none if bool(sees_none.any()) else None
        single = q_len == 1 and bias is None
        columns = slice(column, column + kv_len)
        requests.append(_Request(slice(begin, end), columns, bias, blind, causal, single))
        column += kv_len
    shape = (column, *k_cache.shape[1:])
    return _Plan(requests, torch.cat(slots), k_cache.new_empty(shape), v_cache.new_empty(shape))


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    q_start_loc: torch.Tensor,
    max_q_len: int,
    scale: float,
    page_size: int,
    tree_mask: torch.Tensor | None = None,
    host: HostMetadata | None = None,
) -> torch.Tensor:
    """Attention of each request's rows over its own tokens in the pool.

    Row i of request b sees position p < kv_lens[b] if p < prefix_lens[b], or else, without a tree mask, if
    p <= prefix_lens[b] + i, and with one, if bit p - prefix_lens[b] of tree_mask[b, i] is set.

    Args:
        q: [rows, q_heads, D].
        k_cache, v_cache: [slots, kv_heads, D]; q_heads is any multiple of kv_heads.
        req_to_token: int32 [requests, context]. With page_size > 1 only the columns at multiples of
            page_size are read: they hold the first slot of each page.
        req_pool_indices, prefix_lens, kv_lens: int64 [bs]; kv_len 0 marks a padded request.
        q_start_loc: int64 [bs + 1].
        max_q_len: at least the largest number of rows of a request (used by the Triton twin).
        scale: factor on the scores.
        page_size: a power of two.
        tree_mask: int64 [bs, q, words] or None; columns beyond 64 * words are hidden.
        host: the same lengths as lists, and the plan of a step's first layer.

    Returns:
        [rows, q_heads, D] in q's type. Rows that see nothing, or belong to no request, are zero.
    """
    if host is None:
        host = HostMetadata(kv_lens.tolist(), prefix_lens.tolist(), q_start_loc.tolist())
    if host.plan is None:
        host.plan = _make_plan(k_cache, v_cache, req_to_token, req_pool_indices, host, page_size, tree_mask)
    plan = host.plan
    rows, q_heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    group = q_heads // kv_heads
    out = torch.zeros(rows, q_heads, dim, dtype=q.dtype, device=q.device)
    # KV heads stand where SDPA has the batch and the group where it has the heads, so that the query heads of
    # a group share their keys by a stride of zero. [kv_heads, group, rows, D] and [kv_heads, 1, columns, D]
    queries, results = (t.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3) for t in (q, out))
    torch.index_select(k_cache, 0, plan.slots, out=plan.keys)
    torch.index_select(v_cache, 0, plan.slots, out=plan.values)
    keys, values = (t.permute(1, 0, 2).unsqueeze(1) for t in (plan.keys, plan.values))
    for part in plan.requests:
        query, key, value = queries[:, :, part.rows], keys[:, :, part.columns], values[:, :, part.columns]
        if part.single:  # the group can stand where the rows do
            result = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, scale=scale)
            results[:, :, part.rows] = result.transpose(1, 2)
            continue
        key, value = key.expand(-1, group, -1, -1), value.expand(-1, group, -1, -1)
        result = F.scaled_dot_product_attention(
            query, key, value, attn_mask=part.bias, is_causal=part.causal, scale=scale
        )
        results[:, :, part.rows] = result if part.blind is None else result.masked_fill(part.blind, 0)
    return out
