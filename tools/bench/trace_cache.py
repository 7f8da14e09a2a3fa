"""The prefix cache as it stands, as plain lists: what a trace says of it after a step."""

from __future__ import annotations

from typing import Any


def cache_nodes(tree_cache: Any) -> list[dict[str, Any]]:
    """The edges of a radix tree, parents first, each with the position of its parent in this list (-1: root).

    `tokens` are those of its positions. Under EAGLE a key is a pair, or more tokens: `next` is the token
    behind the last one, which the key fixes too; else it is None. `users` counts requests that protect the
    edge from eviction.
    """
    is_pairs = getattr(tree_cache, "is_eagle", False)  # before the scheduler speculates there are none
    found: list[dict[str, Any]] = []
    waiting = [(child, -1) for child in tree_cache.root_node.children.values()]
    while waiting:
        node, parent = waiting.pop(0)
        keys = node.key.tolist()
        if hasattr(tree_cache, "lookahead"):
            tokens, behind = [key[0] for key in keys], next(iter(keys[-1][1:]), None)
        else:
            tokens = [key >> 32 for key in keys] if is_pairs else keys
            behind = keys[-1] & 0xFFFFFFFF if is_pairs else None
        found.append(
            {
                "parent": parent,
                "tokens": tokens,
                "next": behind,
                "slots": [int(slot) for slot in node.value],
                "users": int(node.lock_ref),
            }
        )
        waiting += [(child, len(found) - 1) for child in node.children.values()]
    return found
