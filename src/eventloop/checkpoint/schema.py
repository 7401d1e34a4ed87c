"""The schema of the core's state in a checkpoint, checked before anything is restored.

Digests don't say which program wrote a checkpoint. Its values are loaded into clocks, loops and
samplers, so each must be a value that a run could have written. Models, optimizers, schedulers,
metrics and plugins check their own states: see `loading`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from eventloop.clock import Time
from eventloop.errors import CheckpointError, EventloopError, a, text_of
from eventloop.safe_text import one_line

if TYPE_CHECKING:
    from eventloop.checkpoint.checkpoint_files import Checkpoint

_FIX = "use another checkpoint, or start a new run in another run_dir"
_MOST_CHARS = 300
_MOST_CHARS_OF_A_VALUE = 80
# What code raises of values that it wasn't made for; what it raises for lack of memory, and of a
# rank that is gone, isn't among them.
_OF_VALUES = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError)


class FormError(ValueError):
    """A value doesn't match the schema; the message begins with its path."""


P = ParamSpec("P")
# Checks a value, whose path it is given for the message; raises FormError.
Form = Callable[[Any, str], None]


def _form(check: Callable[Concatenate[Any, str, P], None]) -> Callable[P, Form]:
    """Turns a check of a value, its path and more into a function that returns a `Form`."""

    def form(*args: P.args, **options: P.kwargs) -> Form:
        return lambda value, path: check(value, path, *args, **options)

    return form


def anything(value: Any, path: str) -> None:
    """Accepts every value."""


@_form
def is_a(value: Any, path: str, /, *kinds: type, but: type | None = None) -> None:
    """An instance of given types, excluding one type."""
    if not isinstance(value, kinds) or (but is not None and isinstance(value, but)):
        raise _refused(value, path, a(kinds[0].__name__))


@_form
def between(value: Any, path: str, low: float, high: float, number: Form | None = None, /) -> None:
    """A number within inclusive bounds, by default an int; a NaN never matches."""
    (number or INT)(value, path)
    if not low <= value <= high:
        raise _refused(value, path, f"between {low:,} and {high:,}")


@_form
def meets(
    value: Any, path: str, condition: Callable[[Any], bool], form: Form, expected: str, /
) -> None:
    """Another form with an additional condition."""
    form(value, path)
    if not condition(value):
        raise _refused(value, path, expected)


@_form
def optional(value: Any, path: str, form: Form, without: object = None, /) -> None:
    """An optional value; a missing one is `without`."""
    if not (type(value) is type(without) and value == without):
        form(value, path)


@_form
def each(value: Any, path: str, form: Form, /, *, length: int | None = None) -> None:
    """A list or tuple whose entries have a form."""
    if not isinstance(value, list | tuple):
        raise _refused(value, path, "a list")
    if length is not None and len(value) != length:
        raise FormError(f"{path} has {len(value)} entries, not {length}")
    for idx, one in enumerate(value):
        form(one, f"{path}[{idx}]")


@_form
def by_name(value: Any, path: str, form: Form, /) -> None:
    """A dict with str keys whose values have a form."""
    _mapping(value, path)
    for key, one in value.items():
        STR(key, f"a key of {path}")
        form(one, f"{path}.{key}")


@_form
def keys(value: Any, path: str, may_have: Mapping[str, Form] | None = None, /, **has: Form) -> None:
    """A dict with required and optional keys; further keys are allowed."""
    _mapping(value, path)
    for key, form in has.items():
        if key not in value:
            raise FormError(f"{path} has no {key!r}")
        form(value[key], f"{path}.{key}")
    for key, form in (may_have or {}).items():
        if key in value:
            form(value[key], f"{path}.{key}")


def tensor_or_list(value: Any, path: str) -> None:
    """Checks a tensor or a list of them."""
    (each(TENSOR) if isinstance(value, list | tuple) else TENSOR)(value, path)


def _mapping(value: Any, path: str) -> None:
    if not isinstance(value, Mapping):
        raise _refused(value, path, "values by name")


def _refused(value: Any, path: str, expected: str) -> FormError:
    shown = one_line(repr(value), _MOST_CHARS_OF_A_VALUE)
    if isinstance(value, Tensor):
        shown = f"a tensor of shape {tuple(value.shape)}"
    elif isinstance(value, Mapping | list | tuple):
        shown = f"{a(type(value).__name__)} of {len(value):,}"
    return FormError(f"{path} is {shown}, not {expected}")


