"""How a run starts: fresh, or from a checkpoint, with the same interface."""

from __future__ import annotations

import dataclasses
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
    InitialHyperparameters,
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


# Checkpoints that can't be used, each with the reason.
Refused = Sequence[tuple[Place, str]]


class Start:
    """The start of a run; this class is for a new run.

    Attributes:
        duration: the length of the run when it began, the base of fractions; None if unknown.
        epoch_length: the number of batches in an epoch when the run began; None if unknown.
        resumed: the path of the checkpoint from which the run resumes; None for a new run.
        changes: the differences from the run when it began, complete after `load`.
        stop_reason: why the run was stopped, if it was complete; None if it continues.
        stopped_by: the plugin that requested the stop.
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
        """Raises ResumeError if the run differs from the run that saved the checkpoint."""

    def load(self, run: Run) -> None:
        """Loads the checkpoint into the built run; raises ResumeError if the optimizers differ."""
        warn_of_resume_risks(run.state, run.loop.feeds.current.resume_risks)


class FromCheckpoint(Start):
    """The start of a run that resumes from a verified checkpoint.

    Args:
        place: the path or URL of the checkpoint.
        allowed: the differences with which the run may be resumed.
        refused: newer checkpoints of the run that can't be used.

    Raises:
        CheckpointError: the checkpoint is incomplete, or has invalid values.
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
        # Dropped in `load`: the parts take as much memory as the run itself.
        self._parts: Mapping[str, Any] | None = checkpoint.parts
        self._old_manifest: Mapping[str, Any] = checkpoint.facts["manifest"]
        self._missing: list[Mapping[str, Any]] = []
        # The original lengths: schedules in fractions of the run must not change when the run is extended,
        # or resumed with another number of ranks.
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
        """The notes for the header: refused checkpoints, the position in the run, and changes."""
        batch = self._facts["moment"]["batch"]
        notes = [f"{place.name} isn't used: {reason}" for place, reason in self._refused]
        notes.append(f"resumed: {self._place}, epoch {self._epoch_number}, batch {batch}")
        if reason := why_passed_over(self._facts):
            notes.append(f"{self._place.name}: {reason}")
        notes += [f"changed since the run began: {change}" for change in self.changes]
        for plugin in self._missing:
            notes.append(f"{plugin['name']} is missing; its saved state is carried over")
        return tuple(notes)

    def narrowed(self, configuration: Configuration) -> Configuration:
        """Excludes algorithms that were installed after the run began."""
        begun_with = frozenset(fold(plugin["name"]) for plugin in self._algorithms())
        off = {
            fold(plugin["name"]): Reason(plugin["reason"], plugin.get("kind", ""))
            for plugin in self._old_manifest["off"]
        }
        choice = dataclasses.replace(configuration.choice, begun_with=begun_with, off_then=off)
        return dataclasses.replace(configuration, choice=choice)

    def check(self, manifest: Mapping[str, Any]) -> None:
        self._check_missing(manifest)
        versions, options = plugin_differences(
            self._old_manifest["plugins"], manifest["plugins"], self._allowed.plugin_change
        )
        if versions:
            raise ResumeError(
                "the run was begun with other versions of its algorithms",
                **changed_at(self._place, [*versions.values()]),
                fix="install those versions, or resume with these: "
                + allowing("plugin_change", next(iter(versions))),
            )
        settings = config_differences(self._old_manifest, manifest, "settings")
        task = task_differences(self._old_manifest["task"], manifest["task"])
        self._accept(*settings, *task, *options)

    def load(self, run: Run) -> None:
        """Calls `before_load`, then restores everything except RNG states, which the loop restores later."""
        state = run.state
        hooks = run.active.plans
        loop = run.loop
        capture = run.capture
        manifest = state.manifest
        optimizers = config_differences(self._old_manifest, manifest, "optimizers")
        companions = config_differences(self._old_manifest, manifest, "companions")
        self._accept(*optimizers, *companions)
        state.manifest = {**state.manifest, "absent": list(self._missing)}
        parts = self._parts
        self._parts = None
        assert parts is not None
        hooks.before_load(state)
        missing = {fold(plugin["name"]) for plugin in self._missing}
        capture.plugins.carried = read_all(
            {name: part for name, part in parts["plugins"].items() if name in missing}
        )
        hyperparameters = InitialHyperparameters(state)
        capture.put(state, parts, self._facts.get("left_out"))
        if loop.feeds.was_rebuilt:
            loop.feeds.take(state, hooks.build_train_dataloader(state))
        self._restore_rank_state(capture, state, parts)
        # On another number of ranks the epoch in progress keeps its global batch size, so that it can have
        # another length than the new data loader.
        state.num_batches = loop.feeds.current.num_batches
        if self._allowed.config_change:
            hyperparameters.restore(state, self._old_manifest)
        position = "in epoch" if loop.feeds.current.under_way else "between epochs"
        # The results on the test sets of a complete run stay valid until the run is extended.
        if tested := self._old_manifest.get("tested"):
            state.manifest = {**state.manifest, "tested": tested}
            name = tested["checkpoint"]
            run.best_weights.lent = None if name is None else self._place.parent / name
        loop.resume_point = ResumePoint(hooks, position, capture.generators.go_on)

    def _restore_rank_state(self, capture: Capture, state: State, parts: Mapping[str, Any]) -> None:
        """Restores the state that a single rank had, on the rank that continues with its samples."""
        with loading("facts.mesh"):
            sizes, *names = self._facts.get("mesh") or [{"data": self._facts["world_size"]}]
            rank = Layout(sizes, *map(tuple, names)).twin(state.layout, state.rank)
        if rank is not None and f"rank{rank}" not in parts:
            parts = {**parts, **read_checkpoint(self._path, [f"rank{rank}"]).parts}
        require_nothing_lost(state, parts[f"rank{rank or 0}"], self._allowed.lost_objects)
        capture.put_own(state, parts, rank)

    def _check_missing(self, manifest: Mapping[str, Any]) -> None:
        """Finds algorithms that are missing, and algorithms that were added since the run began."""
        active = {fold(plugin["name"]): plugin for plugin in manifest["plugins"]}
        off = {fold(plugin["name"]): plugin for plugin in manifest["off"]}
        for plugin in self._algorithms():
            name = fold(plugin["name"])
            if name in active:
                continue
            if name in off:
                reason = off[name]["reason"]
                self._accept(f"{plugin['name']}: active -> off ({reason})")
            elif name in map(fold, self._allowed.missing_plugin):
                self._missing.append(plugin)
            else:
                way_in = f"pass it as before, with {plugin['source']}"
                if plugin["distribution"]:
                    way_in = pip("install", f"{plugin['distribution']}=={plugin['version']}")
                raise ResumeError(
                    f"the run was begun with {plugin['name']}, which isn't here",
                    checkpoint=self._place,
                    fix=f"{way_in}, or resume without it: "
                    + allowing("missing_plugin", plugin["name"]),
                )
        old_names = {fold(plugin["name"]) for plugin in self._algorithms()}
        for name, plugin in active.items():
            if name not in old_names and plugin["role"] == "algorithm":
                self.changes.append(f"{plugin['name']} takes part")

    def _accept(self, *differences: str) -> None:
        self.changes += accepted(differences, self._allowed, self._place)

    def _algorithms(self) -> Iterator[Mapping[str, Any]]:
        """Yields the manifest entries of the run's algorithms, including those it was missing."""
        for plugin in self._old_manifest["plugins"]:
            if plugin["role"] == "algorithm":
                yield plugin
        yield from self._old_manifest.get("absent", ())


