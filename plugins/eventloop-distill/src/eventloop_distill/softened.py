"""The maths of distillation: how far softened outputs are from those of a teacher.

Source: Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network",
arXiv:1503.02531, section 2.
"""

# B = batch, C = class; ... = positions, if there are several for a sample

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, pad

IGNORED = -100  # what torch's cross_entropy leaves out unless told otherwise


def soft_loss(
    logits: Tensor,
    teacher_logits: Tensor,
    temperature: float,
    *,
    dim: int = -1,
    counted: Tensor | None = None,
) -> Tensor:
    """Returns T^2 times the divergence of the student's softened outputs from the teacher's.

    Softened is softmax(logits / T). The divergence is the cross-entropy with the teacher's outputs
    as soft targets less their entropy, which is constant: its gradient is the paper's, and it is 0
    where both agree. T^2 keeps the gradient's size where T changes.

    Args:
        logits: of the student, any floating type; computed in float32 or wider.
        teacher_logits: of the same shape.
        temperature: T, more than 0.
        dim: where the classes are.
        counted: bool, of the shape without `dim`: which positions the mean is over; all if None.

    Returns:
        The mean over positions, shape (); 0 where none is counted.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    student = log_softmax(logits.to(wide) / temperature, dim)
    teacher = log_softmax(teacher_logits.to(wide) / temperature, dim)
    divergence = kl_div(student, teacher, reduction="none", log_target=True).sum(dim)
    if counted is None:
        mean = divergence.mean()
    else:
        mean = (divergence * counted).sum() / counted.sum().clamp(min=1)
    return temperature**2 * mean


def class_dim(logits: Tensor, targets: object) -> int:
    """Returns the dimension of the classes: the one that the targets' shape lacks.

    Logits are (B, C), (B, ..., C) with targets (B, ...), or as torch has them (B, C, ...); the last
    dimension where both would fit, or neither.
    """
    if logits.ndim < 3 or not isinstance(targets, Tensor) or targets.shape == logits.shape[:-1]:
        return -1
    as_torch_has_them = (logits.shape, (logits.shape[0], *logits.shape[2:]))
    return 1 if targets.shape in as_torch_has_them else -1


def counted_positions(
    logits: Tensor, targets: object, dim: int, *, are_next: bool = False
) -> Tensor | None:
    """Returns a mask of class indices that aren't `IGNORED`; None for targets of another kind.

    Args:
        are_next: whether a position, of the second dimension, predicts the next one's target.
    """
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    positions = list(logits.shape)
    del positions[dim]
    if list(targets.shape) != positions:
        return None
    counted = targets != IGNORED
    return pad(counted[:, 1:], (0, 1), value=False) if are_next else counted
