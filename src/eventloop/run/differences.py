"""Differences between a run as it began and as it is started now, and changed hyperparameters."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
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
# What changes neither the weights nor what is known of them.
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
    """What may differ from the run that a checkpoint is of.

    Args:
        config_change: whether settings, options, task and optimizers may differ.
        plugin_change: algorithms whose version may differ.
        missing_plugin: algorithms that may be missing; their state is carried over.
        lost_objects: whether the checkpoint may lack objects that the run had made or changed.
    """

    config_change: bool = False
    plugin_change: tuple[str, ...] = ()
    missing_plugin: tuple[str, ...] = ()
    lost_objects: bool = False


NOTHING: Allowed = Allowed()


def config_differences(
    then: Mapping[str, Any], now: Mapping[str, Any], section: str
) -> Iterator[str]:
    """Yields a line for each changed value in a section of the manifest.

    As in a diff: `settings.seed: 0 -> 1`. Secrets are masked in a manifest, so a changed one makes no
    difference; that there is one does.
    """
    before, after = (dict(_flat(section, one.get(section))) for one in (then, now))
    for key in sorted(before.keys() | after.keys()):
        # Checkpoints of earlier versions have secrets unmasked.
        old = shown(key, before.get(key, _NOTHING))
        new = shown(key, after.get(key, _NOTHING))
        if old != new and key.removeprefix("settings.") not in _FREE:
            yield f"{key}: {old} -> {new}"


def task_differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yields the changes of a task: its options, and the lines of its file.

    Args:
        then, now: the task in the manifests; empty if it was created in Python.
    """
    before = dict(then)
    after = dict(now)
    old = before.pop("source", "")
    new = after.pop("source", "")
    if not before or not after:
        return
    if old and new and old != new:
        del before["digest"], after["digest"]
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
        yield from (line for line in lines if not line.startswith(("---", "+++")))
    yield from config_differences({"task": before}, {"task": after}, "task")


def plugin_differences(
    then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], allowed: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Compares algorithms that are active in both.

    Args:
        allowed: names of those whose version may differ.

    Returns:
        A line for each changed version, by the algorithm's name; and one for each option.
    """
    before = {fold(one["name"]): one for one in then if one["role"] == "algorithm"}
    versions: dict[str, str] = {}
    options: list[str] = []
    for one in now:
        if (old := before.get(fold(one["name"]))) is None or one["role"] != "algorithm":
            continue
        if old["version"] != one["version"] and fold(one["name"]) not in map(fold, allowed):
            versions[one["name"]] = f"{one['name']}: {old['version']} -> {one['version']}"
        held = [
            {key: value for key, value in item["options"].items() if key not in one.get("free", ())}
            for item in (old, one)
        ]
        options += config_differences({one["name"]: held[0]}, {one["name"]: held[1]}, one["name"])
    return versions, options


def accepted(differences: Sequence[str], allowed: Allowed, place: Place) -> Sequence[str]:
    """Returns the differences from the run of a checkpoint; raises ResumeError if they aren't allowed."""
    if not differences or allowed.config_change:
        return differences
    raise ResumeError(
        "the run was begun with another configuration",
        **changed_at(place, differences),
        fix="start it as it was begun, begin a new one in another run_dir, or accept the "
        "change: " + allowing("config_change"),
    )


def changed_at(place: Place, lines: Sequence[str]) -> dict[str, Any]:
    """Returns the details of an error: the checkpoint, and a line for each change."""
    changed = "\n    ".join(["", *lines]) if len(lines) > 1 else lines[0]
    return {"checkpoint": place, "changed": changed}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _flat(f"{name}.{key}", one)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for idx, one in enumerate(value):
            yield from _flat(f"{name}.{idx}", one)
    elif value not in ({}, None):
        yield name, value


def _changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, int, str]]:
    """Yields the optimizer, the group and the name of each hyperparameter that differs."""
    for name in then.keys() & now.keys():
        pairs = zip(then[name]["groups"], now[name]["groups"], strict=True)
        for idx, (before, after) in enumerate(pairs):
            yield from ((name, idx, key) for key in after if before.get(key) != after[key])


class MadeWith:
    """Keeps what a run is made with while a checkpoint is loaded: hyperparameters, the microbatch size."""

    def __init__(self, state: State) -> None:
        self._microbatch_size = state.microbatch_size
        optimizers = state.optimizers.items()
        self._groups = {name: [dict(one) for one in each.param_groups] for name, each in optimizers}
        self._schedulers = [pair for pairs in state.schedulers.values() for pair in pairs]
        self._courses = [one.course for _, one in self._schedulers if isinstance(one, Schedule)]

    def restore(self, state: State, then: Mapping[str, Any]) -> None:
        """Restores a changed microbatch size and hyperparameters of optimizers, and all schedules.

        A learning rate keeps the factor that its schedule has reached.

        Args:
            then: the manifest of the run as it began.
        """
        one, other = (found["settings"]["microbatch_size"] for found in (then, state.manifest))
        if one != other:
            state.microbatch_size = self._microbatch_size
        for name, idx, key in _changed(then["optimizers"], state.manifest["optimizers"]):
            group = state.optimizers[name].param_groups[idx]
            made = self._groups[name][idx]
            if key != "lr":
                group[key] = made[key]
                continue
            own = group.get("initial_lr")
            rate = made.get("initial_lr", made["lr"])
            group["lr"] = rate * (group["lr"] / own if own else 1.0)
            if own is not None:
                group["initial_lr"] = rate
            for scheduler in (one for of, one in self._schedulers if of == name):
                for one in (scheduler, *getattr(scheduler, "_schedulers", ())):
                    if hasattr(one, "base_lrs"):  # SequentialLR and ChainedScheduler have none
                        one.base_lrs[idx] = rate
        followed = [one for _, one in self._schedulers if isinstance(one, Schedule)]
        for schedule, course in zip(followed, self._courses, strict=True):
            schedule.follow(course)
