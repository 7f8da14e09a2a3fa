"""The chunked loss against the plain formula, and its fused kernel against PyTorch."""

import pytest
import torch

from tools.models.head_loss import rows_native, soft_cross_entropy


def setting(passes=3, count=13, hidden=24, vocab=61):
    torch.manual_seed(0)
    student = torch.randn(passes, count, hidden, requires_grad=True)
    teacher, lm_head = torch.randn(count, hidden), torch.randn(vocab, hidden) / 3
    weight = torch.rand(passes, count)
    weight[1, :4] = 0
    return student, teacher, lm_head, weight


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_loss_and_gradient_are_the_formula_s(chunk):
    student, teacher, lm_head, weight = setting()
    losses, agree = soft_cross_entropy(student, teacher, lm_head, weight, chunk)
    factors = torch.tensor([1.0, 0.8, 0.64])
    (losses * factors).sum().backward()
    got = student.grad.clone()

    student.grad = None
    logits = student @ lm_head.T
    target = (teacher @ lm_head.T).softmax(-1)
    expected = (-(target * logits.log_softmax(-1)).sum(-1) * weight).sum(1)
    (expected * factors).sum().backward()
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(got, student.grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(agree, (logits.argmax(-1) == target.argmax(-1)).float())


@pytest.mark.parametrize("vocab", [61, 8192 + 7])
def test_the_fused_rows_equal_their_twin(vocab):
    """On the GPU in its own precision; under the interpreter in float32, its bf16 being no use."""
    from tools.models.head_loss_triton import rows_triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    student, teacher = torch.randn(5, vocab, device=device) * 3, torch.randn(5, vocab, device=device) * 3
    teacher[2] = student[2]
    weight = torch.tensor([1.0, 0.5, 0.25, 0.0, 2.0], device=device)
    ours, twin = student.clone(), student.clone()
    loss, agree = rows_triton(ours, teacher, weight)
    expected_loss, expected_agree = rows_native(twin, teacher, weight)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours, twin, rtol=1e-4, atol=1e-6)
    assert torch.equal(agree, expected_agree) and agree[2] == 1


def test_an_lm_head_of_the_student_s_own_is_trained_too():
    student, teacher, teacher_head, weight = setting()
    lm_head = torch.randn(teacher_head.shape, requires_grad=True)
    losses, _ = soft_cross_entropy(student, teacher, lm_head, weight, 5, teacher_head)
    factors = torch.tensor([1.0, 0.8, 0.64])
    (losses * factors).sum().backward()
    got, student.grad, lm_head.grad = (student.grad, lm_head.grad), None, None
    target = (teacher @ teacher_head.T).softmax(-1)
    expected = (-(target * (student @ lm_head.T).log_softmax(-1)).sum(-1) * weight).sum(1)
    (expected * factors).sum().backward()
    torch.testing.assert_close(losses, expected)
    for mine, want in zip(got, (student.grad, lm_head.grad), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5)
