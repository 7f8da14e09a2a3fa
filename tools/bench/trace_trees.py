"""Keeps what a draft tree grew from, so that a recording shows every proposal and not only the chosen ones.

An engine forgets its candidates when the tree is built: in a CUDA graph their memory goes to the next tensor.
So whoever records has to hold them from before the engine is opened, when graphs are captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from .measure import wrap


class Growth:
    """Which candidates belong to which tree: the last one that was built eagerly, or those of each graph."""

    def __init__(self) -> None:
        self._latest: Any = None
        self._of_graph: dict[int, Any] = {}  # by the memory that the graph writes its tokens to

    @contextmanager
    def watching(self, package: ModuleType) -> Iterator[Growth]:
        """Hold the candidates of all trees that engines of this stage build inside the block."""
        try:
            module = __import__(f"{package.__name__}.speculative.build_eagle_tree", fromlist=["DraftTree"])
        except ModuleNotFoundError:  # a stage without trees
            yield self
            return
        with wrap({"build": [(module.DraftTree, "build")]}, self._build):
            yield self

    def forget(self) -> None:
        """Forget the last eager tree, so that the next `of` can only find what came after."""
        self._latest = None

    def of(self, draft_token: Any) -> Any:
        """The candidates that a tree's tokens were chosen from, or None if nobody watched."""
        if self._latest is not None:
            return self._latest
        return self._of_graph.get(draft_token.data_ptr())

    def _build(self, _: str, method: Callable[..., Any], tree: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        built = method(tree, *args, **kwargs)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._of_graph[built[0].data_ptr()] = tree.candidates
        else:
            self._latest = tree.candidates
        return built


def chosen(scores: list[float], count: int) -> list[int]:
    """Numbers of the best `count` candidates, ascending; of equal scores the lower number is better."""
    best = sorted(range(len(scores)), key=lambda number: (-scores[number], number))
    return sorted(best[:count])


def candidates_of(
    tree: list[int], scores: list[float], tokens: list[int], blocks: list[int], topk: int
) -> dict[str, list]:
    """The entry `candidates` of a round: what was proposed, and which proposal each node of `tree` is.

    Args:
        tree: tokens of the nodes, the root first.
        scores, tokens: of all candidates, by number.
        blocks: the candidate that each block of `topk` hangs on, -1 for the root.
    """
    nodes = chosen(scores, len(tree) - 1)
    if [tokens[number] for number in nodes] != tree[1:]:
        raise RuntimeError("the tree was not chosen from these candidates: what is held is not what was read")
    parents = [blocks[number // topk] for number in range(len(tokens))]
    return {"tokens": tokens, "scores": scores, "parents": parents, "nodes": [-1, *nodes]}


def parents_of(child: list[int], sibling: list[int]) -> list[int]:
    """Each node's parent from first children and next siblings (-1: none); -1 for the root."""
    parents = [-1] * len(child)
    for node, below in enumerate(child):
        while below >= 0:
            parents[below] = node
            below = sibling[below]
    return parents
