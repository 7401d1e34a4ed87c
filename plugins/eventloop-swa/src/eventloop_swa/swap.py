"""Weights of one model in the place of another's, for a while."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def in_place(model: nn.Module, other: nn.Module) -> Iterator[None]:
    """Puts the weights and buffers of another model in the place of a model's, and puts them back.

    Args:
        other: a copy of the model, with other numbers.
    """
    saved = [one.clone() for one in _tensors(model)]
    _copy(_tensors(other), _tensors(model))
    try:
        yield
    finally:
        _copy(saved, _tensors(model))


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    chained = itertools.chain(model.parameters(), model.buffers())
    return (one.detach() for one in chained)


@torch.no_grad()
def _copy(values: Iterable[Tensor], into: Iterable[Tensor]) -> None:
    for value, target in zip(values, into, strict=True):
        target.copy_(value)
