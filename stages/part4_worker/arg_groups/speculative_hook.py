"""The flags of speculation: which make sense together, and what follows from those that are given.

Restates sglang/srt/arg_groups/speculative_hook.py. As server_args.py, the file is the same in every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .adaptive_config import all_candidate_steps, read_adaptive_config

MAX_DRAFT_TOKENS = 64  # one row of the tree mask is one 64-bit word
MAX_TOPK = 16

_TREE_FLAGS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
_DRAFTLESS = ("NGRAM",)
_EAGLE = ("EAGLE", "NEXTN", "EAGLE3")
_NOT_FOR_RANKS = ("NGRAM", "STANDALONE")
# Flags of EAGLE's tree and of its draft, which mean nothing to a look-up.
_NOT_FOR_NGRAM = ("speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk")


def draft_capacity(steps: int, topk: int) -> int:
    """The most nodes a draft tree can have, root included; steps + 1 for a chain."""
    return 1 + topk + (steps - 1) * topk**2


def check_speculation(values: dict[str, Any], given: dict[str, Any], plugins: Mapping[str, Any]) -> None:
    """Refuse flags that contradict one another.

    Args:
        values: every flag, defaults filled in.
        given: those that differ from the defaults.
        plugins: algorithms from outside the package, which look at their own flags.
    """
    algorithm = values["speculative_algorithm"]
    if algorithm is None:
        for name in given:
            if name.startswith("speculative_") or name == "enable_multi_layer_eagle":
                wanted = "NGRAM" if "_ngram_" in name else "EAGLE"
                raise ValueError(
                    f"{name}={given[name]!r} needs a speculative_algorithm; add "
                    f"speculative_algorithm={wanted!r} or leave {name} out."
                )
    elif algorithm in plugins:
        if values["enable_dp_attention"]:
            raise ValueError(
                f"speculative_algorithm={algorithm!r} is registered in this process, and the ranks of "
                "enable_dp_attention are processes of their own; leave enable_dp_attention out."
            )
    elif algorithm not in _DRAFTLESS and values["speculative_draft_model_path"] is None:
        raise ValueError(
            f"speculative_algorithm={algorithm!r} needs a draft model; give speculative_draft_model_path "
            "(the folder of a head trained for this target, or of a small model with its vocabulary)."
        )
    if algorithm in _NOT_FOR_RANKS and values["enable_dp_attention"]:
        raise ValueError(
            f"speculative_algorithm={algorithm!r} does not run under enable_dp_attention, and upstream's "
            "does not either; leave one of them out."
        )
    if algorithm not in plugins:
        _check_ngram(algorithm, values, given)
        _check_rejection_sampling(algorithm, values)
        _check_adaptive(algorithm, values)
        _check_multi_layer(algorithm, values)
    if values["speculative_token_map"] is not None and algorithm not in (None, "EAGLE", "NEXTN"):
        raise ValueError(
            f"speculative_token_map={values['speculative_token_map']!r} cuts down the LM head that EAGLE's "
            f"draft borrows, and {algorithm} borrows none (EAGLE3 has a vocabulary of its own); leave it out."
        )


def _check_rejection_sampling(algorithm: str | None, values: dict[str, Any]) -> None:
    """What drafts are drawn by has to be the draft's own law, one token behind the other."""
    flag = "speculative_use_rejection_sampling=True"
    if not values["speculative_use_rejection_sampling"]:
        return
    if algorithm not in _EAGLE:
        raise ValueError(
            f"{flag} is for EAGLE, EAGLE3 and NEXTN, upstream too, and not for {algorithm}; leave it out."
        )
    if values["speculative_eagle_topk"] not in (None, 1):
        raise ValueError(
            f"{flag} verifies chains, and speculative_eagle_topk={values['speculative_eagle_topk']} asks for "
            "trees; set it to 1, as upstream wants it, or leave the flag out."
        )
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if values[name] != 1:
            raise ValueError(
                f"{flag} is exact and knows no thresholds, upstream's neither, and {name}={values[name]} is "
                "one; leave one of them out."
            )


def _check_adaptive(algorithm: str | None, values: dict[str, Any]) -> None:
    """Upstream warns of these combinations and goes on with fixed steps."""
    flag = "speculative_adaptive=True"
    if not values["speculative_adaptive"]:
        if values["speculative_adaptive_config"] is not None:
            raise ValueError(
                f"speculative_adaptive_config={values['speculative_adaptive_config']!r} means nothing by "
                f"itself; add {flag} or leave it out."
            )
        return
    also = "upstream would ignore the flag there"
    if algorithm not in _EAGLE:
        raise ValueError(
            f"{flag} is for EAGLE, EAGLE3 and NEXTN, and not for {algorithm}; {also}; leave it out."
        )
    if values["speculative_eagle_topk"] not in (None, 1):
        raise ValueError(
            f"{flag} changes the length of chains, and speculative_eagle_topk="
            f"{values['speculative_eagle_topk']} asks for trees; {also}; set it to 1 or leave one out."
        )
    for name in ("enable_dp_attention", "enable_multi_layer_eagle"):
        if values[name]:
            why = "ranks would choose differently" if "dp" in name else "there is one module for each step"
            raise ValueError(f"{flag} does not go with {name}, for {why}; {also}; leave one of them out.")


