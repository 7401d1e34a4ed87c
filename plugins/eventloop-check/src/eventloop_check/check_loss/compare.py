"""Compares two losses and gradients of the same batch: by a common factor, and beyond it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Reordered float32 sums differ by about 1e-6 relative, by more with cancellation.
LOSS_TOLERANCE = 1e-4
GRAD_TOLERANCE = 1e-3
OUTPUT_TOLERANCE = 1e-4
Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Comparison:
    """A loss and its gradient, compared with the reference.

    Args:
        loss, reference: the two losses.
        size: magnitude of the losses, which their difference is relative to.
        scale: factor of the gradient that fits best: least squares of g - scale * g0.
        residual: share of the gradient that the factor doesn't explain, |g - scale * g0| / |g|: the
            sine of the angle between both, in [0, 1].
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
        """The loss divided by the reference loss; NaN if that is 0."""
        return self.loss / self.reference if self.reference else math.nan

    @property
    def holds(self) -> bool:
        """Whether loss and gradient equal the reference's up to rounding."""
        is_same = abs(self.loss - self.reference) <= LOSS_TOLERANCE * self.size
        return is_same and self.distance <= GRAD_TOLERANCE


def compare(
    loss: float, gradients: Gradients, reference: float, expected: Gradients, size: float = 0.0
) -> Comparison:
    """Compares a loss and its gradients with a reference.

    Args:
        gradients, expected: gradients by parameter; a missing gradient counts as zero.
        size: mean magnitude of the losses that are averaged, which may cancel each other.
    """
    dot = 0.0
    square = 0.0
    expected_square = 0.0
    for name in gradients.keys() | expected.keys():
        gradient = gradients.get(name)
        expected_gradient = expected.get(name)
        square += _dot(gradient, gradient)
        expected_square += _dot(expected_gradient, expected_gradient)
        dot += _dot(gradient, expected_gradient)
    norm = math.sqrt(square)
    expected_norm = math.sqrt(expected_square)
    # `max(NaN, 0.0)` is NaN, but `max(0.0, NaN)` is 0: keep this order.
    distance = math.sqrt(max(square - 2 * dot + expected_square, 0.0))
    if expected_square:
        scale = dot / expected_square
        residual = math.sqrt(max(square - dot * dot / expected_square, 0.0))
        relative_distance = distance / expected_norm
    else:
        scale = math.nan if square else 1.0
        residual = norm
        relative_distance = math.inf if square else 0.0
    return Comparison(
        loss,
        reference,
        max(abs(reference), size),
        scale,
        residual / norm if square else 0.0,
        relative_distance,
    )


def fingerprints(outputs: Tensor, real_BT: Tensor | None = None) -> list[Tensor]:
    """Returns a few numbers for each sample of a model's outputs, float64, on the host.

    The last dimension is reduced with fixed weights, so that different outputs have different numbers.

    Args:
        outputs: shape (B, ...).
        real_BT: mask of positions to keep; used if the second dimension of `outputs` is T.
    """
    reduced = outputs.detach().to("cpu", torch.float64)
    if reduced.ndim > 1:
        width = reduced.shape[-1]
        weights = torch.cos(1.0 + torch.arange(width, dtype=torch.float64)) / math.sqrt(width)
        reduced = reduced @ weights
    if real_BT is not None and reduced.shape == real_BT.shape:
        return [row[real] for row, real in zip(reduced, real_BT.cpu(), strict=True)]
    return [row.flatten() for row in reduced]


def are_same_outputs(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool | None:
    """Whether all samples have the expected fingerprints; None if they can't be compared."""
    lengths = [len(fingerprint) for fingerprint in actual]
    expected_lengths = [len(fingerprint) for fingerprint in expected]
    if not actual or lengths != expected_lengths:
        return None
    values = torch.cat([*actual])
    expected_values = torch.cat([*expected])
    difference = (values - expected_values).norm()
    return bool(difference <= OUTPUT_TOLERANCE * expected_values.norm())


def _dot(left: Tensor | None, right: Tensor | None) -> float:
    if left is None or right is None:
        return 0.0
    return float((left.double() * right.double()).sum())
