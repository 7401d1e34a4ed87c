"""How a run starts: fresh, or from a checkpoint, with the same interface."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.loading import loading
from eventloop.checkpoint.locations import Storage, checkpoint_at, local_copy, unusable
from eventloop.checkpoint.run_objects import require_nothing_lost
from eventloop.checkpoint.saved_tensors import read_all
from eventloop.checkpoint.schema import require_valid
from eventloop.checkpoint.verifying import damage_in_shards, examine, refusing, why_passed_over
from eventloop.clock import Clock, Time
from eventloop.config.plugin_flags import Reason
from eventloop.errors import ResumeError, as_first
from eventloop.files.disk import CorruptFileError
from eventloop.fixes import allowing, as_set, pip
from eventloop.mesh import Layout
from eventloop.naming import fold
from eventloop.run.differences import (
    Allowed,
    MadeWith,
    accepted,
    changed_at,
    config_differences,
    plugin_differences,
    task_differences,
)
from eventloop.run.run_manifest import RUN_MANIFEST
from eventloop.run.start_checks import warn_of_resume_risks
from eventloop.training.resume_point import ResumePoint
from eventloop.urls import Place, Url, place_of

if TYPE_CHECKING:
    from eventloop.checkpoint.capture import Capture
    from eventloop.checkpoint.checkpoint_files import Checkpoint
    from eventloop.config.configuration import Configuration
    from eventloop.config.settings import Settings
    from eventloop.distributed.processes import Processes
    from eventloop.run.runtime import Run
    from eventloop.state import State


Refused = Sequence[tuple[Place, str]]


class Start:
    """How a run starts: here, from the beginning.

    Attributes:
        duration: the length of the run when it began, the base of fractions; None if unknown.
        epoch_length: likewise, how many batches an epoch had.
        resumed: the path of the checkpoint that the run resumes from; None for a new run.
        changes: the differences from the run as it began, complete after `load`.
        stop_reason: why the run stopped, if nothing was left to do.
        stopped_by: the plugin that asked for it.
    """

    duration: Time | None = None
    epoch_length: int | None = None
    resumed: str | None = None
    changes: Sequence[str] = ()
    stop_reason: str | None = None
    stopped_by: str | None = None

    def __init__(self, note: str = "") -> None:
        self._note = note

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes for the header."""
        return (self._note,) if self._note else ()

    def narrowed(self, configuration: Configuration) -> Configuration:
        """Returns the configuration, limited to the plugins of the run."""
        return configuration

    def check(self, manifest: Mapping[str, Any]) -> None:
        """Raises ResumeError with the differences if the run isn't that of the checkpoint."""

    def load(self, run: Run) -> None:
        """Loads the checkpoint into the built run; refuses other optimizers, as `check` does."""
        warn_of_resume_risks(run.state, run.loop.feeds.current.resume_risks)


