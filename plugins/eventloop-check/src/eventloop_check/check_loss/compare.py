"""By which factor two losses and two gradients of one batch differ, and what a factor can't explain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Sums of float32 in another order differ by 1e-6 or so, with cancellation by more.
LOSS_TOLERANCE = 1e-4
GRAD_TOLERANCE = 1e-3
OUTPUT_TOLERANCE = 1e-4
Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Comparison:
    """A loss and its gradient, compared with those of the batch in one piece.

    Args:
        loss, reference: the two losses.
        size: what their difference is relative to.
        scale: the best fitting factor of the gradient: the least squares of g - scale * g0.
        residual: what the factor leaves of the gradient, |g - scale * g0| / |g|: the sine of the
            angle between the two, in [0, 1].
        distance: |g - g0| / |g0|.
    """

    loss: float
    reference: float
    size: float
    scale: float
    residual: float
    distance: float

    @property
    def loss_factor(self) -> float:
        """The loss in relation to that of the batch in one piece."""
        return self.loss / self.reference if self.reference else math.nan

    @property
    def holds(self) -> bool:
        """Whether both are the same but for rounding."""
        is_same = abs(self.loss - self.reference) <= LOSS_TOLERANCE * self.size
        return is_same and self.distance <= GRAD_TOLERANCE


def compare(
    loss: float, gradients: Gradients, reference: float, expected: Gradients, size: float = 0.0
) -> Comparison:
    """Compares a loss and its gradients with others.

    Args:
        gradients, expected: by parameter; one that is missing is zero.
        size: of the losses that the mean is of, which may cancel each other.
    """
    dot = square = other = 0.0
    for name in gradients.keys() | expected.keys():
        found = gradients.get(name)
        wanted = expected.get(name)
        square += _dot(found, found)
        other += _dot(wanted, wanted)
        dot += _dot(found, wanted)
    scale = dot / other if other else math.nan if square else 1.0
    # In this order NaN stays NaN.
    rest = math.sqrt(max(square - dot * dot / other, 0.0)) if other else math.sqrt(square)
    distance = math.sqrt(max(square - 2 * dot + other, 0.0))
    return Comparison(
        loss,
        reference,
        max(abs(reference), size),
        scale,
        rest / math.sqrt(square) if square else 0.0,
        distance / math.sqrt(other) if other else math.inf if square else 0.0,
    )


def fingerprints(outputs: Tensor, real_BT: Tensor | None = None) -> list[Tensor]:
    """Returns a few numbers for each sample of a model's outputs, float64, on the host.

    The last dimension is reduced with fixed weights; other outputs would have other numbers.

    Args:
        outputs: shape (B, ...).
        real_BT: positions that count, where the second dimension is that of positions.
    """
    reduced = outputs.detach().to("cpu", torch.float64)
    if reduced.ndim > 1:
        width = reduced.shape[-1]
        weights = torch.cos(1.0 + torch.arange(width, dtype=torch.float64)) / math.sqrt(width)
        reduced = reduced @ weights
    if real_BT is not None and reduced.shape == real_BT.shape:
        return [row[real] for row, real in zip(reduced, real_BT.cpu(), strict=True)]
    return [row.flatten() for row in reduced]


def are_same_outputs(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool | None:
    """Returns whether each sample has the same fingerprint; None where there are none."""
    if not found or [len(one) for one in found] != [len(one) for one in expected]:
        return None
    ours = torch.cat([*found])
    theirs = torch.cat([*expected])
    return bool((ours - theirs).norm() <= OUTPUT_TOLERANCE * theirs.norm())


def _dot(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        return 0.0
    return float((one.double() * other.double()).sum())
