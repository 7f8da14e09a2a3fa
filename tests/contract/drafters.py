"""Drafters with a chosen mind. They let the real draft run and then rewrite the tokens of the tree it
proposes.

The structure of the tree (mask, positions, links) stays what the engine built; only the tokens change, before
verification reads them. So a test decides how much of every round is accepted and nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable

import torch

from .probe import swapped
from .reference import RefTarget, greedy


class Tree:
    """One request's tree as lists: `children[i]` are the rows whose parent is row i, in sibling order."""

    def __init__(self, next_token: list[int], next_sibling: list[int]):
        self.children = []
        for child in next_token:
            row = []
            while child >= 0:
                row.append(child)
                child = next_sibling[child]
            self.children.append(row)
        self.depth = [0] * len(next_token)
        for row, kids in enumerate(self.children):
            for kid in kids:
                self.depth[kid] = self.depth[row] + 1

    def path(self, length: int, last_sibling: bool) -> list[int]:
        """A path below the root of `length` rows (fewer if no path is that long)."""
        best: list[int] = []
        stack: list[tuple[int, list[int]]] = [(0, [])]
        while stack:
            row, path = stack.pop()
            if len(path) > len(best):
                best = path
            if len(best) == length:
                return best
            kids = self.children[row]
            stack.extend((kid, [*path, kid]) for kid in (kids if last_sibling else reversed(kids)))
        return best


def links_of(verify_input) -> tuple[list[list[int]], list[list[int]]]:
    """First child and next sibling of every row, -1 for none. A chain has no need to say so."""
    if hasattr(verify_input, "retrieve_next_token"):
        return verify_input.retrieve_next_token.tolist(), verify_input.retrieve_next_sibling.tolist()
    bs, n = verify_input.draft_token.shape
    return [[*range(1, n), -1]] * bs, [[-1] * n] * bs


@contextlib.contextmanager
def drafting(probe, target: RefTarget, accepts: Callable[[object, int], int], last_sibling: bool = False):
    """While open, round r of request q proposes exactly accepts(q, r) tokens that greedy decoding agrees
    with.

    Fewer where the tree has no path that long. Yields a list that records, per round, (rid, accepted).
    """
    worker = probe.draft_worker
    real = worker.draft
    record: list[tuple[str, int]] = []
    rounds: dict[str, itertools.count] = {}

    def draft(batch, *args, **kwargs):
        verify_input = real(batch, *args, **kwargs)
        bs = len(batch.reqs)
        tokens = verify_input.draft_token.view(bs, -1)
        links = links_of(verify_input)
        steps = worker.speculative_num_steps
        for i, req in enumerate(batch.reqs):
            tree = Tree(links[0][i], links[1][i])
            number = next(rounds.setdefault(req.rid, itertools.count()))
            # At most `steps` levels can be accepted; one token more tells the siblings what not to be.
            truth = continuation(target, req.all_token_ids(), steps + 1)
            path = tree.path(min(accepts(req, number), steps), last_sibling)
            for row, kids in enumerate(tree.children):
                for j, kid in enumerate(kids):
                    right = truth[tree.depth[row]]
                    wrong = (right + 1 + j) % target.vocab
                    tokens[i, kid] = right if kid in path else wrong
            record.append((req.rid, len(path)))
        return verify_input

    with swapped(worker, "draft", draft):
        yield record


def continuation(target: RefTarget, tokens: list[int], count: int) -> list[int]:
    """`count` greedy tokens after `tokens`, stop rules ignored."""
    return greedy(target, tokens, {"max_new_tokens": count, "ignore_eos": True}).tokens


def perfect(probe, target: RefTarget, **options):
    """Everything that the tree can hold is accepted."""
    return drafting(probe, target, lambda req, number: 10**6, **options)


def never(probe, target: RefTarget, **options):
    """Nothing is ever accepted."""
    return drafting(probe, target, lambda req, number: 0, **options)


def scripted(probe, target: RefTarget, script: Iterable[int], **options):
    """Round r of every request accepts script[r mod len]."""
    script = list(script)
    return drafting(probe, target, lambda req, number: script[number % len(script)], **options)


@contextlib.contextmanager
def poisoned(probe, value: float = float("nan")):
    """The draft model returns `value` in all its features and proposals (its KV too, from then on)."""
    model = probe.draft_runner.model
    handle = model.register_forward_hook(lambda module, args, output: _spoil(output, value))
    try:
        yield
    finally:
        handle.remove()


def _spoil(output, value: float):
    if isinstance(output, torch.Tensor):
        return torch.full_like(output, value) if output.is_floating_point() else output
    for name in ("hidden_states", "topk_p"):
        tensor = getattr(output, name, None)
        if tensor is not None:
            setattr(output, name, torch.full_like(tensor, value))
    return output