def find_start(
    settings: Settings,
    storage: Storage,
    processes: Processes,
    allowed: Allowed,
    initial_checkpoint: Checkpoint | None = None,
) -> Start:
    """Determines how a run starts: from a checkpoint, or from the beginning.

    Args:
        initial_checkpoint: the checkpoint to begin with if the run has none.

    Raises:
        ResumeError: the settings don't allow to resume.
        CheckpointError: the run has checkpoints, but none is usable.
    """
    damage: dict[Place, str] = {}

    def choose() -> tuple[Place | None, Refused]:
        if processes.rank:
            return None, []
        return _chosen(settings, storage, shards=processes.world_size == 1, damage=damage)

    while True:
        place, refused = as_first(processes.from_first, choose)
        if place is None and initial_checkpoint is not None:
            return FromCheckpoint(initial_checkpoint, initial_checkpoint.path, allowed, ())
        if place is None:
            if (storage.run_dir / RUN_MANIFEST).is_file():
                return Start(
                    f"no checkpoint in {storage.run_dir}, where a run has begun: it starts over"
                )
            return Start()
        path = local_copy(place, storage, processes)
        # A single rank has verified the shards in `choose`. Several ranks share that work: each verifies
        # a part of the shards, and damage that one rank finds is known to all after `all_gather`.
        rank_damage = ""
        if processes.world_size > 1:
            rank_damage = damage_in_shards(path, processes.rank, processes.world_size)
        reasons = [reason for reason in processes.all_gather(rank_damage) if reason]
        if not reasons:
            break
        if place in damage or place.parent != storage.store.folder:
            with refusing(place):
                raise CorruptFileError(reasons[0])
        damage[place] = reasons[0]  # the next round chooses an earlier checkpoint
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
    """Reads the parts of a checkpoint that this rank needs; shared tensors are loaded later.

    The part of rank 0 serves ranks that have none, as in a run with more ranks than before.
    """
    rank = processes.rank
    names = read_checkpoint(path, only=()).names
    ranks_to_read = ("rank0", f"rank{rank}")
    parts = [name for name in names if not name.startswith("rank") or name in ranks_to_read]
    left_on_disk = [name for name in ("model", "optimizers", "plugins") if name in names]
    # This rank's slices are most likely in the files of ranks at the same relative position.
    return read_checkpoint(
        path, parts, leaving=left_on_disk, nearest=(rank + 0.5) / processes.world_size
    )


