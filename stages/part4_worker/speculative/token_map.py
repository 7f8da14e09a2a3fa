"""The token map of FR-Spec: the frequent tokens that a draft's LM head is cut down to.

Restates load_token_map of sglang/srt/speculative/eagle_worker.py at v0.4.6 (#3822, #4016). With few rows
most of a draft forward's time goes to the LM head, and most text needs few of its tokens. The target still
verifies over the whole vocabulary, so a token that is left out is only never drafted.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch


def load_token_map(path: str, vocab_size: int) -> torch.Tensor:
    """Read a list of token ids that torch.save wrote: int64 [hot tokens], on the CPU, ascending.

    Their order in the file means nothing: ascending, a tie between two drafts goes to the lower token.

    Raises:
        ValueError: no such file, another content, or ids that the target does not have.
    """
    if not Path(path).is_file():
        raise ValueError(
            f"speculative_token_map={path!r} is no file; `fledge models token-map` makes one, and one "
            "from the hub has to be downloaded first"
        )
    try:
        ids = torch.as_tensor(torch.load(path, map_location="cpu", weights_only=True))
    except (pickle.UnpicklingError, EOFError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"speculative_token_map={path!r} holds no list of token ids ({type(error).__name__}): make it "
            "with `fledge models token-map`"
        ) from error
    if ids.ndim != 1 or not len(ids) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"speculative_token_map={path!r} must hold a flat list of token ids, at least one")
    ids = ids.long().sort().values
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or bool((ids.diff() == 0).any()):
        raise ValueError(
            f"speculative_token_map={path!r} must name each token once, from 0 to {vocab_size - 1}, and it "
            f"goes from {int(ids[0])} to {int(ids[-1])}: it was made for another target"
        )
    return ids
