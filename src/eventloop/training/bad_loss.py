"""A loss that isn't finite any more: found without a wait, and a run that stops there."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop.clock import Counts, moment_of
from eventloop.errors import NonFiniteError
from eventloop.hook_markers import hookimpl
from eventloop.training.logged_numbers import HostCopy
from eventloop.training.sharded_tensors import local
from eventloop.training.weight_checks import EVERY, WeightWatch

if TYPE_CHECKING:
    from eventloop.config.settings import Settings
    from eventloop.distributed.processes import Processes
    from eventloop.state import State
    from eventloop.training.precision import Precision
    from eventloop.training.running_means import EpochLoss

AT_A_TIME = 10
Losses = list[tuple[Counts, Tensor]]
Norms = list[tuple[int, Tensor]]
_Copied = tuple[Losses, Norms, HostCopy]


class BadBatch(NamedTuple):
    """Where numbers stopped being finite, as one rank has seen it; sorts by batch.

    Attributes:
        batch: the first that is to blame, as far as that is known.
        what: what isn't finite there.
        facts: what else is known.
    """

    batch: int
    what: str
    facts: dict[str, str]


def watches_of(
    settings: Settings, latest: EpochLoss, processes: Processes, precision: Precision
) -> tuple[object, ...]:
    """Returns the core's plugins that watch the losses and weights of a run."""
    weights = WeightWatch(processes, stops=settings.on_bad_loss == "raise")
    if settings.on_bad_loss == "ignore":
        return (QuietWatch(weights),)
    losses = LossWatch(latest, weights)
    # In fp16 gradients that overflow aren't fault: their steps are skipped.
    has_norms = settings.clip_norm is not None and precision.name != "fp16"
    return (losses, NormWatch(losses)) if has_norms else (losses,)


class LossWatch:
    """Stops a run whose loss or weights aren't finite: a core plugin of `on_bad_loss="raise"`.

    The losses are kept on the device, copied to the host ten at a time, and looked at when they have
    arrived. Where one rank finds a bad one, all stop together, and name the first batch of any rank.

    Args:
        latest: the loss to look at, batch after batch.
        weights: looks at the weights.
    """

    __slots__ = ("_bad", "_copies", "_latest", "_norms", "_pending", "_weights")

    def __init__(self, latest: EpochLoss, weights: WeightWatch) -> None:
        self._latest = latest
        self._weights = weights
        self._forget()

    @hookimpl
    def fit_start(self, state: State) -> None:
        self._forget()
        self._weights.start_fit(state)

    @hookimpl
    def batch_checkpoint(self, state: State) -> None:
        loss = self._latest.latest
        pending = self._pending
        now = state.clock._now
        if loss is not None:
            # One that stays, where an update of a plugin's left none, is looked at once more.
            pending.append((now, loss))
        if len(pending) == AT_A_TIME:
            self._start_copy()
        while self._copies and self._copies[0][2].is_ready():
            self._look(state)
        if state.stop_reason is not None and state.stop_reason.kind == "loss":  # all ranks know
            self._look_at_all(state)
        if not now[1] % EVERY:
            self._weights.look(state)

    @hookimpl(wrapper=True)
    def save_checkpoint(self, state: State) -> Generator[None, Any, Any]:
        self._look_at_all(state)
        return (yield)

    @hookimpl
    def fit_end(self, state: State) -> None:
        self._look_at_all(state)
        self._weights.end_fit(state)

    def keep_norm(self, batch: int, norm: Tensor) -> None:
        """Keeps the gradient norm of a batch, to tell whether this batch or the next is the bad one.

        Args:
            batch: its number, the first is 1.
            norm: shape (), on its device.
        """
        self._norms.append((batch, norm))

    def _forget(self) -> None:
        self._pending: Losses = []
        self._norms: Norms = []
        self._copies: deque[_Copied] = deque()
        self._bad: tuple[Counts, float] | None = None

    def _look_at_all(self, state: State) -> None:
        """Looks at what there is; raises NonFiniteError on all ranks where one rank's loss is bad."""
        self._start_copy()
        while self._copies:
            self._look(state)
        if not state.count_true(self._bad is not None):
            return
        mine = None if self._bad is None else self._bad_batch(state, *self._bad)
        found = [(one, rank) for rank, one in enumerate(state.all_gather(mine)) if one is not None]
        first, rank = min(found, key=lambda one: (one[0].batch, one[1]))
        alike = [state.layout.label(other) for one, other in found if one.batch == first.batch]
        facts = dict(first.facts)
        if len(alike) > 1:
            facts = {"ranks": f"{', '.join(alike)} alike", **facts}
        who = f"rank {state.layout.label(rank)}: " if state.world_size > 1 else ""
        raise NonFiniteError(f"{who}{first.what}", **facts)

    def _start_copy(self) -> None:
        if self._pending:
            copy = HostCopy([one for _, one in [*self._pending, *self._norms]])
            self._copies.append((self._pending, self._norms, copy))
            self._pending = []
            self._norms = []

    def _look(self, state: State) -> None:
        losses, norms, copy = self._copies.popleft()
        numbers = copy.numbers()
        if math.isfinite(sum(numbers)):
            return  # as always but once; to ask for each would be ten calls
        for (batch, _), norm in zip(norms, numbers[len(losses) :], strict=True):
            if not math.isfinite(norm):
                self._weights.bad_gradients.add(batch)
        first = next((idx for idx in range(len(losses)) if not math.isfinite(numbers[idx])), None)
        if first is not None and self._bad is None:
            self._bad = losses[first][0], numbers[first]
            state.request_stop("a loss isn't finite", "loss")

    def _bad_batch(self, state: State, counts: Counts, loss: float) -> BadBatch:
        """Says what is known of a bad loss; waits for the device."""
        at = moment_of(counts)
        params = list(state.model.named_parameters())
        not_finite = (name for name, one in params if not local(one).isfinite().all())
        before = at.batch - 1
        bad_param = next(not_finite, None)
        facts = {
            "found": f"at batch {state.clock.batch}; everything since then is of no use",
            "parameters": "all are finite: the loss or the data is to blame, or the step was skipped"
            if bad_param is None
            else f"{bad_param!r} is the first that isn't finite",
        }
        fix = "look at the inputs and targets of that batch, and at the loss; "
        if bad_param is not None and before:
            # A step that went too far leaves its traces in weights; none comes before batch 1.
            fix += "where these are finite, lower the learning rate or set clip_norm=1.0; "
        fix += "with "
        if state.precision.name == "fp16":
            facts["fp16"] = _range_of_fp16(params)
            fix = f"set precision to bf16 or fp32, where nothing overflows so soon; or {fix}"
        what = f"the loss is {loss} at epoch {at.epoch + 1}, batch {at.batch}"
        named = at.batch
        if before in self._weights.bad_gradients:
            what = f"the gradients aren't finite at batch {before}, nor is the loss after: {what}"
            named = before
        elif bad_param is not None and before and state.settings.clip_norm is None:
            facts["suspects"] = (
                f"batch {at.batch}, or the gradients of batch {before}, whose loss was finite; "
                "with clip_norm set it is known which"
            )
        return BadBatch(
            named, what, facts | {"fix": f'{fix}on_bad_loss="ignore" the run continues'}
        )


