"""The maths alone."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from eventloop_distill import soft_loss
from eventloop_distill.softened import class_dim, counted_positions

B, C, T = 4, 5, 3


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def of_the_paper(student, teacher, temperature):
    """Equation 1, row by row: T^2 sum_i q_i (log q_i - log p_i), softened by T."""

    def softened(row):
        exps = [math.exp(value / temperature) for value in row]
        return [one / sum(exps) for one in exps]

    rows = []
    for of_student, of_teacher in zip(student.tolist(), teacher.tolist(), strict=True):
        p, q = softened(of_student), softened(of_teacher)
        rows.append(sum(b * (math.log(b) - math.log(a)) for a, b in zip(p, q, strict=True)))
    return torch.tensor(temperature**2 * sum(rows) / len(rows), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_a_soft_loss_is_the_formula_of_the_paper(temperature):
    """Written out in float64, it is the same number."""
    student, teacher = drawn(B, C), drawn(B, C, seed=1)

    loss = soft_loss(student, teacher, temperature)

    torch.testing.assert_close(loss, of_the_paper(student, teacher, temperature))
    assert not torch.allclose(loss, of_the_paper(student, teacher, 2 * temperature))


def test_its_gradient_is_that_of_cross_entropy_with_soft_targets():
    """What the paper minimises differs by the teacher's entropy, which is constant."""
    student, teacher = drawn(B, C).requires_grad_(), drawn(B, C, seed=1)
    soft_targets = (teacher / 3).softmax(1)

    (actual,) = torch.autograd.grad(soft_loss(student, teacher, 3.0), student)

    (expected,) = torch.autograd.grad(9 * cross_entropy(student / 3, soft_targets), student)
    torch.testing.assert_close(actual, expected)


def test_in_the_limit_of_high_temperatures_logits_are_matched():
    """Equation 4: with logits of mean zero the gradient becomes (z - v) / N."""
    student, teacher = drawn(B, C), drawn(B, C, seed=1)
    student = (student - student.mean(1, keepdim=True)).requires_grad_()
    teacher = teacher - teacher.mean(1, keepdim=True)

    (gradient,) = torch.autograd.grad(soft_loss(student, teacher, 1e4), student)

    expected = (student - teacher).detach() / C / B
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)


def test_who_agrees_with_the_teacher_loses_nothing():
    """And a constant added to all logits is not a disagreement."""
    assert soft_loss(drawn(B, C), drawn(B, C) + 7, 2.0).abs() < 1e-12
    assert soft_loss(drawn(B, C), drawn(B, C, seed=1), 2.0) > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    """Small probabilities would be lost."""
    student, teacher = drawn(B, C).to(dtype), drawn(B, C, seed=1).to(dtype)

    loss = soft_loss(student, teacher, 4.0)

    assert loss.dtype == torch.float32
    expected = of_the_paper(student, teacher, 4.0).float()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_positions_that_do_not_count_are_left_out_of_the_mean():
    """Padding has no outputs worth learning from."""
    student, teacher = drawn(B, T, C), drawn(B, T, C, seed=1)
    targets = torch.zeros(B, T, dtype=torch.int64)
    targets[1:, 2] = -100
    counted = counted_positions(student, targets, -1)

    loss = soft_loss(student, teacher, 2.0, counted=counted)

    kept = targets != -100
    torch.testing.assert_close(loss, soft_loss(student[kept], teacher[kept], 2.0))
    assert not torch.allclose(loss, soft_loss(student, teacher, 2.0))
    assert soft_loss(student, teacher, 2.0, counted=torch.zeros_like(counted)) == 0


DIMS = {
    "flat": ((B, C), (B,), -1),
    "sequences": ((B, T, C), (B, T), -1),
    "as torch has sequences": ((B, C, T), (B, T), 1),
    "as torch has images": ((B, C, 6, 7), (B, 6, 7), 1),
    "both would fit": ((B, T, T), (B, T), -1),
    "one target a sequence": ((B, T, C), (B,), -1),
}


@pytest.mark.parametrize(("logits", "targets", "dim"), DIMS.values(), ids=DIMS)
def test_classes_are_where_the_targets_have_no_dimension(logits, targets, dim):
    """The task's loss knows where they are, and can't be asked."""
    assert class_dim(torch.zeros(logits), torch.zeros(targets, dtype=torch.int64)) == dim


def test_probabilities_as_targets_have_classes_where_torch_has_them():
    """Their shape is that of the logits; none of them is ignored."""
    logits = torch.zeros(B, C, T)

    assert class_dim(logits, torch.zeros(B, C, T)) == 1
    assert class_dim(logits, None) == -1
    assert counted_positions(logits, torch.zeros(B, C, T), 1) is None


def test_dense_outputs_are_compared_along_their_classes():
    """As if the dimension stood last."""
    student, teacher = drawn(B, C, T), drawn(B, C, T, seed=1)

    loss = soft_loss(student, teacher, 2.0, dim=1)

    expected = soft_loss(student.transpose(1, 2), teacher.transpose(1, 2), 2.0)
    torch.testing.assert_close(loss, expected)
    assert not torch.allclose(loss, soft_loss(student, teacher, 2.0))