class FromCheckpoint(Start):
    """A run that is resumed from a verified checkpoint; newer ones are refused for a reason.

    Raises:
        CheckpointError: it is incomplete, or has values that no run writes.
    """

    def __init__(
        self, checkpoint: Checkpoint, place: Place, allowed: Allowed, refused: Refused
    ) -> None:
        require_valid(checkpoint)
        self._place = place
        self._allowed = allowed
        self._refused = refused
        self._facts = checkpoint.facts
        self._path = checkpoint.path
        # Given up when the run has been loaded: they take as much memory as the run itself.
        self._parts: Mapping[str, Any] | None = checkpoint.parts
        self._then: Mapping[str, Any] = checkpoint.facts["manifest"]
        self._missing: list[Mapping[str, Any]] = []
        # Those of then: neither an extension nor another number of ranks bends a schedule.
        self.epoch_length = self._facts.get("epoch_length")
        duration = self._facts["duration"]
        self.duration = None if duration is None else Time(duration)
        self.resumed = str(self._place)
        self.changes: list[str] = []
        clock = Clock()
        clock.load_state_dict(checkpoint.parts["training"]["clock"])
        self._epoch_number = clock.epoch_number
        is_finished = checkpoint.parts["training"]["loop"]["is_finished"]
        if is_finished and self._facts.get("status") != "interrupted":
            self.stop_reason = self._facts["stop_reason"]
            self.stopped_by = self._facts.get("stopped_by")

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes for the header: where the run resumes, what isn't used, what has changed."""
        batch = self._facts["moment"]["batch"]
        notes = [f"{path.name} isn't used: {why}" for path, why in self._refused]
        notes.append(f"resumed: {self._place}, epoch {self._epoch_number}, batch {batch}")
        if why := why_passed_over(self._facts):
            notes.append(f"{self._place.name}: {why}")
        notes += [f"changed since the run began: {change}" for change in self.changes]
        for plugin in self._missing:
            notes.append(f"{plugin['name']} is missing; its saved state is carried over")
        return tuple(notes)

    def narrowed(self, configuration: Configuration) -> Configuration:
        """Excludes algorithms that were installed after the run began."""
        begun_with = frozenset(fold(one["name"]) for one in self._algorithms())
        off = {
            fold(one["name"]): Reason(one["reason"], one.get("kind", ""))
            for one in self._then["off"]
        }
        choice = dataclasses.replace(configuration.choice, begun_with=begun_with, off_then=off)
        return dataclasses.replace(configuration, choice=choice)

    def check(self, manifest: Mapping[str, Any]) -> None:
        self._check_missing(manifest)
        versions, options = plugin_differences(
            self._then["plugins"], manifest["plugins"], self._allowed.plugin_change
        )
        if versions:
            raise ResumeError(
                "the run was begun with other versions of its algorithms",
                **changed_at(self._place, [*versions.values()]),
                fix="install those versions, or resume with these: "
                + allowing("plugin_change", next(iter(versions))),
            )
        settings = config_differences(self._then, manifest, "settings")
        task = task_differences(self._then["task"], manifest["task"])
        self._accept(*settings, *task, *options)

    def load(self, run: Run) -> None:
        """Calls `before_load`, then restores everything; the loop restores the RNG states later."""
        state = run.state
        hooks = run.active.plans
        loop = run.loop
        capture = run.capture
        then = self._then
        now = state.manifest
        companions = config_differences(then, now, "companions")
        self._accept(*config_differences(then, now, "optimizers"), *companions)
        state.manifest = {**state.manifest, "absent": list(self._missing)}
        parts = self._parts
        self._parts = None
        assert parts is not None
        hooks.before_load(state)
        missing = {fold(one["name"]) for one in self._missing}
        carried = {name: one for name, one in parts["plugins"].items() if name in missing}
        capture.plugins.carried = read_all(carried)
        made = MadeWith(state)
        capture.put(state, parts, self._facts.get("left_out"))
        if loop.feeds.was_rebuilt:
            loop.feeds.take(state, hooks.build_train_dataloader(state))
        self._put_own(capture, state, parts)
        state.num_batches = loop.feeds.current.num_batches  # a step keeps its size on other ranks
        if self._allowed.config_change:
            made.restore(state, then)
        where = "in epoch" if loop.feeds.current.under_way else "between epochs"
        # Of a run that is over, until it is extended to another end.
        if found := self._then.get("tested"):
            state.manifest = {**state.manifest, "tested": found}
            name = found["checkpoint"]
            run.best_weights.lent = None if name is None else self._place.parent / name
        loop.resume_point = ResumePoint(hooks, where, capture.generators.go_on)

    def _put_own(self, capture: Capture, state: State, parts: Mapping[str, Any]) -> None:
        """Restores what was the state of one rank: on the rank that has its samples now."""
        with loading("facts.mesh"):
            sizes, *names = self._facts.get("mesh") or [{"data": self._facts["world_size"]}]
            rank = Layout(sizes, *map(tuple, names)).twin(state.layout, state.rank)
        if rank is not None and f"rank{rank}" not in parts:
            parts = {**parts, **read_checkpoint(self._path, [f"rank{rank}"]).parts}
        require_nothing_lost(state, parts[f"rank{rank or 0}"], self._allowed.lost_objects)
        capture.put_own(state, parts, rank)

    def _check_missing(self, manifest: Mapping[str, Any]) -> None:
        now = {fold(one["name"]): one for one in manifest["plugins"]}
        off = {fold(one["name"]): one for one in manifest["off"]}
        for one in self._algorithms():
            if (name := fold(one["name"])) in now:
                continue
            if name in off:
                reason = off[name]["reason"]
                self._accept(f"{one['name']}: active -> off ({reason})")
            elif name in map(fold, self._allowed.missing_plugin):
                self._missing.append(one)
            else:
                get = f"pass it as before, with {one['source']}"
                if one["distribution"]:
                    get = pip("install", f"{one['distribution']}=={one['version']}")
                raise ResumeError(
                    f"the run was begun with {one['name']}, which isn't here",
                    checkpoint=self._place,
                    fix=f"{get}, or resume without it: " + allowing("missing_plugin", one["name"]),
                )
        known = {fold(one["name"]) for one in self._algorithms()}
        new = [one for name, one in now.items() if name not in known]
        self.changes += [f"{one['name']} takes part" for one in new if one["role"] == "algorithm"]

    def _accept(self, *differences: str) -> None:
        self.changes += accepted(differences, self._allowed, self._place)

    def _algorithms(self) -> Iterator[Mapping[str, Any]]:
        there = (one for one in self._then["plugins"] if one["role"] == "algorithm")
        return itertools.chain(there, self._then.get("absent", ()))


