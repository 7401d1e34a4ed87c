"""Batches of each shape that a collate function may return."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

X, Y = torch.arange(10.0).reshape(5, 2), torch.arange(5)


class Pair(NamedTuple):
    """A batch with names."""

    inputs: object
    targets: object


NESTS = {
    "tuple": (X, Y),
    "list": [X, Y],
    "named": Pair(X, Y),
    "mapping": {"input_ids": X, "labels": Y},
    "nested": (X, {"boxes": [Y, Y], "meta": "text"}),
    "tensor": X,
}


@pytest.fixture(params=NESTS.values(), ids=NESTS)
def nest(request: pytest.FixtureRequest) -> Any:
    """Batches of five samples: tensors in tuples, lists, mappings and each other, or one alone."""
    return request.param