def _chosen(
    settings: Settings, storage: Storage, *, shards: bool, damage: Mapping[Any, str]
) -> tuple[Place | None, Refused]:
    """Returns the checkpoint to resume from, and newer checkpoints that can't be used.

    Args:
        shards: whether to verify the shards of checkpoints, too.
        damage: checkpoints whose shards are known to be damaged, with the reasons.
    """
    place: Place | None = None
    refused: Refused = []
    if settings.run_dir is not None:
        place, refused = storage.store.latest(shards=shards, damage=damage)
    resume = settings.resume
    if resume == "never" and (place is not None or refused):
        raise ResumeError(
            f"resume='never', but {settings.run_dir} holds a run already",
            fix="give another run_dir, or delete this one",
        )
    if place is None and refused:
        raise unusable(refused[0][0].parent, refused)
    if resume in ("auto", "never"):
        return place, refused
    requested = resume if isinstance(resume, Url) else place_of(resume)
    if isinstance(requested, Path):
        requested, _ = checkpoint_at(requested)
    for refused_place, reason in refused:
        if place is not None and _resolved(refused_place) == _resolved(requested):
            raise ResumeError(
                f"can't resume from {refused_place.name}: {reason}",
                fix=f"leave {as_set(resume=str(resume))} out: the run resumes from {place.name}",
            )
    chosen = _checkpoint_to_resume(requested, place)
    if isinstance(chosen, Path) and chosen != place:
        # A checkpoint elsewhere, which `latest` hasn't verified; its tensors are only read later.
        with refusing(chosen):
            examine(chosen, shards=shards)
    return chosen, refused


def _checkpoint_to_resume(requested: Place, newest: Place | None) -> Place:
    """Returns the checkpoint to resume from, given the one that the user requested.

    Args:
        newest: the newest checkpoint in run_dir, if any: a run that began from the requested checkpoint
            of another run, and is started again with the same command, resumes from its own.

    Raises:
        ResumeError: the requested checkpoint is an earlier one of the same run.
    """
    if newest is None:
        return requested
    requested_path = _resolved(requested)
    newest_path = _resolved(newest)
    if requested_path == newest_path or requested_path.parent != newest_path.parent:
        return newest
    raise ResumeError(
        f"the run has already continued from {requested.name} to {newest.name}",
        fix="begin another run with it: " + as_set(run_dir="ANOTHER", resume=str(requested)),
    )


def _resolved(place: Place) -> Place:
    return place.resolve() if isinstance(place, Path) else place
