"""The frequent tokens of a text: what a draft may be cut down to, and how much of the text that covers.

FR-Spec's token map and EAGLE-3's draft vocabulary are the same choice. Only answers count, since nothing else
is ever drafted.
"""

import os
from pathlib import Path

import numpy as np
import torch

from .cache import ModelError
from .head_data import HELD_OUT, Text, load_text


def answer_counts(text: Text, vocab_size: int = 0) -> np.ndarray:
    """How often each token stands in an answer, int64 `[vocab_size or more]`."""
    answers = [text.row(i)[text.prompt_lengths[i] :] for i in range(len(text))]
    tokens = np.concatenate(answers) if answers else np.empty(0, np.int64)
    return np.bincount(tokens, minlength=vocab_size)


def most_frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` most frequent tokens, most frequent first, ties to the lower id."""
    return np.argsort(-counts, kind="stable")[:size]


def coverage(tokens: np.ndarray, counts: np.ndarray) -> float:
    """The part of a text, given by its counts, that these tokens make up."""
    return float(counts[tokens[tokens < len(counts)]].sum() / max(1, counts.sum()))


def coverages(tokens: np.ndarray, text_folder: str | os.PathLike) -> dict[str, float]:
    """The same for a folder's training text and, where there is one, its held-out answers."""
    found = {"training": coverage(tokens, answer_counts(load_text(text_folder)))}
    if (Path(text_folder) / HELD_OUT).is_file():
        found["held_out"] = coverage(tokens, answer_counts(load_text(text_folder, held_out=True)))
    return {name: round(part, 5) for name, part in found.items()}


def write_token_map(text_folder: str | os.PathLike, out: str | os.PathLike, size: int) -> dict:
    """Write the `size` most frequent tokens as upstream's FR-Spec files are: a list that torch.save wrote.

    Returns how many there are and what they cover. Raises ModelError where the text has no training answers.
    """
    counts = answer_counts(load_text(text_folder))
    if not counts.sum():
        raise ModelError(f"There is no training text in {text_folder}.")
    tokens = most_frequent(counts, min(size, int((counts > 0).sum())))
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    torch.save(tokens.tolist(), partial)
    os.replace(partial, out)
    return {"tokens": len(tokens), **coverages(tokens, text_folder)}