def _check_multi_layer(algorithm: str | None, values: dict[str, Any]) -> None:
    """One module proposes one token, and the next goes on from that."""
    flag = "enable_multi_layer_eagle=True"
    if algorithm is None or not values["enable_multi_layer_eagle"]:
        return
    if algorithm not in _EAGLE:
        raise ValueError(
            f"{flag} is for EAGLE, EAGLE3 and NEXTN, and not for {algorithm}; upstream would ignore the flag "
            "there; leave it out."
        )
    if values["speculative_eagle_topk"] not in (None, 1):
        raise ValueError(
            f"{flag} drafts chains, a token for each module, and speculative_eagle_topk="
            f"{values['speculative_eagle_topk']} asks for trees; set it to 1 or leave one of them out."
        )
    if values["enable_dp_attention"]:
        raise ValueError(
            f"{flag} does not run under enable_dp_attention here; upstream's does; leave one of them out."
        )


def _check_ngram(algorithm: str | None, values: dict[str, Any], given: dict[str, Any]) -> None:
    """The flags of NGRAM with another algorithm, and other algorithms' with NGRAM."""
    strange = _NOT_FOR_NGRAM if algorithm == "NGRAM" else [name for name in given if "_ngram_" in name]
    for name in strange:
        if name in given:
            raise ValueError(
                f"{name}={given[name]!r} means nothing to speculative_algorithm={algorithm!r}: NGRAM looks "
                "its drafts up, and every other algorithm asks a model; leave it out."
            )
    low, high = (values[f"speculative_ngram_{end}_bfs_breadth"] for end in ("min", "max"))
    if low > high:
        raise ValueError(
            f"speculative_ngram_min_bfs_breadth={low} is more than speculative_ngram_max_bfs_breadth={high}; "
            "lower the one or raise the other."
        )


def resolve_speculation(
    values: dict[str, Any], has: Callable[[str], bool], plugins: Mapping[str, Any]
) -> None:
    """Fill in steps, topk and draft tokens, and refuse numbers that no tree can have.

    None given: (5, 4, 8), the values that v0.4.6 chooses by itself; (5, 1, 6) in a stage without trees;
    (3, 1, 4) for STANDALONE, whose draft is a whole model, and where each step has a module of its own; a
    chain of the middle one of all candidates where steps are adaptive. Some given: topk is 4 (1 without
    trees), or the next larger one that gives enough nodes; steps is 5, or fewer where draft_tokens - 1 levels
    are enough, or the first larger one that gives enough nodes; draft_tokens is 8 at most, and steps + 1 for
    a chain. A chain (topk 1), which rejection sampling asks for too, has exactly steps + 1 nodes. NGRAM has
    draft tokens alone, by default 12. Adaptive steps begin with a candidate.
    """
    algorithm = values["speculative_algorithm"]
    if algorithm == "NGRAM" and values["speculative_num_draft_tokens"] is None:
        values["speculative_num_draft_tokens"] = 12
    if algorithm is None or algorithm in _DRAFTLESS or algorithm in plugins:
        return
    if algorithm == "NEXTN":
        values["speculative_algorithm"] = "EAGLE"
    steps, topk, nodes = (values[name] for name in _TREE_FLAGS)
    has_modules = values["enable_multi_layer_eagle"]
    if (algorithm == "STANDALONE" or has_modules) and steps is topk is nodes is None:
        steps, topk = 3, 1
    if values["speculative_use_rejection_sampling"] or values["speculative_adaptive"] or has_modules:
        topk = 1
    if values["speculative_adaptive"]:
        config = read_adaptive_config(values["speculative_adaptive_config"], MAX_DRAFT_TOKENS - 1)
        candidates = all_candidate_steps(config)
        if steps is nodes is None:
            steps = candidates[len(candidates) // 2]
    has_tree = has("tree") and (values["page_size"] == 1 or has("page_tree"))
    derive_topk = topk is None
    topk = (4 if has_tree else 1) if derive_topk else topk
    if steps is None:
        steps = 5 if nodes is None else min(5, nodes - 1)
        while nodes is not None and not derive_topk and draft_capacity(steps, topk) < nodes:
            steps += 1
        if nodes is not None and topk == 1:
            steps = nodes - 1
    if derive_topk and has_tree and nodes is not None:
        while topk < MAX_TOPK and draft_capacity(steps, topk) < nodes:
            topk += 1
    if nodes is None:
        nodes = steps + 1 if topk == 1 else min(8, draft_capacity(steps, topk))
    numbers = (
        f"speculative_num_steps={steps}, speculative_eagle_topk={topk}, speculative_num_draft_tokens={nodes}"
    )
    if nodes > MAX_DRAFT_TOKENS:
        raise ValueError(
            f"A tree has at most {MAX_DRAFT_TOKENS} draft tokens; {numbers} asks for more, so lower one."
        )
    if topk == 1 and nodes != steps + 1:
        raise ValueError(
            f"A chain (topk 1) has exactly steps + 1 draft tokens, and {numbers} contradicts that; set "
            f"speculative_num_draft_tokens={steps + 1} or leave it out."
        )
    if has_modules and 0 < (values["chunked_prefill_size"] or 0) < steps:
        raise ValueError(
            f"chunked_prefill_size={values['chunked_prefill_size']} is less than the {steps} tokens that "
            "enable_multi_layer_eagle reads ahead; raise it, or lower speculative_num_steps."
        )
    if values["speculative_adaptive"] and steps not in candidates:
        raise ValueError(
            f"speculative_num_steps={steps} is none of the candidates of speculative_adaptive, "
            f"{', '.join(map(str, candidates))}; choose one of them or leave it out."
        )
    capacity = draft_capacity(steps, topk)
    if nodes > capacity:
        raise ValueError(
            f"{numbers}: such a tree holds at most 1 + topk + (steps - 1) * topk^2 = {capacity} nodes; "
            "lower speculative_num_draft_tokens or raise one of the others."
        )
    values.update(zip(_TREE_FLAGS, (steps, topk, nodes), strict=True))
