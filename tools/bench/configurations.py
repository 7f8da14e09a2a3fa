"""What is measured against what: shapes of drafts, the flags that make them, the order of the processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..models.cache import ModelError, find_model
from ..sentences import did_you_mean
from .stages_door import (
    DRAFTS,
    TARGET,
    TREE_FLAGS,
    BadInput,
    Stage,
    merge_flags,
    plain_flags,
    shape_name,
    shapes_itself,
)

Shape = tuple[int, int, int]  # steps, topk, draft tokens

CHAIN: Shape = (3, 1, 4)
TREE: Shape = (3, 4, 8)
# What `fledge bench --tune` tries: chains, then trees by the number of tokens to verify.
GRID: tuple[Shape, ...] = (
    *((steps, 1, steps + 1) for steps in range(1, 7)),
    (2, 2, 4),
    (3, 2, 6),
    (2, 4, 8),
    (3, 4, 8),
    (4, 4, 8),
    (5, 4, 8),
    (4, 4, 16),
    (5, 4, 16),
    (4, 8, 32),
    (5, 8, 32),
)
BATCHES = (1, 8, 32, 64, 128)
PLAIN = "plain"
SHAPES = {"chain": CHAIN, "tree": TREE}
# Methods by name: the flags that each has over the stage's defaults. What gives way to them: `merge_flags`.
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"speculative_algorithm": "NGRAM"},
    "standalone": {"speculative_algorithm": "STANDALONE"},
    "eagle3": {"speculative_algorithm": "EAGLE3"},
    "adaptive": {"speculative_adaptive": True} | dict(zip(TREE_FLAGS, CHAIN, strict=True)),
    "multi-layer": {"enable_multi_layer_eagle": True},
}
WORDS = (PLAIN, *SHAPES, *METHODS)


def canonical(word: str) -> str:
    """A configuration's name for the word that a command has: "chain" and "3/1/4" are "chain 3/1/4".

    Raises BadInput for a word that names none.
    """
    if word == PLAIN or word in METHODS:
        return word
    if word in SHAPES or "/" in word:
        return name_of(SHAPES[word] if word in SHAPES else read_shape(word))
    known = ", ".join(WORDS)
    near = did_you_mean(word, WORDS)
    raise BadInput(f"There is no configuration {word!r}: give one of {known}, or steps/topk/tokens.{near}")


def name_of(shape: Shape | None) -> str:
    """ "plain", "chain 3/1/4" or "tree 3/4/8": what `shape_name` makes of an engine's flags."""
    algorithm = None if shape is None else "EAGLE"
    return shape_name({"speculative_algorithm": algorithm, **_tree_flags(shape or (0, 0, 0))})


def shape_of(name: str) -> Shape | None:
    """The shape in a configuration's name; None for "plain"."""
    return None if name == PLAIN else read_shape(name.rpartition(" ")[2])


def read_shape(text: str) -> Shape:
    """(3, 1, 4) for "3/1/4". Raises BadInput for anything that is no shape of a tree."""
    numbers = [int(part) if part.isdecimal() else 0 for part in text.split("/")]
    if len(numbers) == 3 and min(numbers) >= 1:
        steps, topk, draft_tokens = numbers
        if 2 <= draft_tokens <= 1 + topk + (steps - 1) * topk**2:
            return steps, topk, draft_tokens
    raise BadInput(f"{text!r} is no shape: give steps/topk/tokens of a tree that exists, such as 3/1/4.")


def flags_of(stage: Stage, given: dict[str, Any], name: str) -> dict[str, Any]:
    """Engine flags of the configuration called `name`; `given` are the caller's own.

    Raises BadInput where the flags leave no room for speculation, or a method's draft is not there.
    """
    if name == PLAIN:
        return plain_flags(merge_flags(stage, given))
    given = dict(given)  # for all configurations of the command, and some mean nothing to this one
    if name == "ngram":
        given.pop("speculative_draft_model_path", None)
    if name != "adaptive":
        given.pop("speculative_adaptive_config", None)
    flags = merge_flags(stage, given | METHODS.get(name, {}))
    if flags.get("speculative_algorithm") is None:
        raise BadInput(f"{name} needs a draft head for the target: --speculative-draft-model-path.")
    if name not in METHODS:
        return flags | _tree_flags(shape_of(name))
    draft = flags.get("speculative_draft_model_path")
    if name in DRAFTS and draft and "/" not in draft:  # else a folder or a hub id: the engine's matter
        try:
            find_model(draft)
        except ModelError as error:
            how = f"`fledge models distill-draft {TARGET}` makes one. " if name == "standalone" else ""
            raise BadInput(f"{name} needs a draft: {how}{error}") from None
    return flags


def contenders(stage: Stage, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Engine flags of `fledge compare`'s rows: plain, then a chain and a tree as far as the stage has them.

    Where `given` says something about the shape of a tree there is one speculative row, with that shape;
    likewise under NGRAM, whose trees have none.
    """
    flags = merge_flags(stage, given)
    rows = [plain_flags(flags)]
    if flags.get("speculative_algorithm") is None:
        return rows
    if flags["speculative_algorithm"].upper() == "NGRAM" or shapes_itself(given):
        return [*rows, flags]
    shapes = [CHAIN, TREE] if stage.has("tree") else [CHAIN]
    return rows + [flags | _tree_flags(shape) for shape in shapes]


def there_and_back(names: Sequence[str]) -> list[str]:
    """The order of two processes per configuration, ABBA: what drifts with time hits all alike."""
    return [*names, *reversed(names)]


def grid_of(stage: Stage, shapes: Iterable[Shape] = GRID) -> list[Shape]:
    """The shapes that the stage can draft."""
    return [shape for shape in shapes if shape[1] == 1 or stage.has("tree")]


def _tree_flags(shape: Shape) -> dict[str, int]:
    return dict(zip(TREE_FLAGS, shape, strict=True))
