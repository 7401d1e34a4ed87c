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
    adopt_buffers(other, model)
    saved = [one.clone() for one in _tensors(model)]
    _copy(_tensors(other), _tensors(model))
    try:
        yield
    finally:
        _copy(saved, _tensors(model))


def adopt_buffers(other: nn.Module, model: nn.Module) -> None:
    """Follows, in a copy of a model, the buffers that have grown, come or gone in the model."""
    copies = dict(other.named_modules())
    for path, module in model.named_modules():
        copy = copies.get(path)
        if copy is None:
            continue  # a module that was added in training; only its values would fit
        buffers = dict(module.named_buffers(recurse=False))
        copied = dict(copy.named_buffers(recurse=False))
        for name in copied.keys() - buffers.keys():
            setattr(copy, name, None)
        for name, buffer in buffers.items():
            if name in copied and copied[name].shape == buffer.shape:
                continue
            if hasattr(copy, name):
                setattr(copy, name, buffer.detach().clone())
            else:
                copy.register_buffer(name, buffer.detach().clone())


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    chained = itertools.chain(model.parameters(), model.buffers())
    return (one.detach() for one in chained)


@torch.no_grad()
def _copy(values: Iterable[Tensor], into: Iterable[Tensor]) -> None:
    for value, target in zip(values, into, strict=True):
        target.copy_(value)