def find_start(
    settings: Settings,
    storage: Storage,
    processes: Processes,
    allowed: Allowed,
    other: Checkpoint | None = None,
) -> Start:
    """Determines how a run starts; raises ResumeError, or CheckpointError if none is usable."""
    damage: dict[Place, str] = {}

    def choose() -> tuple[Place | None, Refused]:
        if processes.rank:
            return None, []
        return _chosen(settings, storage, shards=processes.world_size == 1, damage=damage)

    while True:
        place, refused = as_first(processes.from_first, choose)
        if place is None and other is not None:
            return FromCheckpoint(other, other.path, allowed, ())
        if place is None:
            left = (storage.run_dir / RUN_MANIFEST).is_file()  # files, but no checkpoint
            begun = f"no checkpoint in {storage.run_dir}, where a run has begun: it starts over"
            return Start(begun if left else "")
        path = local_copy(place, storage, processes)
        # Of slices, each of several ranks has read a share; one alone has looked at all of them.
        rank = processes.rank
        num = processes.world_size
        mine = damage_in_shards(path, rank, num) if num > 1 else ""
        found = next((one for one in processes.all_gather(mine) if one), "")
        if not found:
            break
        if place in damage or place.parent != storage.store.folder:
            with refusing(place):
                raise CorruptFileError(found)
        damage[place] = found
    checkpoint = _read(path, processes)
    if why_passed_over(checkpoint.facts) and settings.on_bad_loss == "raise":
        flags = as_set(on_bad_loss="ignore") + " with " + allowing("config_change")
        raise ResumeError(
            f"the weights of {place} aren't finite, so training can't continue from them",
            fix=f"name an earlier checkpoint, or the run, {place.parent.parent}, for its newest that "
            "is finite; " + flags + " resumes from this one",
        )
    return FromCheckpoint(checkpoint, place, allowed, refused)


def _read(path: Path, processes: Processes) -> Checkpoint:
    """Reads what this rank needs of a checkpoint; shared tensors are loaded later."""
    rank = processes.rank
    names = read_checkpoint(path, only=()).names
    of_others = {name for name in names if name.startswith("rank")} - {"rank0", f"rank{rank}"}
    wanted = [name for name in names if name not in of_others]
    left = [name for name in ("model", "optimizers", "plugins") if name in names]
    return read_checkpoint(path, wanted, leaving=left, nearest=(rank + 0.5) / processes.world_size)


def _chosen(
    settings: Settings, storage: Storage, *, shards: bool, damage: Mapping[Any, str]
) -> tuple[Place | None, Refused]:
    """Returns the checkpoint to resume from, and newer ones that can't be used."""
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
            given = as_set(resume=str(wanted))
            raise ResumeError(
                f"can't resume from {one.name}: {why}",
                fix="leave " + given + f" out: the run resumes from {place.name}",
            )
    chosen = _named(named, place)
    if isinstance(chosen, Path) and chosen != place:
        with refusing(chosen):  # `latest` hasn't looked at it, and tensors stay in its files
            examine(chosen, shards=shards)
    return chosen, refused


def _named(wanted: Place, newest: Place | None) -> Place:
    """Returns the checkpoint that the user named, unless the run has a newer one."""
    if newest is None:
        return wanted
    one = _resolved(wanted)
    other = _resolved(newest)
    if one == other or one.parent != other.parent:
        return newest
    raise ResumeError(
        f"the run has already continued from {wanted.name} to {newest.name}",
        fix="begin another run with it: " + as_set(run_dir="ANOTHER", resume=str(wanted)),
    )


def _resolved(place: Place) -> Place:
    return place.resolve() if isinstance(place, Path) else place
