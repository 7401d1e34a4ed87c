"""A loss that isn't a number any more: found without a wait, and a run that stops there."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eventloop.clock import Counts, moment_of
from eventloop.core.host_copy import HostCopy
from eventloop.errors import NonFiniteError, counted
from eventloop.hooks import hookimpl

if TYPE_CHECKING:
    from eventloop.core.bookkeeping import LatestLoss
    from eventloop.state import State

AT_A_TIME = 10


class LossWatch:
    """Stops a run whose loss is NaN or infinite: a core plugin of `on_bad_loss="raise"`.

    The losses are kept on the device, copied to the host ten at a time, and looked at when they have
    arrived.

    Args:
        latest: the loss to look at, batch after batch.
    """

    __slots__ = ("_copies", "_kept", "_latest")

    def __init__(self, latest: LatestLoss) -> None:
        self._latest = latest
        self._kept: list[tuple[Counts, Tensor]] = []
        self._copies: deque[tuple[Sequence[Counts], HostCopy]] = deque()

    @hookimpl
    def batch_checkpoint(self, state: State) -> None:
        loss, kept = self._latest.value, self._kept
        if loss is not None:
            # One that stays, where an update of a plugin's left none, is looked at once more.
            kept.append((state.clock._now, loss))
        if len(kept) == AT_A_TIME:
            self._start_copy()
        while self._copies and self._copies[0][1].is_ready():
            self._look(state)

    @hookimpl(wrapper=True)
    def save_checkpoint(self, state: State) -> Generator[None, Any, Any]:
        self._look_at_all(state)
        return (yield)

    @hookimpl
    def fit_end(self, state: State) -> None:
        self._look_at_all(state)

    def _look_at_all(self, state: State) -> None:
        """Looks at what there is; where one rank's loss is bad, all ranks raise."""
        error: NonFiniteError | None = None
        self._start_copy()
        while self._copies and error is None:
            try:
                self._look(state)
            except NonFiniteError as found:
                error = found
        num_bad = state.num_yes(error is not None)
        if error is not None:
            raise error
        if num_bad:
            raise NonFiniteError(
                f"the loss of {counted(num_bad, 'other rank')} isn't finite, by batch "
                f"{state.clock.batch}",
                fix="see what that rank reports",
            )

    def _start_copy(self) -> None:
        if self._kept:
            places, losses = zip(*self._kept, strict=True)
            self._copies.append((places, HostCopy(losses)))
            self._kept = []

    def _look(self, state: State) -> None:
        places, copy = self._copies.popleft()
        losses = copy.numbers()
        if math.isfinite(sum(losses)):
            return  # as always but once; to ask for each would be ten calls
        for at, loss in zip(places, losses, strict=True):
            if not math.isfinite(loss):
                raise _bad_loss(loss, at, state)


def _bad_loss(loss: float, counts: Counts, state: State) -> NonFiniteError:
    at = moment_of(counts)
    facts = {"parameters": _state_of(state.model.named_parameters())}
    fix = "lower the learning rate, set clip_norm=1.0, or look at that batch; with "
    if state.precision.name == "fp16":
        facts["fp16"] = _range_of_fp16(state.model.named_parameters())
        fix = f"set precision to bf16 or fp32, where nothing overflows so soon; or {fix}"
    return NonFiniteError(
        f"the loss is {loss} at epoch {at.epoch}, batch {at.batch}",
        found=f"at batch {state.clock.batch}; everything since then is of no use",
        fix=f'{fix}on_bad_loss="ignore" the run goes on',
        **facts,
    )


def _state_of(params: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Says which parameter is the first that isn't finite now; waits for the device."""
    for name, param in params:
        if not _own(param).isfinite().all():
            return f"{name!r} is the first that isn't finite"
    return "all are finite: the loss or the data is to blame, or the step was skipped"


def _range_of_fp16(params: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Says how far parameters are from what fp16 can hold; waits for the device."""
    own = ((_own(param), name) for name, param in params)
    sizes = [(one.abs().max().item(), name) for one, name in own if one.numel()]
    size, name = max(sizes, default=(0.0, ""))
    most = torch.finfo(torch.float16).max
    if not size <= most:
        return f"it ends at {most:,.0f}, and {name!r} reaches {size:.3g}: the weights exploded"
    return (
        f"it ends at {most:,.0f}; the weights reach {size:.3g}, in {name!r}, so that it was an "
        "output or the loss that overflowed, unless the data did"
    )


def _own(param: nn.Parameter) -> Tensor:
    """Gives a parameter; of a sharded one this rank's share: the others may not be looking."""
    from torch.distributed.tensor import DTensor  # of use here alone, and slow to import

    own: Tensor = param.to_local() if isinstance(param, DTensor) else param
    return own.detach()
