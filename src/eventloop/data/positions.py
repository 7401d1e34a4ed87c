"""Positions in training data as checkpoints store them: a dataclass for each kind of source."""

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
# The result of `TrackedObjects.state_dict`.
OBJECTS = keys(**_OBJECTS)
# The result of `SamplingState.state_dict`.
SAMPLING = keys(
    {"shared": NAMED},
    objects=by_name(keys(kind=STR, **_OBJECTS)),
    stateful=by_name(keys(kind=STR, state=NAMED)),
)
# The order of samples that the ranks share.
_ORDER = keys({"seed": _SEED, "shuffle": BOOL, "even": STR}, kind=STR, ranks=RANKS)


def check_position(value: Any, path: str) -> None:
    """Checks that a value is the position of a source.

    Raises:
        FormError: no kind of source has its keys, or a value is invalid for its kind.
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
    """Records the workers' seeds that a run has drawn.

    Attributes:
        seeds_once: whether workers persist, so that their seed is drawn once.
        has_begun: whether a pass over the data has begun.
    """

    seeds_once: bool
    has_begun: bool


@dataclass(frozen=True)
class NoPosition:
    """The position in a list of batches: none, because the number of batches taken is enough."""


@dataclass(frozen=True)
class MapStylePosition:
    """The position in a map-style data set.

    Attributes:
        order: the order of samples that all ranks share.
        world_size: the number of ranks when the order was begun.
        batch_size: the batch size of a rank.
        global_batch_size: the number of samples in a step over all ranks.
        num_samples: the number of samples in an epoch.
        start: the samplers' state when the epoch began; None between epochs.
        check: a checksum of the indices that were taken; None between epochs.
        now: the samplers' current state.
        passes: the passes over the data so far.
        data: the changes that the run has made to the data set.
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
    """The position in a loader that is read again from its start to the batch where the run continues.

    Attributes:
        num_workers: with another number, an iterable data set yields other batches.
        start: the loader's state when the epoch began; None between epochs.
        now: its current state.
        passes: the passes over the data so far.
    """

    num_workers: NonNegativeInt
    start: Annotated[Mapping[str, Any] | None, optional(SAMPLING)]
    now: Annotated[Mapping[str, Any], SAMPLING]
    passes: PassesState


@dataclass(frozen=True)
class StatefulPosition:
    """The position in a loader with `state_dict` and `load_state_dict`.

    Attributes:
        dataloader: the loader's state; None before its first batch.
        is_exhausted: whether it has yielded its last batch.
    """

    dataloader: Any
    is_exhausted: bool


@dataclass(frozen=True)
class ZippedPosition:
    """The positions in several loaders side by side, by name."""

    parts: dict[str, Position]


@dataclass(frozen=True)
class CycledPosition:
    """The position in a loader that is repeated.

    Attributes:
        pass_idx: the number of the current pass, from 0; -1 before the first.
        num_in_pass: the number of batches yielded in this pass; None before the first pass.
        repeated: the position in the repeated loader.
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
