"""Which evaluation is the best so far."""

from __future__ import annotations

import math

import pytest
import torch

from eventloop.checkpoint.best import Best
from eventloop.training.metrics import NamedMetric


@pytest.mark.parametrize(
    ("is_higher", "values", "expected"),
    [
        (True, [0.5, 0.7, 0.6], 1),
        (False, [0.5, 0.7, 0.4], 2),
        (True, [0.5, 0.5, 0.5], 0),
        (True, [math.nan, 0.5, math.nan], 1),
    ],
    ids=["higher", "lower", "the first of equal ones", "never a NaN"],
)
def test_the_best_evaluation_is_kept(is_higher, values, expected):
    """Of equal ones the first: its checkpoint is there, and took less training."""
    best = Best(NamedMetric("test/metric", "test", "metric", is_higher))

    for batch, value in enumerate(values):
        best.improves({"test": {"metric": torch.tensor(value)}}, batch)

    assert best.batch == expected
