"""What enters a draft model, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .layers import rms_norm


def embed_with_hidden(
    input_ids: torch.Tensor,
    embed_tokens: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The embedding of each token and, behind it, the hidden state that it is paired with.

    Args:
        input_ids: int64 [rows].
        embed_tokens: [V, hidden].
        hidden_states: [any, hidden] in the same type.
        hidden_rows: int64 [rows], row of hidden_states for each token; None if they go one by one.

    Returns [rows, 2 · hidden].
    """
    paired = hidden_states if hidden_rows is None else hidden_states[hidden_rows]
    return torch.cat([F.embedding(input_ids, embed_tokens), paired], dim=-1)


def norm_embed_with_hidden(
    input_ids: torch.Tensor,
    embed_tokens: torch.Tensor,
    embed_norm: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_rows: torch.Tensor | None,
    hidden_norm: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same pairs with each half normed by itself, and beside them the hidden states as they are.

    Args:
        input_ids, embed_tokens, hidden_states, hidden_rows: see embed_with_hidden.
        embed_norm, hidden_norm: [hidden], the weights of the two norms.
        eps: see rms_norm.

    Returns [rows, 2 · hidden] and [rows, hidden], the residual.
    """
    residual = hidden_states if hidden_rows is None else hidden_states[hidden_rows]
    embeds = rms_norm(F.embedding(input_ids, embed_tokens), embed_norm, eps)
    return torch.cat([embeds, rms_norm(residual, hidden_norm, eps)], dim=-1), residual
