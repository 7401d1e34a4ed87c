"""What the core keeps in a checkpoint, part by part: checked before any of it is put in place.

A checkpoint that verifies is the one that was written, but by any program. Its values go into
clocks, loops and samplers, so each must be one that a run could have written. What a model, an
optimizer, a scheduler, a metric or a plugin keeps, they know best: see `loading`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypedDict

import torch
from torch import Tensor

from eventloop.checkpoint.type_check import Each, FormError, Within, require_form
from eventloop.clock import Time
from eventloop.errors import CheckpointError, EventloopError
from eventloop.text import one_line

if TYPE_CHECKING:
    from eventloop.checkpoint.format import Checkpoint

_FIX = "take another checkpoint, or start anew in another run_dir"
_MOST_CHARS = 300
# What code raises of values that it wasn't made for; what it raises for lack of memory, and of a
# rank that is gone, isn't among them.
_OF_VALUES = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError)

Count = Annotated[int, Within(0, 2**53)]
Ranks = Annotated[int, Within(1, 2**16)]
Seconds = Annotated[float, Within(0, 2**53)]
Scale = Annotated[float, Within(math.ulp(0.0), 2.0**126)]
Moment = tuple[Count, Count, Count, Count, Seconds]
Scalar = Annotated[Tensor, Each("a tensor of one number", lambda one: one.numel() == 1)]
Empty = Annotated[dict[str, Any], Each("empty", lambda one: not one)]


class ClockState(TypedDict):
    """See `Clock`."""

    now: Moment
    previous: Moment
    epoch_start: Moment


class LoopState(TypedDict):
    """See `Loop`; -1 stands for never."""

    is_finished: bool
    evaluated_at: Annotated[int, Within(-1, 2**53)]
    saved_at: Annotated[int, Within(-1, 2**53)]


class BestState(TypedDict):
    """See `Best`."""

    metric: str
    value: Annotated[float, Each("a number", lambda one: not math.isnan(one))]
    batch: Count | None


class ScalerState(TypedDict):
    """See torch's `GradScaler`."""

    scale: Scale
    growth_factor: Scale
    backoff_factor: Scale
    growth_interval: Count
    _growth_tracker: Count


class PrecisionState(TypedDict):
    """See `Scaled`."""

    scaler: ScalerState
    num_skipped: Count


class History(TypedDict):
    """See `Bookkeeping`."""

    history: list[dict[str, float]]


class FeedsState(TypedDict):
    """See `Feeds`."""

    was_rebuilt: bool


class SchedulerState(TypedDict):
    """A scheduler of the optimizer of that name."""

    optimizer: str
    state: dict[str, Any]


class Results(TypedDict):
    """The latest results of metrics, each a tensor."""

    eval: dict[str, dict[str, Tensor]]
    train: dict[str, Tensor]


class Training(TypedDict):
    """The part `training`: where the run is."""

    clock: ClockState
    precision: PrecisionState | Empty  # but in fp16
    bookkeeping: History
    loop: LoopState
    feeds: FeedsState
    saver: BestState | Empty  # where nothing is followed
    schedulers: dict[str, list[SchedulerState]]
    results: Results
    microbatch_size: Annotated[int, Within(1, 2**53)] | None


class PluginState(TypedDict):
    """What a plugin keeps."""

    version: str
    state: Any


Plugins = dict[str, PluginState]


class LossState(TypedDict):
    """See `LatestLoss`."""

    value: Scalar | None


class SamplerState(TypedDict):
    """See `_Watched` of `data.order`: `state` where the sampler knows best."""

    kind: str
    state: NotRequired[dict[str, Any]]
    generators: NotRequired[dict[str, Any]]
    attributes: NotRequired[dict[str, Any]]


class Standing(TypedDict, total=False):
    """Where the generators and samplers of a data loader stand."""

    samplers: list[SamplerState]
    shared: dict[str, Any]
    loader: Tensor


class SharedOrder(TypedDict):
    """How ranks come to one order; see `shared_order`."""

    kind: str
    ranks: Ranks
    seed: NotRequired[Annotated[int, Within(-(2**62), 2**62)] | None]
    shuffle: NotRequired[bool]
    even: NotRequired[str]


class TurnsState(TypedDict):
    """See `Turns`."""

    seeds_once: bool
    has_begun: bool


class Position(TypedDict, total=False):
    """Where a source of batches is; which keys there are depends on its kind."""

    order: SharedOrder
    world_size: Ranks
    global_batch_size: Count | None
    num_samples: Count | None
    start: Standing | None
    check: Count | None
    now: Standing
    turns: TurnsState
    num_workers: Count
    is_exhausted: bool


