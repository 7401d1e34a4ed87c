"""Positions in training data as checkpoints have them: a dataclass for each kind of source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from eventloop.forms import (
    BOOL,
    NAMED,
    RANKS,
    STR,
    BatchOrNever,
    FormError,
    NonNegativeInt,
    NumRanks,
    between,
    by_name,
    each,
    form_of,
    keys,
    optional,
)

_SEED = optional(between(-(2**62), 2**62))
_OBJECTS = {"contents": NAMED, "values": NAMED, "gone": each(STR), "lost": by_name(STR)}
# What `TrackedObjects.state_dict` returns.
OBJECTS = keys(**_OBJECTS)
# What `SamplingState.state_dict` returns.
SAMPLING = keys(
    {"shared": NAMED},
    objects=by_name(keys(kind=STR, **_OBJECTS)),
    stateful=by_name(keys(kind=STR, state=NAMED)),
)
# The order of samples, which several ranks share.
_ORDER = keys({"seed": _SEED, "shuffle": BOOL, "even": STR}, kind=STR, ranks=RANKS)


def check_position(value: Any, path: str) -> None:
    """Checks that a value is the position of one kind of source.

    Raises:
        FormError: it has the keys of none, or a value that its kind can't have.
    """
    NAMED(value, path)
    for kind in POSITIONS:
        if value.keys() == {field.name for field in dataclasses.fields(kind)}:
            form_of(kind)(value, path)
            return
    raise FormError(
        f"{path} is the position of no kind of data, with {', '.join(value) or 'no keys'}"
    )


Position = Annotated[Mapping[str, Any], check_position]


@dataclass(frozen=True)
class PassesState:
    """Which seeds of workers a run has drawn.

    Attributes:
        seeds_once: whether workers persist, so that their seed is drawn once.
        has_begun: whether a pass over the data has begun.
    """

    seeds_once: bool
    has_begun: bool


@dataclass(frozen=True)
class NoPosition:
    """A list of batches: the number of batches that were taken is enough."""


@dataclass(frozen=True)
class MapStylePosition:
    """A data set that is read by index.

    Attributes:
        order: of the samples, as all ranks share it.
        world_size: the number of ranks when the order was begun.
        batch_size: of a rank.
        global_batch_size: the samples of a step on all ranks.
        num_samples: of an epoch.
        start: the samplers' state when the epoch began; None between epochs.
        check: a checksum of the indices that were taken; None between epochs.
        now: the samplers' state.
        passes: over the data so far.
        data: what the run has changed in the data set.
    """

    order: Annotated[Mapping[str, Any], _ORDER]
    world_size: NumRanks
    batch_size: NonNegativeInt | None
    global_batch_size: NonNegativeInt | None
    num_samples: NonNegativeInt | None
    start: Annotated[Mapping[str, Any] | None, optional(SAMPLING)]
    check: NonNegativeInt | None
    now: Annotated[Mapping[str, Any], SAMPLING]
    passes: PassesState
    data: Annotated[Mapping[str, Any], OBJECTS]


@dataclass(frozen=True)
class IterablePosition:
    """A loader that is read again from its start to the batch where the run continues.

    Attributes:
        num_workers: with others an iterable data set gives other batches.
        start: its state when the epoch began; None between epochs.
        now: its state.
        passes: over the data so far.
    """

    num_workers: NonNegativeInt
    start: Annotated[Mapping[str, Any] | None, optional(SAMPLING)]
    now: Annotated[Mapping[str, Any], SAMPLING]
    passes: PassesState


@dataclass(frozen=True)
class StatefulPosition:
    """A loader with `state_dict` and `load_state_dict`.

    Attributes:
        dataloader: its state; None before its first batch.
        is_exhausted: whether it has yielded its last batch.
    """

    dataloader: Any
    is_exhausted: bool


@dataclass(frozen=True)
class ZippedPosition:
    """Several loaders side by side, by name."""

    parts: dict[str, Position]


@dataclass(frozen=True)
class CycledPosition:
    """A loader that is repeated.

    Attributes:
        pass_idx: which repetition is under way; -1 before the first.
        num_in_pass: how many of its batches were yielded; None before the first pass.
        repeated: the position of the loader that is repeated.
    """

    pass_idx: BatchOrNever
    num_in_pass: NonNegativeInt | None
    repeated: Position


POSITIONS = (
    NoPosition,
    MapStylePosition,
    IterablePosition,
    StatefulPosition,
    ZippedPosition,
    CycledPosition,
)