class NormWatch:
    """Keeps the norms that clipping computes for a `LossWatch`: a core plugin where it clips.

    Args:
        losses: where they are kept.
    """

    __slots__ = ("_losses",)

    def __init__(self, losses: LossWatch) -> None:
        self._losses = losses

    @hookimpl(wrapper=True)
    def clip_gradients(
        self, state: State, optimizers: Mapping[str, Optimizer]
    ) -> Generator[None, dict[str, Tensor], dict[str, Tensor]]:
        numbers = yield
        norm = numbers.get("grad_norm")
        if norm is not None:
            self._losses.keep_norm(state.clock._now[1] + 1, local(norm))
        return numbers


class QuietWatch:
    """Warns of weights that aren't finite: a core plugin of `on_bad_loss="ignore"`.

    Args:
        weights: looks at them.
    """

    __slots__ = ("_weights",)

    def __init__(self, weights: WeightWatch) -> None:
        self._weights = weights

    @hookimpl
    def fit_start(self, state: State) -> None:
        self._weights.start_fit(state)

    @hookimpl
    def batch_checkpoint(self, state: State) -> None:
        if not state.clock._now[1] % EVERY:
            self._weights.look(state)

    @hookimpl
    def fit_end(self, state: State) -> None:
        self._weights.end_fit(state)


def _range_of_fp16(params: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Says how far parameters are from what fp16 can hold; waits for the device."""
    own = ((local(param), name) for name, param in params)
    sizes = [(one.abs().max().item(), name) for one, name in own if one.numel()]
    size, name = max(sizes, default=(0.0, ""))
    most = torch.finfo(torch.float16).max
    if not size <= most:
        return f"it ends at {most:,.0f}, and {name!r} reaches {size:.3g}: the weights exploded"
    return (
        f"it ends at {most:,.0f}; the weights reach {size:.3g}, in {name!r}, so that it was an "
        "output or the loss that overflowed, unless the data did"
    )
