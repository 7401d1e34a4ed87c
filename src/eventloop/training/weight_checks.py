"""Weights that aren't finite, or differ between ranks: found every now and then, without a wait."""

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
    """The sum of each parameter that is trained, on its way to the host.

    A sum is finite only where all entries are, and differs where ranks have drifted apart.

    Attributes:
        batch: how many batches the run had had.
        names: of the parameters.
        copy: their sums, one each.
    """

    batch: int
    names: list[str]
    copy: HostCopy

    @classmethod
    def of(cls, params: Params, batch: int) -> WeightSums:
        """Starts to add up the weights as they are now."""
        return cls(batch, [name for name, _ in params], HostCopy([_sum(one) for _, one in params]))

    def numbers(self) -> dict[str, float]:
        """Returns the sums by name; waits for them where they aren't there."""
        return dict(zip(self.names, self.copy.numbers(), strict=True))


class WeightWatch:
    """Looks at the weights at each start of a fit, every hundred batches, and at its end.

    What a look starts on the device is read by the next one, so that no step waits for it.

    Args:
        processes: those that train together, whose weights are compared.
        stops: whether weights that aren't finite stop the run; otherwise it warns, once a fit.

    Attributes:
        bad_gradients: the batches whose gradients are known to be not finite, from 1.
    """

    def __init__(self, processes: Processes, *, stops: bool) -> None:
        self._processes = processes
        self._stops = stops
        self._has_warned = False
        self._sums: WeightSums | None = None
        self._params: Params = []
        self._good: int | None = None
        self.bad_gradients: set[int] = set()

    def start_fit(self, state: State) -> None:
        """Begins to look; what a fit that failed has left is dropped."""
        self._good = None
        self._has_warned = False
        self.bad_gradients.clear()
        self._params = trained(state.model)
        self._sums = WeightSums.of(self._params, state.clock.batch)

    def look(self, state: State) -> None:
        """Reads the look before, and starts another; collective: every rank must call it.

        Raises:
            NonFiniteError: the weights weren't finite.
            EventloopError: those of the ranks differed.
        """
        self._read(state)
        self._sums = WeightSums.of(self._params, state.clock.batch)

    def end_fit(self, state: State) -> None:
        """Looks at the weights as they are, and waits for it; raises as `look` does."""
        self._params = trained(state.model)  # some may have been thawed or replaced since
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
        self._good = sums.batch

    def _require_finite(self, state: State, batch: int, sums: dict[str, float]) -> None:
        bad = [name for name, one in sums.items() if not math.isfinite(one)]
        if bad and not math.isfinite(sum(sums.values())):
            # A sum overflows, too, where entries are finite and huge: the weights themselves tell.
            params = dict(self._params)
            bad = [name for name in bad if not is_finite(local(params[name]))]
        if not state.count_true(bool(bad)):
            return
        of_ranks = state.all_gather((bad[:1], min(self.bad_gradients, default=None)))
        rank, (name, *_), at = next(
            (rank, names, at) for rank, (names, at) in enumerate(of_ranks) if names
        )
        who = f"rank {state.layout.label(rank)}: " if state.world_size > 1 else ""
        what = f"the weights aren't finite {self._when(batch)}"
        if at is not None:
            what = f"the gradients aren't finite at batch {at}, nor are the weights since then"
        error = NonFiniteError(
            f"{who}{what}",
            parameters=f"{name!r} is the first that isn't finite",
            fix="lower the learning rate, set clip_norm=1.0, which also names the batch, or look for "
            "what has no derivative: sqrt at 0, a division, a hook on gradients",
        )
        if self._stops:
            raise error
        if state.rank == 0 and not self._has_warned:
            self._has_warned = True
            warnings.warn(text_of(error), stacklevel=2)

    def _when(self, batch: int) -> str:
        """Returns the range of batches in which something went wrong, as text."""
        if self._good is None:
            return f"at batch {batch}, where this fit began"
        first = min(self._good + 1, batch)
        return f"since batch {batch}" if first == batch else f"since a batch of {first} to {batch}"


def trained(model: nn.Module) -> Params:
    """Returns the parameters that are trained, but those without a shape as yet."""
    named = model.named_parameters()
    return [(name, one) for name, one in named if one.requires_grad and not is_lazy(one)]


def _sum(param: Tensor) -> Tensor:
    own = param.detach() if type(param) is nn.Parameter else local(param)
    if own.dtype in _WIDE:
        return own.sum()
    if own.is_complex():
        own = torch.view_as_real(own.resolve_conj())
    # Half precision would overflow; float32 is as fast as can be.
    return own.sum(dtype=torch.promote_types(own.dtype, torch.float32))


def trained_names(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parameters that are trained; buffers and frozen ones may hold inf."""
    return frozenset(name for name, one in model.named_parameters() if one.requires_grad)


def are_finite(weights: Mapping[str, Any], names: Collection[str]) -> bool | None:
    """Whether the trained parameters among some weights are finite.

    Args:
        weights: as `capture_model` returns them.
        names: of the trained parameters.

    Returns:
        None where no entry is a trained parameter, so that it isn't known.
    """
    if not any(_is_looked_at(name, one, names) for name, one in weights.items()):
        return None
    return first_not_finite(weights, names) is None


def first_not_finite(weights: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Returns the name of the first trained parameter with a NaN or an infinity; None without one.

    Waits for the device that they are on.
    """
    looked_at = ((name, one) for name, one in weights.items() if _is_looked_at(name, one, names))
    return next((name for name, one in looked_at if not is_finite(one)), None)


def is_finite(tensor: Tensor) -> bool:
    """Whether all entries of a floating tensor are finite; waits for its device."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # float8 has no arithmetic
    # A sum is the fastest look there is, and finite only where all entries are.
    if tensor.sum().isfinite():
        return True
    return all(bool(one.isfinite().all()) for one in torch.split(tensor.flatten(), _CHUNK))


def _is_looked_at(name: str, value: Any, names: Collection[str]) -> bool:
    if name not in names or not isinstance(value, Tensor):
        return False
    return value.is_floating_point() or value.is_complex()