class FeedState(TypedDict):
    """See `Feed`."""

    kind: str
    used: bool
    under_way: bool
    epoch: Count
    num_taken: Count
    num_batches: Count | None
    world_size: Ranks
    first: Any
    position: Position


class Generators(TypedDict):
    """Where a rank's random generators stand."""

    host: dict[str, Any]
    named: dict[str, Tensor]
    device: NotRequired[Tensor]


class MetricCounts(TypedDict):
    """What a metric has counted."""

    num_updates: Count
    values: dict[str, Tensor | list[Tensor]]


class Rank(TypedDict):
    """The part `rank0`, and so on: what a rank alone knows."""

    loss: LossState
    feed: FeedState
    generators: Generators
    metrics: dict[str, MetricCounts]
    plugins: Plugins


class MomentFact(TypedDict):
    """Where the run was."""

    epoch: Count
    batch: Count
    sample: Count
    token: Count
    seconds: Seconds


class PluginFact(TypedDict):
    """A plugin that took part."""

    name: str
    role: str
    distribution: str | None
    version: str
    source: str
    options: dict[str, Any]


class OffFact(TypedDict):
    """A plugin that was off."""

    name: str
    reason: str
    kind: NotRequired[str]


class ManifestFact(TypedDict):
    """What the run was made of; see `manifest_of`."""

    plugins: list[PluginFact]
    off: list[OffFact]
    settings: dict[str, Any]
    task: dict[str, Any]
    optimizers: dict[str, Any]
    absent: NotRequired[list[PluginFact]]


class Facts(TypedDict):
    """See `facts_of`."""

    moment: MomentFact
    duration: str | None
    stop_reason: str | None
    manifest: ManifestFact


_FORMS = {
    "model": dict[str, Any],
    "optimizers": dict[str, dict[str, Any]],
    "training": Training,
    "plugins": Plugins,
}


def require_usable(checkpoint: Checkpoint) -> None:
    """Checks that a checkpoint holds what a run needs to go on, values that a run could have had.

    Raises:
        CheckpointError: a part or a value is missing, of another type, or out of range.
    """
    try:
        require_form(checkpoint.facts, Facts, "facts")
        if (duration := checkpoint.facts["duration"]) is not None:
            with _about("facts.duration"):
                Time(duration)
        for name, form in _FORMS.items():
            _require_part(checkpoint.parts, name, form)
        _require_part(checkpoint.parts, "rank0", Rank)
        for rank in range(1, checkpoint.parts["rank0"]["feed"]["world_size"]):
            _require_part(checkpoint.parts, f"rank{rank}", Rank)
        _require_consistent(checkpoint)
    except FormError as error:
        raise CheckpointError(
            f"the checkpoint {str(checkpoint.path)!r} can't be used: {error}", fix=_FIX
        ) from error


@contextmanager
def loading(path: str, by: str = "") -> Iterator[None]:
    """Has what code raises of the values that it is given be an error that names them.

    Args:
        path: of the values in the checkpoint.
        by: whose code it is, if not the core's.

    Raises:
        CheckpointError: the code raised something of that kind; its own errors stay as they are.
    """
    import torch.distributed as dist

    try:
        yield
    except (EventloopError, torch.OutOfMemoryError):
        raise
    except _OF_VALUES as error:
        if dist.is_available() and isinstance(error, dist.DistError):
            raise
        facts: dict[str, Any] = {"by": by} if by else {}
        raise CheckpointError(
            f"{path!r} of the checkpoint can't be loaded: "
            f"{type(error).__name__}: {one_line(str(error), _MOST_CHARS)}",
            **facts,
            fix=_FIX,
        ) from error


def _require_part(parts: Mapping[str, Any], name: str, form: Any) -> None:
    if name not in parts:
        raise FormError(f"it has no part {name!r}")
    require_form(parts[name], form, name)


def _require_consistent(checkpoint: Checkpoint) -> None:
    clock = checkpoint.parts["training"]["clock"]
    now = clock["now"]
    if now[1] != checkpoint.batch:
        raise FormError(
            f"training.clock.now[1] is {now[1]}, but its manifest is that of batch {checkpoint.batch}"
        )
    for name in ("previous", "epoch_start"):
        if any(one > other for one, other in zip(clock[name], now, strict=True)):
            raise FormError(f"training.clock.{name} is {clock[name]}, after now, {now}")
    for name, one in checkpoint.parts.items():
        if name.startswith("rank") and one["feed"]["num_taken"] > now[1]:
            raise FormError(
                f"{name}.feed.num_taken is {one['feed']['num_taken']}, in a run of {now[1]} batches"
            )


@contextmanager
def _about(path: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise FormError(f"{path}: {error}") from error
