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
    """Returns the names of everything to average: parameters, and buffers saved with the model.

    Only floating-point and complex tensors are averaged. A buffer with infinities, such as an attention
    mask, is a constant without a mean. Integer buffers, such as a batch norm's batch count, and unsaved
    buffers keep their trained values. Tied parameters have a single name. Reads buffers on the host.

    Args:
        stepped: the parameters that optimizers have; frozen parameters are left out unless they are
            among them.
    """
    saved = model.state_dict().keys()
    stepped_ids = {id(param) for param in stepped}
    params = [
        name
        for name, param in model.named_parameters()
        if _has_mean(param) and (param.requires_grad or id(param) in stepped_ids)
    ]
    buffers = [
        name
        for name, buffer in model.named_buffers()
        if name in saved and _has_mean(buffer) and bool(buffer.isfinite().all())
    ]
    return params + buffers


class Averages:
    """Exponential moving averages of a model's weights, which start as copies of the weights.

    Weights narrower than 32 bits are averaged in float32: the small change of a step would be rounded
    away. With FSDP each rank averages its shards.

    Args:
        model: the model; training changes its parameters in place, and may replace its buffers.
        names: names of the parameters and buffers to average, from `averaged_names`.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        params = dict(model.named_parameters())
        names = list(names)
        self._params = {name: params[name] for name in names if name in params}
        self._buffers = {name: _owner_of(model, name) for name in names if name not in params}
        self._is_sharded = any(sharded(param) is not None for param in self._params.values())
        current = self._current()
        self._averages = [_wide(local(tensor)) for tensor in current]
        self._seen_buffers = current[len(self._params) :]

    def update(self, share: float | Tensor) -> None:
        """Moves the averages towards the weights: see `move`."""
        self._follow_shapes()
        move(self._averages, self._values(), share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the averages in the weights' place, and the weights back, bit by bit."""
        self._follow_shapes()
        saved = [tensor.detach().clone() for tensor in self._values()]
        _copy(self._averages, self._values())
        try:
            yield
        finally:
            _copy(saved, self._values())

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages by name; of shards, this rank's slices."""
        triples = zip(self._names(), self._averages, self._current(), strict=True)
        return {name: slice_of(current, average) for name, average, current in triples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores averages from `state_dict`, for the same parameters.

        A buffer that was created during training has no average, and gets none after resuming.
        """
        names = [name for name in self._names() if name in state or name in self._params]
        averages = dict(zip(self._names(), self._averages, strict=True))
        self._averages = [averages[name] for name in names]
        self._buffers = {name: self._buffers[name] for name in names if name in self._buffers}
        self._seen_buffers = self._current()[len(self._params) :]
        self._follow_shapes(force=True)
        shards = [
            shard_of(state[name], current)
            for name, current in zip(self._names(), self._current(), strict=True)
        ]
        _copy(shards, self._averages)

    def _follow_shapes(self, *, force: bool = False) -> None:
        """Restarts the average of a buffer that the model has replaced by a buffer of another shape.

        Args:
            force: check all shapes, even if no buffer was replaced since the last check.
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
        # Buffers are looked up by owner and name: code like `self.mean = self.mean * 0.9 + ...`
        # replaces the tensor.
        buffers = (getattr(module, name) for module, name in self._buffers.values())
        return [*self._params.values(), *buffers]

    def _values(self) -> list[Tensor]:
        current = self._current()
        return [local(tensor) for tensor in current] if self._is_sharded else current


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def _wide(tensor: Tensor) -> Tensor:
    is_narrow = tensor.is_floating_point() and tensor.element_size() < 4
    return tensor.to(torch.float32) if is_narrow else tensor.clone()


@torch.no_grad()
def _copy(values: list[Tensor], targets: list[Tensor]) -> None:
    for value, target in zip(values, targets, strict=True):
        target.copy_(value)
