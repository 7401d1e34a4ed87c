"""Differences between a run when it began and when it is resumed, and changes of hyperparameters."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eventloop.errors import ResumeError
from eventloop.fixes import allowing
from eventloop.naming import fold
from eventloop.secret_values import shown
from eventloop.state import State
from eventloop.task.schedule_curves import Schedule
from eventloop.urls import Place

_NOTHING = "none"
# Settings that affect neither the weights nor the results: they may differ when a run is resumed.
_FREE = frozenset(
    {
        "autoload",
        "checkpoint_best",
        "checkpoint_interval",
        "checkpoint_keep",
        "gc_interval",
        "log_interval",
        "on_callback_error",
        "on_save_error",
        "resume",
        "run_dir",
    }
)


@dataclass(frozen=True)
class Allowed:
    """The differences with which a run may be resumed.

    Args:
        config_change: whether settings, options, task and optimizers may differ.
        plugin_change: names of algorithms whose version may differ.
        missing_plugin: names of algorithms that may be missing; their state is carried over.
        lost_objects: whether the checkpoint may lack objects that the run had created or changed.
    """

    config_change: bool = False
    plugin_change: tuple[str, ...] = ()
    missing_plugin: tuple[str, ...] = ()
    lost_objects: bool = False


NOTHING: Allowed = Allowed()


def config_differences(
    old_manifest: Mapping[str, Any], new_manifest: Mapping[str, Any], section: str
) -> Iterator[str]:
    """Yields a line for each changed value in a section of the manifest: `settings.seed: 0 -> 1`.

    Secrets are masked in a manifest: adding or removing a secret is a difference, changing it isn't.
    """
    old_values = dict(_flat(section, old_manifest.get(section)))
    new_values = dict(_flat(section, new_manifest.get(section)))
    for key in sorted(old_values.keys() | new_values.keys()):
        # Masked once more, as checkpoints of earlier versions have secrets unmasked.
        old = shown(key, old_values.get(key, _NOTHING))
        new = shown(key, new_values.get(key, _NOTHING))
        if old != new and key.removeprefix("settings.") not in _FREE:
            yield f"{key}: {old} -> {new}"


def task_differences(old_task: Mapping[str, Any], new_task: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each changed option of a task, and the changed lines of its file.

    Args:
        old_task, new_task: the task in the manifests; empty if it was created in Python.
    """
    old_values = dict(old_task)
    new_values = dict(new_task)
    old_source = old_values.pop("source", "")
    new_source = new_values.pop("source", "")
    if not old_values or not new_values:
        return
    if old_source and new_source and old_source != new_source:
        del old_values["digest"], new_values["digest"]  # the lines say more than the digests
        lines = difflib.unified_diff(
            old_source.splitlines(), new_source.splitlines(), n=0, lineterm=""
        )
        yield from (line for line in lines if not line.startswith(("---", "+++")))
    yield from config_differences({"task": old_values}, {"task": new_values}, "task")


def plugin_differences(
    old_plugins: Sequence[Mapping[str, Any]],
    new_plugins: Sequence[Mapping[str, Any]],
    allowed: Sequence[str],
) -> tuple[dict[str, str], list[str]]:
    """Compares the algorithms that are active in both lists.

    Args:
        allowed: names of algorithms whose version may differ.

    Returns:
        A line for each changed version, by the algorithm's name; and a line for each changed option.
    """
    old_algorithms = {
        fold(plugin["name"]): plugin for plugin in old_plugins if plugin["role"] == "algorithm"
    }
    versions: dict[str, str] = {}
    options: list[str] = []
    for plugin in new_plugins:
        name = plugin["name"]
        old_plugin = old_algorithms.get(fold(name))
        if old_plugin is None or plugin["role"] != "algorithm":
            continue
        old_version = old_plugin["version"]
        new_version = plugin["version"]
        if old_version != new_version and fold(name) not in map(fold, allowed):
            versions[name] = f"{name}: {old_version} -> {new_version}"
        free = plugin.get("free", ())
        old_options = _without(old_plugin["options"], free)
        new_options = _without(plugin["options"], free)
        options += config_differences({name: old_options}, {name: new_options}, name)
    return versions, options