BOOL = is_a(bool)
STR = is_a(str)
TENSOR = is_a(Tensor)
INT = is_a(int, but=bool)
FLOAT = is_a(float, int, but=bool)
COUNT = between(0, 2**53)
SINCE = between(-1, 2**53)  # -1 stands for never
RANKS = between(1, 2**16)
SECONDS = between(0, 2**53, FLOAT)
SCALE = between(math.ulp(0.0), 2.0**126, FLOAT)
NAMED = by_name(anything)
PLUGINS = by_name(keys(version=STR, state=anything))


def moment(value: Any, path: str) -> None:
    """Checks epoch, batch, sample, token and seconds."""
    each(anything, length=5)(value, path)
    for idx, one in enumerate(value):
        (SECONDS if idx == 4 else COUNT)(one, f"{path}[{idx}]")


CLOCK = keys(now=moment, previous=moment, epoch_start=moment)
BEST = keys(
    metric=STR,
    value=meets(lambda one: not math.isnan(one), FLOAT, "a number"),
    batch=optional(COUNT),
)
SCALER = keys(
    scale=SCALE,
    growth_factor=SCALE,
    backoff_factor=SCALE,
    growth_interval=COUNT,
    _growth_tracker=COUNT,
)
PRECISION = keys(scaler=SCALER, num_skipped=COUNT)
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
    clock=CLOCK,
    precision=optional(PRECISION, {}),  # of fp16
    bookkeeping=keys(history=each(by_name(FLOAT))),
    loop=keys(is_finished=BOOL, evaluated_at=SINCE, saved_at=SINCE),
    feeds=keys(was_rebuilt=BOOL),
    saver=optional(BEST, {}),  # where a metric is followed
    schedulers=by_name(each(keys(optimizer=STR, state=NAMED))),
    results=keys(eval=by_name(by_name(TENSOR)), train=by_name(TENSOR)),
    microbatch_size=optional(between(1, 2**53)),
)

_OBJECTS = {"contents": NAMED, "values": NAMED, "gone": each(STR), "lost": by_name(STR)}
OBJECTS = keys(**_OBJECTS)
_STATEFUL = keys(kind=STR, state=NAMED)
SAMPLING = keys(
    {"shared": NAMED}, objects=by_name(keys(kind=STR, **_OBJECTS)), stateful=by_name(_STATEFUL)
)
_SEED = optional(between(-(2**62), 2**62))


def _position(value: Any, path: str) -> None:
    """Checks the position of a part, which can contain other parts."""
    POSITION(value, path)


# Which of these there are depends on the kind of source.
POSITION = keys(
    {
        "order": keys({"seed": _SEED, "shuffle": BOOL, "even": STR}, kind=STR, ranks=RANKS),
        "world_size": RANKS,
        "batch_size": optional(COUNT),
        "global_batch_size": optional(COUNT),
        "num_samples": optional(COUNT),
        "start": optional(SAMPLING),
        "check": optional(COUNT),
        "now": SAMPLING,
        "passes": keys(seeds_once=BOOL, has_begun=BOOL),
        "data": OBJECTS,
        "num_workers": COUNT,
        "is_exhausted": BOOL,
        "parts": by_name(_position),
        "pass": SINCE,
        "num_in_pass": optional(COUNT),
        "repeated": _position,
    }
)
_AHEAD = keys(peeked=each(anything), of_source=each(anything))
FEED = keys(
    num_padding=COUNT,
    ahead=optional(_AHEAD),
    kind=STR,
    used=BOOL,
    under_way=BOOL,
    epoch=COUNT,
    num_taken=COUNT,
    num_batches=optional(COUNT),
    world_size=RANKS,
    first=anything,
    position=POSITION,
)
_SCALAR = meets(lambda one: one.numel() == 1, TENSOR, "a tensor of one number")
_LOSS = keys(
    value=optional(_SCALAR),
    total=optional(_SCALAR),
    samples=COUNT,
    counts=each(COUNT),
    losses=optional(TENSOR),
)
RANK = keys(
    {"objects": OBJECTS},
    loss=_LOSS,
    feed=FEED,
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
    """Raises CheckpointError unless a checkpoint has valid values of all that a run needs."""
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
            f"the checkpoint {str(checkpoint.path)!r} can't be used: {error}", fix=_FIX
        ) from error


@contextmanager
def loading(path: str, by: str = "") -> Iterator[None]:
    """Turns an exception raised while loading values into a CheckpointError that names them.

    Args:
        path: where the values are in the checkpoint.
        by: the owner of the code, if not the core.
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
            f"{type(error).__name__}: {one_line(text_of(error), _MOST_CHARS)}",
            **facts,
            fix=_FIX,
        ) from error


def _require_part(parts: Mapping[str, Any], name: str, form: Form) -> None:
    if name not in parts:
        raise FormError(f"it has no part {name!r}")
    form(parts[name], name)


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
