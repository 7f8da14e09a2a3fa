"""The trainer's one kernel: both models' softmax, their difference and the loss, fused.

Imported only where the device is a GPU (or by its test under the interpreter); `head_loss.rows_native` is its
twin.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rows_kernel(student, teacher, weight, loss, agree, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    student += row * V
    teacher += row * V
    cols = tl.arange(0, BLOCK)
    best_s = -float("inf")
    best_t = -float("inf")
    sum_s = 0.0
    sum_t = 0.0
    for start in range(0, V, BLOCK):
        inside = start + cols < V
        s = tl.load(student + start + cols, mask=inside, other=-float("inf")).to(tl.float32)
        t = tl.load(teacher + start + cols, mask=inside, other=-float("inf")).to(tl.float32)
        new_s = tl.maximum(best_s, tl.max(s, 0))
        new_t = tl.maximum(best_t, tl.max(t, 0))
        sum_s = sum_s * tl.exp(best_s - new_s) + tl.sum(tl.exp(s - new_s), 0)
        sum_t = sum_t * tl.exp(best_t - new_t) + tl.sum(tl.exp(t - new_t), 0)
        best_s = new_s
        best_t = new_t
    lse_s = best_s + tl.log(sum_s)
    lse_t = best_t + tl.log(sum_t)
    w = tl.load(weight + row)
    total = 0.0
    at_best = -float("inf")
    for start in range(0, V, BLOCK):
        inside = start + cols < V
        s = tl.load(student + start + cols, mask=inside, other=0.0).to(tl.float32)
        t = tl.load(teacher + start + cols, mask=inside, other=-float("inf")).to(tl.float32)
        p = tl.exp(t - lse_t)
        total += tl.sum(p * (lse_s - s), 0)
        at_best = tl.maximum(at_best, tl.max(tl.where(inside & (t == best_t), s, -float("inf")), 0))
        gradient = w * (tl.exp(s - lse_s) - p)
        tl.store(student + start + cols, gradient.to(student.dtype.element_ty), mask=inside)
    tl.store(loss + row, total)
    tl.store(agree + row, (at_best >= best_s).to(tl.float32))


def rows_triton(student: Tensor, teacher: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """See `head_loss.rows_native`: same arguments, same results, `student` overwritten as there."""
    rows, vocab = student.shape
    loss = torch.empty(rows, dtype=torch.float32, device=student.device)
    agree = torch.empty_like(loss)
    block = min(triton.next_power_of_2(vocab), 8192)
    _rows_kernel[(rows,)](student, teacher, weight, loss, agree, V=vocab, BLOCK=block, num_warps=8)
    return loss, agree