def _without(options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def accepted(differences: Sequence[str], allowed: Allowed, place: Place) -> Sequence[str]:
    """Returns the differences of a resumed run; raises ResumeError if they aren't allowed."""
    if not differences or allowed.config_change:
        return differences
    raise ResumeError(
        "the run was begun with another configuration",
        **changed_at(place, differences),
        fix="restore the configuration, begin a new run in another run_dir, or accept the "
        "change: " + allowing("config_change"),
    )


def changed_at(place: Place, lines: Sequence[str]) -> dict[str, Any]:
    """Returns the details of an error: the checkpoint, and a line for each change."""
    changed = "\n    ".join(["", *lines]) if len(lines) > 1 else lines[0]
    return {"checkpoint": place, "changed": changed}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings with their paths, without empty mappings and None."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from _flat(f"{name}.{key}", child)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for idx, child in enumerate(value):
            yield from _flat(f"{name}.{idx}", child)
    elif value not in ({}, None):
        yield name, value


def _changed(
    old_optimizers: Mapping[str, Any], new_optimizers: Mapping[str, Any]
) -> Iterator[tuple[str, int, str]]:
    """Yields the optimizer, the group's index and the name of each hyperparameter that differs."""
    for name in old_optimizers.keys() & new_optimizers.keys():
        pairs = zip(old_optimizers[name]["groups"], new_optimizers[name]["groups"], strict=True)
        for idx, (old_group, new_group) in enumerate(pairs):
            for key in new_group:
                if old_group.get(key) != new_group[key]:
                    yield name, idx, key


class InitialHyperparameters:
    """Hyperparameters and microbatch size from task and settings, before a checkpoint is loaded.

    Loading replaces them by the values of the checkpoint. If the user has changed values and allows
    that, `restore` puts these back.
    """

    def __init__(self, state: State) -> None:
        self._microbatch_size = state.microbatch_size
        self._groups = {
            name: [dict(group) for group in optimizer.param_groups]
            for name, optimizer in state.optimizers.items()
        }
        self._schedulers = [pair for pairs in state.schedulers.values() for pair in pairs]
        self._courses = [schedule.course for schedule in self._schedules()]

    def restore(self, state: State, old_manifest: Mapping[str, Any]) -> None:
        """Restores a changed microbatch size, changed hyperparameters of optimizers, and all schedules.

        A changed learning rate keeps the factor that its schedule has reached.

        Args:
            old_manifest: the manifest of the run when it began.
        """
        old_size = old_manifest["settings"]["microbatch_size"]
        if old_size != state.manifest["settings"]["microbatch_size"]:
            state.microbatch_size = self._microbatch_size
        for name, idx, key in _changed(old_manifest["optimizers"], state.manifest["optimizers"]):
            group = state.optimizers[name].param_groups[idx]
            if key == "lr":
                self._restore_rate(name, idx, group)
            else:
                group[key] = self._groups[name][idx][key]
        for schedule, course in zip(self._schedules(), self._courses, strict=True):
            schedule.follow(course)

    def _restore_rate(self, optimizer_name: str, idx: int, group: dict[str, Any]) -> None:
        """Restores the learning rate of a loaded parameter group, and the base rate of its schedulers."""
        new_group = self._groups[optimizer_name][idx]
        rate = new_group.get("initial_lr", new_group["lr"])
        loaded_rate = group.get("initial_lr")
        factor = group["lr"] / loaded_rate if loaded_rate else 1.0
        group["lr"] = rate * factor
        if loaded_rate is not None:
            group["initial_lr"] = rate
        for name, scheduler in self._schedulers:
            if name != optimizer_name:
                continue
            # SequentialLR and ChainedScheduler have no base_lrs, but schedulers that have (private,
            # torch 2.13).
            for inner_scheduler in (scheduler, *getattr(scheduler, "_schedulers", ())):
                if hasattr(inner_scheduler, "base_lrs"):
                    inner_scheduler.base_lrs[idx] = rate

    def _schedules(self) -> list[Schedule]:
        """Returns the schedulers from `eventloop.schedules`, which compute a rate from its course."""
        return [scheduler for _, scheduler in self._schedulers if isinstance(scheduler, Schedule)]
