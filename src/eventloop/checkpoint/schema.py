"""The schema of the core's state in a checkpoint, checked before anything is restored.

Digests don't prove that eventloop wrote a checkpoint. Its values are loaded into clocks, loops and
samplers, so each must be a value that a run could have written. Models, optimizers, schedulers,
metrics and plugins check their own states; see `checkpoint.loading`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from eventloop.checkpoint.best import BestState
from eventloop.checkpoint.loading import FIX
from eventloop.clock import ClockState, Time
from eventloop.data.feed import FeedsState, FeedState
from eventloop.data.positions import OBJECTS
from eventloop.errors import CheckpointError
from eventloop.forms import (
    BOOL,
    COUNT,
    NAMED,
    RANKS,
    SECONDS,
    STR,
    Form,
    FormError,
    anything,
    between,
    by_name,
    each,
    form_of,
    is_a,
    keys,
    optional,
)
from eventloop.training.bookkeeping import BookkeepingState
from eventloop.training.grad_scaling import ScaledState
from eventloop.training.resume_point import LoopState
from eventloop.training.running_means import EpochLossState

if TYPE_CHECKING:
    from eventloop.checkpoint.checkpoint_files import Checkpoint


TENSOR = is_a(Tensor)
PLUGINS = by_name(keys(version=STR, state=anything))


def tensor_or_list(value: Any, path: str) -> None:
    """Checks that a value is a tensor or a list of tensors."""
    (each(TENSOR) if isinstance(value, list | tuple) else TENSOR)(value, path)


_NAMES = each(STR)
STRUCTURE = keys(
    {
        "buffers": _NAMES,
        "gone": _NAMES,
        "trained": by_name(BOOL),
        "flipped": _NAMES,
        "groups": by_name(each(each(STR))),
    }
)
_PATH = each(is_a(str, int, but=bool))
LAYOUTS = by_name(
    keys(
        strides=each(each(anything, length=2)),
        shared=each(each(_PATH, length=2)),
    )
)
TRAINING = keys(
    {"structure": STRUCTURE, "optimizer_layouts": LAYOUTS},
    clock=form_of(ClockState),
    precision=optional(form_of(ScaledState), {}),  # {} except with fp16
    bookkeeping=form_of(BookkeepingState),
    loop=form_of(LoopState),
    feeds=form_of(FeedsState),
    saver=optional(form_of(BestState), {}),  # {} without `checkpoint_best`
    schedulers=by_name(each(keys(optimizer=STR, state=NAMED))),
    results=keys(eval=by_name(by_name(TENSOR)), train=by_name(TENSOR)),
    microbatch_size=optional(between(1, 2**53)),
)

RANK = keys(
    {"objects": OBJECTS},
    loss=form_of(EpochLossState),
    feed=form_of(FeedState),
    generators=keys({"device": TENSOR}, host=NAMED, named=by_name(TENSOR)),
    metrics=by_name(keys(num_updates=COUNT, values=by_name(tensor_or_list))),
    plugins=PLUGINS,
)

_PLUGIN_FACT = keys(
    name=STR, role=STR, distribution=optional(STR), version=STR, source=STR, options=NAMED
)
_COMPANIONS = {"companions": by_name(STR)}
FACTS = keys(
    {
        "status": optional(STR),
        "stopped_by": optional(STR),
        "left_out": STR,
        "epoch_length": optional(COUNT),
    },
    moment=keys(epoch=COUNT, batch=COUNT, sample=COUNT, token=COUNT, seconds=SECONDS),
    world_size=RANKS,
    duration=optional(STR),
    stop_reason=optional(STR),
    manifest=keys(
        {"absent": each(_PLUGIN_FACT), "tested": keys(checkpoint=optional(STR)), **_COMPANIONS},
        plugins=each(_PLUGIN_FACT),
        off=each(keys({"kind": STR}, name=STR, reason=STR)),
        settings=NAMED,
        task=NAMED,
        optimizers=NAMED,
    ),
)
_PARTS = {"model": NAMED, "optimizers": by_name(NAMED), "training": TRAINING, "plugins": PLUGINS}


def require_valid(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError unless a checkpoint has a valid value for everything a run needs."""
    try:
        FACTS(checkpoint.facts, "facts")
        if (duration := checkpoint.facts["duration"]) is not None:
            try:
                Time(duration)
            except ValueError as error:
                raise FormError(f"facts.duration: {error}") from error
        for name, form in _PARTS.items():
            _require_part(checkpoint.parts, name, form)
        _require_part(checkpoint.parts, "rank0", RANK)
        for rank in range(1, checkpoint.facts["world_size"]):
            if f"rank{rank}" in checkpoint.parts or f"rank{rank}" not in checkpoint.names:
                _require_part(checkpoint.parts, f"rank{rank}", RANK)
        _require_consistent(checkpoint)
    except FormError as error:
        raise CheckpointError(
            f"the checkpoint {str(checkpoint.path)!r} can't be used: {error}", fix=FIX
        ) from error


def _require_part(parts: Mapping[str, Any], name: str, form: Form) -> None:
    if name not in parts:
        raise FormError(f"it has no part {name!r}")
    form(parts[name], name)


def _require_consistent(checkpoint: Checkpoint) -> None:
    clock = checkpoint.parts["training"]["clock"]
    counts_now = clock["now"]
    if counts_now[1] != checkpoint.batch:
        raise FormError(
            f"training.clock.now[1] is {counts_now[1]}, but its manifest belongs to batch {checkpoint.batch}"
        )
    for name in ("previous", "epoch_start"):
        if any(count > current for count, current in zip(clock[name], counts_now, strict=True)):
            raise FormError(f"training.clock.{name} is {clock[name]}, after now, {counts_now}")
