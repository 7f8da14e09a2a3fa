"""The corpus of ngram_corpus.cpp in Python: the oracle of its tests, and what runs where FLEDGE_NGRAM=python.

A node that is evicted is an object that nobody links to any more, where C++ has a place that is used again.
All else is the same, down to the order in which nodes are evicted and drafts are proposed.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np


class Node:
    """An n-gram: the tokens on the way down to it."""

    def __init__(self, parent: Node | None = None, token: int = -1):
        self.parent, self.token = parent, token
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[int, Node] = {}
        self.ranking: list[Node] = []  # the children, the best one first
        self.count = 0
        self.is_alive = True

    def is_leaf(self) -> bool:
        """Whether it may be evicted; a root stays whatever happens."""
        return not self.children and self.parent is not None


class Request:
    def __init__(self, own: Node | None, shared: Node | None, max_trie_depth: int):
        self.root, self.last_token = own, 0
        # In its own trie and in the shared one: the nodes of its last 0, 1, … max_trie_depth − 1 tokens.
        self.ends = [[root] + [None] * (max_trie_depth - 1) for root in (own, shared)]


class NgramTwin:
    """See NgramCorpus."""

    def __init__(
        self,
        capacity: int,
        max_trie_depth: int = 18,
        min_bfs_breadth: int = 1,
        max_bfs_breadth: int = 10,
        match_type: str = "BFS",
    ):
        self.capacity, self.max_depth = capacity, max_trie_depth
        self.min_breadth, self.max_breadth = min_bfs_breadth, max_bfs_breadth
        self.by_frequency = match_type == "PROB"
        self.size = 0
        self.leaves: OrderedDict[Node, None] = OrderedDict()  # from the oldest to the newest
        self.requests: dict[int, Request] = {}
        self.shared_root = self._allocate()

    # ---- what is said ----

    def append(self, requests: Iterable[int], tokens: Iterable[Sequence[int]]) -> None:
        for request_id, run in zip(requests, tokens, strict=True):
            request = self._find_or_begin(request_id)
            for token in run:
                for ends in request.ends:
                    for length in range(self.max_depth - 1, -1, -1):
                        at = ends[length]
                        node = self._pass(at, token) if at is not None and at.is_alive else None
                        if length + 1 < self.max_depth:
                            ends[length + 1] = node
                request.last_token = token

    def forget(self, request_id: int) -> None:
        request = self.requests.pop(request_id, None)
        node = None if request is None else request.root
        while node is not None:
            if node.ranking:
                node = node.ranking[0]
            else:
                self._release(node)
                node = node.parent

    def _find_or_begin(self, request_id: int) -> Request:
        if request_id not in self.requests:
            self.requests[request_id] = Request(self._allocate(), self.shared_root, self.max_depth)
        return self.requests[request_id]

    def _pass(self, parent: Node, token: int) -> Node | None:
        """`token` was said behind `parent`: its node, or None where there is no room for it."""
        child = parent.children.get(token)
        if child is None:
            was_leaf = parent.is_leaf()
            self.leaves.pop(parent, None)  # now, or it would be evicted for its own child
            child = self._allocate(parent, token)
            self.leaves.pop(parent, None)  # its only child has made room for the new one
            if child is None:
                if was_leaf:
                    self.leaves[parent] = None
                return None
            parent.children[token] = child
        else:
            parent.ranking.remove(child)
        child.count += 1
        place = 0
        if self.by_frequency and parent.parent is not None:
            while place < len(parent.ranking) and parent.ranking[place].count > child.count:
                place += 1
        parent.ranking.insert(place, child)
        if child.is_leaf():
            self.leaves[child] = None
            self.leaves.move_to_end(child)
        return child

    def _allocate(self, parent: Node | None = None, token: int = -1) -> Node | None:
        if self.size == self.capacity:
            if not self.leaves:
                return None
            self._release(next(iter(self.leaves)))
        self.size += 1
        return Node(parent, token)

    def _release(self, node: Node) -> None:
        """Take out a node without children."""
        self.leaves.pop(node, None)
        parent = node.parent
        if parent is not None:
            del parent.children[node.token]
            parent.ranking.remove(node)
            if parent.is_leaf():
                self.leaves[parent] = None
                self.leaves.move_to_end(parent, last=False)
        node.is_alive = False
        self.size -= 1

    # ---- what may come next ----

    def match(
        self, requests: Sequence[int], num_draft_tokens: int, said: Sequence[Sequence[int]] | None = None
    ) -> np.ndarray:
        trees = [
            self._tree(self._find_or_begin(request_id), list(more), num_draft_tokens)
            for request_id, more in zip(requests, said or [()] * len(requests), strict=True)
        ]
        return np.array(trees, dtype=np.int64).reshape(-1, 5, num_draft_tokens).transpose(1, 0, 2)

    def _end(self, ends: list[Node | None], length: int, said: list[int]) -> Node | None:
        """The node of the last `length` tokens, `said` included."""
        node = ends[max(length - len(said), 0)]
        node = node if node is not None and node.is_alive else None
        for token in said[max(len(said) - length, 0) :]:
            node = node and node.children.get(token)
        return node

    def _breadth(self, depth: int) -> int:
        """Children that a match of `depth` tokens proposes."""
        if self.max_depth == 2:
            return self.max_breadth
        return self.max_breadth - (self.max_breadth - self.min_breadth) * (depth - 1) // (self.max_depth - 2)

    def _tree(self, request: Request, said: list[int], n: int) -> list[list[int]]:
        token, depth = [said[-1] if said else request.last_token], [0]
        mask, children = [1], [[]]  # bits; rows
        for length in range(self.max_depth - 1, 0, -1):
            for ends in request.ends:
                queue, order = [], 0

                def propose(node: Node, p: float, row: int) -> None:
                    nonlocal order
                    for child in node.ranking[: self._breadth(node.depth)]:
                        here = p * (child.count / node.count) if self.by_frequency else 0.0
                        heapq.heappush(queue, (-here, order, child, row))  # noqa: B023
                        order += 1

                if (end := self._end(ends, length, said)) is not None:
                    propose(end, 1.0, 0)
                while queue and len(token) < n:
                    minus_p, _, node, parent = heapq.heappop(queue)
                    row = next((r for r in children[parent] if token[r] == node.token), None)
                    if row is None:
                        row = len(token)
                        token.append(node.token)
                        depth.append(depth[parent] + 1)
                        mask.append(mask[parent] | 1 << row)
                        children[parent].append(row)
                        children.append([])
                    propose(node, -minus_p, row)
        pad = range(len(token), n)
        siblings = {row: right for rows in children for row, right in zip(rows, rows[1:], strict=False)}
        mask += [1 << row for row in pad]
        return [
            token + [0 for _ in pad],
            [bits - (1 << 64) if bits >> 63 else bits for bits in mask],
            depth + [0 for _ in pad],
            [rows[0] if rows else -1 for rows in children] + [-1 for _ in pad],
            [siblings.get(row, -1) for row in range(n)],
        ]
