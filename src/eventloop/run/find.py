"""Which checkpoint a run goes on from, if from any: rank 0 looks, all ranks read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.checkpoint.format import read
from eventloop.checkpoint.storage import Storage, checkpoint_at, local_copy, unusable
from eventloop.checkpoint.verifying import (
    damage_in_shards,
    examine,
    refusing,
    why_passed_over,
)
from eventloop.errors import CheckpointError, ResumeError, as_first
from eventloop.run.run_manifest import FILE as MANIFEST
from eventloop.run.start import Allowed, FromCheckpoint, Start
from eventloop.text import allowing, as_set
from eventloop.urls import Place, Url, place_of

if TYPE_CHECKING:
    from eventloop.checkpoint.format import Checkpoint
    from eventloop.config.settings import Settings
    from eventloop.distributed.processes import Processes

Refused = Sequence[tuple[Place, str]]


def find_start(
    settings: Settings, storage: Storage, processes: Processes, allowed: Allowed
) -> Start:
    """Finds out how a run starts.

    Raises:
        ResumeError: what was asked for isn't there.
        CheckpointError: there are checkpoints, but none verifies and is finite.
    """
    damage: dict[Place, str] = {}

    def choose() -> tuple[Place | None, Refused]:
        if processes.rank:
            return None, []
        return _chosen(settings, storage, shards=processes.world_size == 1, damage=damage)

    while True:
        place, refused = as_first(processes.from_first, choose)
        if place is None:
            left = (storage.run_dir / MANIFEST).is_file()  # files, but no checkpoint
            begun = (
                f"no checkpoint in {storage.run_dir}, where a run was begun: this one begins anew"
            )
            return Start(begun if left else "")
        path = local_copy(place, storage, processes)
        found = _damage_in_shards(path, processes)
        if not found:
            break
        if place in damage or place.parent != storage.store.folder:
            raise CheckpointError(
                f"the checkpoint {str(place)!r} can't be used: {found}",
                fix="take another checkpoint, or an earlier copy of this one",
            )
        damage[place] = found
    checkpoint = _read(path, processes)
    if why_passed_over(checkpoint.facts) and settings.on_bad_loss == "raise":
        raise ResumeError(
            f"the weights of {place} aren't finite, so that nothing can be learned from there",
            fix=f"name an earlier checkpoint, or the run, {place.parent.parent}, for its newest that "
            f"is finite; {as_set(on_bad_loss='ignore')} with {allowing('config_change')} goes on from "
            "this one",
        )
    return FromCheckpoint(checkpoint, allowed, refused, place)


def _damage_in_shards(path: Path, processes: Processes) -> str:
    """Returns what is wrong with a file of slices, of which each rank reads its share, or ""."""
    if processes.world_size == 1:
        return ""  # it has looked at all of them
    mine = damage_in_shards(path, processes.rank, processes.world_size)
    return next((one for one in processes.all_gather(mine) if one), "")


def _read(path: Path, processes: Processes) -> Checkpoint:
    """Reads what this rank needs of a checkpoint; tensors but its own stay in their files for now."""
    rank = processes.rank
    names = read(path, only=()).names
    of_others = {name for name in names if name.startswith("rank")} - {"rank0", f"rank{rank}"}
    wanted = [name for name in names if name not in of_others]
    left = [name for name in ("model", "optimizers", "plugins") if name in names]
    return read(path, wanted, leaving=left, nearest=(rank + 0.5) / processes.world_size)


def _chosen(
    settings: Settings, storage: Storage, *, shards: bool, damage: Mapping[Any, str]
) -> tuple[Place | None, Refused]:
    """Returns the checkpoint to go on from, and newer ones that can't be used."""
    place: Place | None = None
    refused: Refused = []
    if settings.run_dir is not None:
        place, refused = storage.store.latest(shards=shards, damage=damage)
    wanted = settings.resume
    if wanted == "never" and (place is not None or refused):
        raise ResumeError(
            f"resume='never', but {settings.run_dir} holds a run already",
            fix="give another run_dir, or delete this one",
        )
    if place is None and refused:
        raise unusable(refused[0][0].parent, refused)
    if wanted in ("auto", "never"):
        return place, refused
    named = wanted if isinstance(wanted, Url) else place_of(wanted)
    if isinstance(named, Path):
        named, _ = checkpoint_at(named)
    for one, why in refused:
        if place is not None and _resolved(one) == _resolved(named):
            raise ResumeError(
                f"{one.name} can't be gone on from: {why}",
                fix=f"leave {as_set(resume=str(wanted))} out: the run goes on from {place.name}",
            )
    chosen = _named(named, place)
    if isinstance(chosen, Path) and chosen != place:
        with refusing(chosen):  # `latest` hasn't looked at it, and tensors stay in its files
            examine(chosen, shards=shards)
    return chosen, refused


def _named(wanted: Place, newest: Place | None) -> Place:
    """Returns the checkpoint that a person named, unless the run has gone further."""
    if newest is None:
        return wanted
    one, other = _resolved(wanted), _resolved(newest)
    if one == other or one.parent != other.parent:
        return newest
    raise ResumeError(
        f"the run has gone on to {newest.name} since {wanted.name}",
        fix=f"begin another run with it: {as_set(run_dir='ANOTHER', resume=str(wanted))}",
    )


def _resolved(place: Place) -> Place:
    return place.resolve() if isinstance(place, Path) else place
