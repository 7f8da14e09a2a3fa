"""The trainer's loss: soft cross-entropy against the target's distribution, through the LM head.

Nearly all of the training time goes here (two matrix products over the whole vocabulary for each position and
pass), so the logits of a chunk of positions are made, turned into their own gradient in place, and dropped:
memory is one chunk of two models' logits, and the target's logits are made once for all passes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Rows = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def rows_native(student: Tensor, teacher: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy row by row; OVERWRITES `student` with the gradient of `weight · loss`.

    Args: logits student and teacher `[rows, V]`; weight float32 `[rows]`.
    Returns float32 `[rows]` each: the loss, unweighted; 1.0 where the student's best token is the teacher's.
    """
    s, t = student.float(), teacher.float()
    p = t.softmax(dim=-1)
    log_q = s.log_softmax(dim=-1)
    agree = (s.argmax(dim=-1) == t.argmax(dim=-1)).float()
    student.copy_(weight[:, None] * (log_q.exp() - p))
    return -(p * log_q).sum(dim=-1), agree


def rows_for(device: torch.device) -> Rows:
    """The fused kernel on a GPU, PyTorch elsewhere."""
    if device.type != "cuda":
        return rows_native
    from .head_loss_triton import rows_triton

    return rows_triton


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student, teacher, lm_head, teacher_head, weight, chunk, rows):
        passes, count, _ = student.shape
        gradient = torch.empty_like(student)
        losses = torch.empty(passes, count, dtype=torch.float32, device=student.device)
        agrees = torch.empty_like(losses)
        # An LM head of the student's own is trained as well, and its gradient is summed over the chunks.
        head_gradient = None
        if lm_head.requires_grad:
            head_gradient = torch.zeros(passes, *lm_head.shape, dtype=torch.float32, device=student.device)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            target_logits = teacher[part] @ teacher_head.T  # [chunk, V]
            for k in range(passes):
                logits = student[k, part] @ lm_head.T  # [chunk, V]
                losses[k, part], agrees[k, part] = rows(logits, target_logits, weight[k, part])
                torch.mm(logits, lm_head, out=gradient[k, part])
                if head_gradient is not None:
                    head_gradient[k] += logits.T @ student[k, part]
        ctx.save_for_backward(gradient, head_gradient)
        ctx.mark_non_differentiable(agrees)
        return (losses * weight).sum(dim=1), agrees

    @staticmethod
    def backward(ctx, grad_losses, _):
        gradient, head_gradient = ctx.saved_tensors
        if head_gradient is not None:
            head_gradient = torch.einsum("k,kvh->vh", grad_losses, head_gradient).to(gradient.dtype)
        return gradient * grad_losses[:, None, None].to(gradient.dtype), None, head_gradient, *[None] * 4


def soft_cross_entropy(
    student: Tensor,
    teacher: Tensor,
    lm_head: Tensor,
    weight: Tensor,
    chunk: int = 8192,
    teacher_head: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sums of the cross-entropy, pass by pass.

    Args: student `[passes, n, h]`, the head's outputs; teacher `[n, h]`, the target's hidden states at the
    positions that those predict; lm_head `[V, h]`, the student's; weight float32 `[passes, n]`; teacher_head
    `[V, h]`, by itself `lm_head`: rows for the same tokens.
    Returns the losses `[passes]`, differentiable in `student` and `lm_head`, and whether the best tokens
    agree, float32 `[passes, n]`.
    """
    rows = rows_for(student.device)
    return _SoftCrossEntropy.apply(
        student, teacher, lm_head, lm_head if teacher_head is None else teacher_head, weight, chunk, rows
    )
