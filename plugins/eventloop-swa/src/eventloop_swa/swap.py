"""Temporarily replaces the weights of a model by those of a copy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def in_place(model: nn.Module, averaged: nn.Module) -> Iterator[None]:
    """Replaces a model's weights and buffers by those of a copy, and restores them at the end.

    Args:
        averaged: a copy of the model, with other values.
    """
    adopt_buffers(averaged, model)
    saved = [tensor.clone() for tensor in _tensors(model)]
    _copy(_tensors(averaged), _tensors(model))
    try:
        yield
    finally:
        _copy(saved, _tensors(model))


def adopt_buffers(target: nn.Module, model: nn.Module) -> None:
    """Adds, resizes or removes buffers of a model's copy to match the model."""
    copies = dict(target.named_modules())
    for path, module in model.named_modules():
        copy = copies.get(path)
        if copy is None:
            continue  # a module added during training: the copy doesn't have it
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
    return (tensor.detach() for tensor in chained)


@torch.no_grad()
def _copy(values: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    for value, target in zip(values, targets, strict=True):
        target.copy_(value)
