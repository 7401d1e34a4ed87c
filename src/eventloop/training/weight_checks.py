"""Detects weights that aren't finite or differ between ranks, every 100 batches, without waiting."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from eventloop.errors import NonFiniteError, text_of
from eventloop.training.logged_numbers import HostCopy
from eventloop.training.sharded_tensors import local

if TYPE_CHECKING:
    from eventloop.distributed.processes import Processes
    from eventloop.state import State

EVERY = 100  # batches
_WIDE = (torch.float32, torch.float64)
Params = list[tuple[str, nn.Parameter]]
_CHUNK = 2**20


@dataclass(frozen=True)
class WeightSums:
    """The sum of each trained parameter, while it is copied to the host.

    A sum is finite only if all entries are, and differs if the ranks have drifted apart.

    Attributes:
        batch: the number of batches that were trained before.
        names: the names of the parameters.
        copy: the sum of each parameter.
    """

    batch: int
    names: list[str]
    copy: HostCopy

    @classmethod
    def of(cls, params: Params, batch: int) -> WeightSums:
        """Starts to compute the sums of the current weights."""
        names = [name for name, _ in params]
        return cls(batch, names, HostCopy([_sum(param) for _, param in params]))

    def numbers(self) -> dict[str, float]:
        """Returns the sums by name; waits for the device if they haven't arrived."""
        return dict(zip(self.names, self.copy.numbers(), strict=True))


class WeightWatch:
    """Checks the weights at the start and the end of a fit, and every hundred batches.

    Sums that a check starts on the device are read by the next check, so that no step waits.

    Args:
        processes: the processes that train together; their weights are compared.
        stops: whether to raise if weights aren't finite; otherwise warns, once per fit.

    Attributes:
        bad_gradients: the numbers of batches whose gradients weren't finite; the first batch is 1.
    """

    def __init__(self, processes: Processes, *, stops: bool) -> None:
        self._processes = processes
        self._stops = stops
        self._has_warned = False
        self._sums: WeightSums | None = None
        self._params: Params = []
        self._last_good_batch: int | None = None
        self.bad_gradients: set[int] = set()

    def start_fit(self, state: State) -> None:
        """Starts the first check of a fit; discards the state of an earlier fit that raised."""
        self._last_good_batch = None
        self._has_warned = False
        self.bad_gradients.clear()
        self._params = trained(state.model)
        self._sums = WeightSums.of(self._params, state.clock.batch)

    def look(self, state: State) -> None:
        """Reads the sums of the previous check and starts the next check.

        Collective: every rank must call it.

        Raises:
            NonFiniteError: the weights weren't finite.
            EventloopError: the ranks' weights differed.
        """
        self._read(state)
        self._sums = WeightSums.of(self._params, state.clock.batch)

    def end_fit(self, state: State) -> None:
        """Checks the current weights and waits for the result; raises like `look`."""
        self._params = trained(state.model)  # parameters may have been unfrozen or replaced
        self.look(state)
        self._read(state)

    def _read(self, state: State) -> None:
        sums = self._sums
        self._sums = None
        if sums is None:
            return
        numbers = sums.numbers()
        self._require_finite(state, sums.batch, numbers)
        self._processes.compare_weights(state, numbers, self._when(sums.batch))
        self._last_good_batch = sums.batch

    def _require_finite(self, state: State, batch: int, sums: dict[str, float]) -> None:
        bad_names = [name for name, total in sums.items() if not math.isfinite(total)]
        if bad_names and not math.isfinite(sum(sums.values())):
            # A sum of huge finite entries overflows, too, so check the entries themselves.
            params = dict(self._params)
            bad_names = [name for name in bad_names if not is_finite(local(params[name]))]
        if not state.count_true(bool(bad_names)):
            return
        earliest_bad_gradients = min(self.bad_gradients, default=None)
        findings = state.all_gather((bad_names[:1], earliest_bad_gradients))
        rank = next(rank for rank, (names, _) in enumerate(findings) if names)
        names, batch_of_gradients = findings[rank]
        subject = f"rank {state.layout.label(rank)}: " if state.world_size > 1 else ""
        description = f"the weights aren't finite {self._when(batch)}"
        if batch_of_gradients is not None:
            description = (
                f"the gradients aren't finite at batch {batch_of_gradients}, nor are the weights "
                "since then"
            )
        error = NonFiniteError(
            f"{subject}{description}",
            parameters=f"{names[0]!r} is the first that isn't finite",
            fix="lower the learning rate, set clip_norm=1.0, which also names the batch, or look for "
            "an operation with an infinite gradient: sqrt at 0, a division, a hook on gradients",
        )
        if self._stops:
            raise error
        if state.rank == 0 and not self._has_warned:
            self._has_warned = True
            warnings.warn(text_of(error), stacklevel=2)

    def _when(self, batch: int) -> str:
        """Returns the range of batches in which something went wrong, as text."""
        if self._last_good_batch is None:
            return f"at batch {batch}, where this fit began"
        start = min(self._last_good_batch + 1, batch)
        if start == batch:
            return f"since batch {batch}"
        return f"since a batch of {start} to {batch}"


def trained(model: nn.Module) -> Params:
    """Returns the trainable parameters with their names, except uninitialized lazy parameters."""
    return [
        (name, param)
        for name, param in model.named_parameters()
        if param.requires_grad and not is_lazy(param)
    ]


def _sum(param: Tensor) -> Tensor:
    shard = param.detach() if type(param) is nn.Parameter else local(param)
    if shard.dtype in _WIDE:
        return shard.sum()
    if shard.is_complex():
        shard = torch.view_as_real(shard.resolve_conj())
    # A sum in half precision would overflow; a sum in float32 is as fast.
    return shard.sum(dtype=torch.promote_types(shard.dtype, torch.float32))


def trained_names(model: nn.Module) -> frozenset[str]:
    """Returns the names of the trainable parameters.

    Only these are checked, since buffers and frozen parameters may hold inf on purpose.
    """
    return frozenset(name for name, param in model.named_parameters() if param.requires_grad)


def are_finite(weights: Mapping[str, Any], names: Collection[str]) -> bool | None:
    """Returns whether the trained parameters among the weights are finite.

    Args:
        weights: by name, as `capture_model` returns them.
        names: the names of the trained parameters.

    Returns:
        None if no entry is a trained parameter.
    """
    if not any(_is_checked(name, value, names) for name, value in weights.items()):
        return None
    return first_not_finite(weights, names) is None


def first_not_finite(weights: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Returns the name of the first trained parameter with a NaN or an infinity, or None.

    Waits for the device of the weights.
    """
    for name, value in weights.items():
        if _is_checked(name, value, names) and not is_finite(value):
            return name
    return None


def is_finite(tensor: Tensor) -> bool:
    """Returns whether all entries of a floating-point tensor are finite; waits for its device."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # float8 has no arithmetic
    # A sum is the fastest check, and finite only if all entries are.
    if tensor.sum().isfinite():
        return True
    # The sum may have overflowed. Checking in chunks bounds the memory of the intermediate mask.
    return all(bool(chunk.isfinite().all()) for chunk in torch.split(tensor.flatten(), _CHUNK))


def _is_checked(name: str, value: Any, names: Collection[str]) -> bool:
    if name not in names or not isinstance(value, Tensor):
        return False
    return value.is_floating_point() or value.is_complex()
