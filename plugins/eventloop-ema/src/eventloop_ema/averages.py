"""Averages of a model's weights, which can take the weights' place for a while."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from eventloop.toolbox import local, shard_of, sharded, slice_of
from eventloop_ema.maths import move


def averaged_names(model: nn.Module, stepped: Iterable[nn.Parameter] = ()) -> list[str]:
    """Names what there is to average: parameters, and buffers that are saved with the model.

    Of these, what is floating-point or complex. A buffer with infinities, a mask of attention, is
    a constant of which no mean can be formed. Integers, the batches that a batch norm has seen, and
    buffers that aren't saved are as training left them. What is tied has one name. Reads buffers.

    Args:
        stepped: the parameters that optimizers have; frozen ones that they don't have stay as they
            are, and are left out.
    """
    saved = model.state_dict().keys()
    held = {id(one) for one in stepped}
    params = [
        name
        for name, one in model.named_parameters()
        if _has_mean(one) and (one.requires_grad or id(one) in held)
    ]
    buffers = [
        name
        for name, one in model.named_buffers()
        if name in saved and _has_mean(one) and bool(one.isfinite().all())
    ]
    return params + buffers


class Averages:
    """Exponential moving averages of a model's weights; at first, the weights themselves.

    Those of fewer than 32 bits are averaged in float32: what a step adds would be rounded away.
    With FSDP each rank averages its shards.

    Args:
        model: whose weights are averaged; parameters are changed in place by who trains it, and
            buffers may be replaced.
        names: what of it, as `averaged_names` gives them.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        params = dict(model.named_parameters())
        names = list(names)
        self._params = {name: params[name] for name in names if name in params}
        self._buffers = {name: _place(model, name) for name in names if name not in params}
        self._is_sharded = any(sharded(one) is not None for one in self._params.values())
        current = self._current()
        self._averages = [_wide(local(one)) for one in current]
        self._seen_buffers = current[len(self._params) :]

    def update(self, share: float | Tensor) -> None:
        """Moves the averages towards the weights: see `move`."""
        self._follow_shapes()
        move(self._averages, self._values(), share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the averages in the weights' place, and the weights back, bit by bit."""
        self._follow_shapes()
        saved = [one.detach().clone() for one in self._values()]
        _copy(self._averages, self._values())
        try:
            yield
        finally:
            _copy(saved, self._values())

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages by name; where they are shards, this rank's slices."""
        triples = zip(self._names(), self._averages, self._current(), strict=True)
        return {name: slice_of(like, average) for name, average, like in triples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, for the same parameters.

        A buffer that came into being in training wasn't averaged, and isn't from now on.
        """
        names = [name for name in self._names() if name in state or name in self._params]
        averages = dict(zip(self._names(), self._averages, strict=True))
        self._averages = [averages[name] for name in names]
        self._buffers = {name: self._buffers[name] for name in names if name in self._buffers}
        self._seen_buffers = self._current()[len(self._params) :]
        self._follow_shapes(force=True)
        shards = [
            shard_of(state[name], like)
            for name, like in zip(self._names(), self._current(), strict=True)
        ]
        _copy(shards, self._averages)

    def _follow_shapes(self, *, force: bool = False) -> None:
        """Begins the average of a buffer anew where the model has replaced it by one of another shape.

        Args:
            force: also where no buffer was replaced since the last look.
        """
        start = len(self._params)
        buffers = self._current()[start:]
        if not force and not any(map(operator.is_not, buffers, self._seen_buffers)):
            return
        self._seen_buffers = buffers
        for idx, buffer in enumerate(buffers, start):
            if self._averages[idx].shape != buffer.shape:
                self._averages[idx] = _wide(buffer.detach())

    def _names(self) -> list[str]:
        return [*self._params, *self._buffers]

    def _current(self) -> list[Tensor]:
        # Where a buffer was found, not what: code like `self.mean = self.mean * 0.9 + ...`
        # replaces it.
        buffers = (getattr(module, name) for module, name in self._buffers.values())
        return [*self._params.values(), *buffers]

    def _values(self) -> list[Tensor]:
        current = self._current()
        return [local(one) for one in current] if self._is_sharded else current


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def _wide(tensor: Tensor) -> Tensor:
    is_narrow = tensor.is_floating_point() and tensor.element_size() < 4
    return tensor.to(torch.float32) if is_narrow else tensor.clone()


@torch.no_grad()
def _copy(values: list[Tensor], into: list[Tensor]) -> None:
    for value, target in zip(values, into, strict=True):
        target.copy_(value)
