"""Prefix cache: a radix tree from token runs to the slots that hold their KV.

Restates sglang/srt/mem_cache/radix_cache.py. Under EAGLE a key is a run of token *pairs*: the draft's KV
at position p was computed from token p+1 too, so two prompts that part after p share the target's entry
but not the draft's (upstream keyed by single tokens until #10846). A draft with k modules reads k tokens
further, and has runs of as many more (upstream: pairs). Keys and values are host arrays.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .allocator import TokenToKVPoolAllocator
from .memory_pool import ReqToTokenPool

if TYPE_CHECKING:
    from ..managers.schedule_batch import Req

_clock = itertools.count()


@dataclass(eq=False)
class TreeNode:
    """One edge of the tree: `key` [n, 1 + lookahead] (a token, and those behind it that its entry depends on)
    and `value` [n] (its slot), n a multiple of the page size.
    """

    parent: TreeNode | None = None
    key: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    value: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    children: dict[bytes, TreeNode] = field(default_factory=dict)
    lock_ref: int = 0
    last_access_time: int = field(default_factory=lambda: next(_clock))

    def __lt__(self, other: TreeNode) -> bool:
        return self.last_access_time < other.last_access_time


@dataclass
class MatchResult:
    device_indices: np.ndarray  # slots of the matched prefix
    last_node: TreeNode


class RadixCache:
    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool_allocator: TokenToKVPoolAllocator,
        page_size: int,
        lookahead: int,
        disable: bool = False,
    ):
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.page_size = page_size
        self.lookahead = lookahead
        self.disable = disable
        self.reset()

    def reset(self) -> None:
        self.root_node = TreeNode(lock_ref=1)
        self.evictable_size_ = 0
        self.protected_size_ = 0

    def evictable_size(self) -> int:
        return self.evictable_size_

    def protected_size(self) -> int:
        return self.protected_size_

    def make_key(self, token_ids: list[int], n: int) -> np.ndarray:
        """Key of the first n KV entries, cut to whole pages. It takes n + `lookahead` tokens.

        Where the step in flight is the prompt's last, the token behind it is not known yet.
        """
        n = max(min(n, len(token_ids) - self.lookahead), 0) // self.page_size * self.page_size
        ids = np.array(token_ids[: n + self.lookahead], dtype=np.int64)
        if not n:
            return np.empty((0, 1 + self.lookahead), np.int64)
        return np.lib.stride_tricks.sliding_window_view(ids, 1 + self.lookahead)

    def match_prefix(self, token_ids: list[int], n: int) -> MatchResult:
        """Longest cached run among the first n KV entries of `token_ids`."""
        if self.disable:
            return MatchResult(np.empty(0, np.int64), self.root_node)
        values, node = self._walk(self.make_key(token_ids, n))
        return MatchResult(np.concatenate(values) if values else np.empty(0, np.int64), node)

    def insert(self, key: np.ndarray, value: np.ndarray) -> int:
        """Add slots under `key`; returns how many leading entries the tree had already (it keeps its own)."""
        values, node = self._walk(key)
        matched = sum(map(len, values))
        if matched < len(key):
            child = TreeNode(parent=node, key=key[matched:], value=value[matched:].copy())
            node.children[self._child_key(child.key)] = child
            self.evictable_size_ += len(child.key)
        return matched

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        """Hand a request's KV to the tree, free what the tree has already or cannot take, free its row.

        All that was reserved goes here and nowhere else, used or not: upstream's release_kv_cache. A step in
        flight may still run for the request; what it writes, it writes before any later step could.
        With `is_insert` False nothing is kept: the KV is not worth sharing.
        """
        slots = self.req_to_token_pool.req_to_token_host[req.req_pool_idx, : req.kv_allocated_len]
        if self.disable or not is_insert:
            self.token_to_kv_pool_allocator.free(slots[req.prefix_len :])
        else:
            self._insert_req(req, slots, req.kv_len)
        self.dec_lock_ref(req.last_node)
        self.req_to_token_pool.free(req.req_pool_idx)
        req.req_pool_idx = None

    def cache_unfinished_req(self, req: Req, kv_len: int) -> np.ndarray | None:
        """Share the first `kv_len` entries of a running request; it then uses the tree's slots where the tree
        had them before. Its further entries may be those of a step in flight.

        Returns the new slots of the whole shared prefix if any of them changed, else None.
        """
        if self.disable:
            return None
        slots = self.req_to_token_pool.req_to_token_host[req.req_pool_idx, :kv_len]
        before = slots.copy()
        self._insert_req(req, slots, kv_len, keep_tail=True)
        match = self.match_prefix(req.all_token_ids(), kv_len)
        slots[: len(match.device_indices)] = match.device_indices
        self.dec_lock_ref(req.last_node)
        self.inc_lock_ref(match.last_node)
        req.last_node = match.last_node
        req.prefix_len = len(match.device_indices)
        return None if np.array_equal(before, slots) else match.device_indices

    def evict(self, num_tokens: int) -> None:
        """Free at least `num_tokens` slots, least recently used leaves first, locked nodes never."""
        leaves = [n for n in self._nodes() if not n.children and n.lock_ref == 0]
        heapq.heapify(leaves)
        evicted = 0
        while evicted < num_tokens and leaves:
            node = heapq.heappop(leaves)
            self.token_to_kv_pool_allocator.free(node.value)
            evicted += len(node.value)
            self.evictable_size_ -= len(node.value)
            parent = node.parent
            del parent.children[self._child_key(node.key)]
            if not parent.children and parent.lock_ref == 0:
                heapq.heappush(leaves, parent)

    def inc_lock_ref(self, node: TreeNode) -> None:
        """Protect the path to `node` from eviction."""
        while node is not self.root_node:
            if node.lock_ref == 0:
                self.evictable_size_ -= len(node.key)
                self.protected_size_ += len(node.key)
            node.lock_ref += 1
            node = node.parent

    def dec_lock_ref(self, node: TreeNode) -> None:
        while node is not self.root_node:
            if node.lock_ref == 1:
                self.evictable_size_ += len(node.key)
                self.protected_size_ -= len(node.key)
            node.lock_ref -= 1
            node = node.parent

    def _insert_req(self, req: Req, slots: np.ndarray, kv_len: int, keep_tail: bool = False) -> None:
        key = self.make_key(req.all_token_ids(), kv_len)
        had = self.insert(key, slots[: len(key)])
        # The tree keeps its own copy of entries it had; ours of those were computed twice.
        self.token_to_kv_pool_allocator.free(slots[req.prefix_len : had])
        if not keep_tail:
            self.token_to_kv_pool_allocator.free(slots[len(key) :])

    def _walk(self, key: np.ndarray) -> tuple[list[np.ndarray], TreeNode]:
        """Follow `key` as far as it goes, splitting the last edge where the match ends inside it."""
        node, values = self.root_node, []
        while len(key) and (child := node.children.get(self._child_key(key))) is not None:
            child.last_access_time = next(_clock)
            n = self._match_len(child.key, key)
            if n < len(child.key):
                child = self._split(child, n)
            values.append(child.value)
            node, key = child, key[n:]
        return values, node

    def _match_len(self, a: np.ndarray, b: np.ndarray) -> int:
        n = min(len(a), len(b))
        differ = np.flatnonzero((a[:n] != b[:n]).any(1))
        n = int(differ[0]) if len(differ) else n
        return n // self.page_size * self.page_size

    def _split(self, child: TreeNode, n: int) -> TreeNode:
        upper = TreeNode(child.parent, child.key[:n], child.value[:n], lock_ref=child.lock_ref)
        child.parent.children[self._child_key(upper.key)] = upper
        child.parent, child.key, child.value = upper, child.key[n:], child.value[n:]
        upper.children[self._child_key(child.key)] = child
        return upper

    def _child_key(self, key: np.ndarray) -> bytes:
        return key[: self.page_size].tobytes()

    def _nodes(self):
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
