"""How a run starts: anew, or from a checkpoint; the two have the same methods."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eventloop.checkpoint.saved_tensors import read_all
from eventloop.checkpoint.schema import require_usable
from eventloop.checkpoint.verifying import why_passed_over
from eventloop.clock import Time
from eventloop.config.choice import Reason
from eventloop.errors import ResumeError
from eventloop.naming import fold
from eventloop.run.checks import warn_of_doubts
from eventloop.run.differences import config_differences, plugin_differences, task_differences
from eventloop.run.made_with import MadeWith
from eventloop.text import allowing, pip
from eventloop.training.entry import AfterCheckpoint

if TYPE_CHECKING:
    from eventloop.checkpoint.format import Checkpoint
    from eventloop.config.configuration import Configuration
    from eventloop.run.runtime import Run
    from eventloop.urls import Place


@dataclass(frozen=True)
class Allowed:
    """What may differ from the run that a checkpoint is of.

    Args:
        config_change: whether settings, options, task and optimizers may.
        plugin_change: algorithms whose version may.
        missing_plugin: algorithms that may be gone; what they kept stays for later checkpoints.
    """

    config_change: bool = False
    plugin_change: tuple[str, ...] = ()
    missing_plugin: tuple[str, ...] = ()


NOTHING = Allowed()


class Start:
    """How a run starts: here, from its beginning.

    Args:
        note: what the header says of it, if anything.

    Attributes:
        duration: the length of the run when it was begun, which fractions are of; None if unknown.
        resumed: the checkpoint that the run goes on from, by its path; None for one that begins.
        changes: what differs from the run as it was begun, complete once it is loaded.
        stop_reason: why the run was stopped, if nothing was left to do.
    """

    duration: Time | None = None
    resumed: str | None = None
    changes: Sequence[str] = ()
    stop_reason: str | None = None

    def __init__(self, note: str = "") -> None:
        self._note = note

    @property
    def notes(self) -> tuple[str, ...]:
        """What the header says of it."""
        return (self._note,) if self._note else ()

    def narrowed(self, configuration: Configuration) -> Configuration:
        """Returns the configuration with the plugins that belong to the run."""
        return configuration

    def check(self, manifest: Mapping[str, Any]) -> None:
        """Refuses a run that is made of something else.

        Raises:
            ResumeError: it is, with what differs.
        """

    def load(self, run: Run) -> None:
        """Puts the run, which is built, where it goes on; refuses other optimizers, as `check` does."""
        warn_of_doubts(run.state, run.loop.feeds.current.doubts)


class FromCheckpoint(Start):
    """A run that goes on.

    Args:
        checkpoint: verified.
        allowed: what may differ.
        refused: newer checkpoints that aren't used, each with the reason.
        place: where it is, if that was read from a copy.

    Raises:
        CheckpointError: it lacks something, or holds what no run would have written.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        allowed: Allowed,
        refused: Sequence[tuple[Place, str]] = (),
        place: Place | None = None,
    ) -> None:
        require_usable(checkpoint)
        self._place = place or checkpoint.path
        self._facts = checkpoint.facts
        # Given up when the run has been loaded: they take as much memory as the run itself.
        self._parts: Mapping[str, Any] | None = checkpoint.parts
        self._then: Mapping[str, Any] = checkpoint.facts["manifest"]
        self._allowed = allowed
        self._refused = tuple(refused)
        self._missing: list[Mapping[str, Any]] = []
        # That of then: an extension bends no schedule.
        duration = self._facts["duration"]
        self.duration = None if duration is None else Time(duration)
        self.resumed = str(self._place)
        self.changes: list[str] = []
        is_finished = checkpoint.parts["training"]["loop"]["is_finished"]
        if is_finished and self._facts.get("status") != "interrupted":
            self.stop_reason = self._facts["stop_reason"]

    @property
    def notes(self) -> tuple[str, ...]:
        """What the header says: where the run goes on, what isn't used, what has changed."""
        at = self._facts["moment"]
        return (
            *(f"{path.name} isn't used: {why}" for path, why in self._refused),
            f"resumed: {self._place}, epoch {at['epoch']}, batch {at['batch']}",
            *(f"{self._place.name}: {why}" for why in [why_passed_over(self._facts)] if why),
            *(f"changed since the run began: {one}" for one in self.changes),
            *(
                f"{one['name']} isn't here; what it kept stays in the checkpoints"
                for one in self._missing
            ),
        )

    def narrowed(self, configuration: Configuration) -> Configuration:
        """Keeps algorithms out that weren't there when the run began."""
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
                **self._diff([*versions.values()]),
                fix="install those versions, or go on with these: "
                f"{allowing('plugin_change', next(iter(versions)))}",
            )
        settings = config_differences(self._then, manifest, "settings")
        task = task_differences(self._then["task"], manifest["task"])
        self._refuse([*settings, *task, *options])

    def load(self, run: Run) -> None:
        """Calls `before_load`, then restores everything; the generators when the loop continues."""
        state, hooks, loop, capture = run.state, run.active.plans, run.loop, run.capture
        self._refuse(list(config_differences(self._then, state.manifest, "optimizers")))
        state.manifest = {**state.manifest, "absent": list(self._missing)}
        parts, self._parts = self._parts, None
        assert parts is not None
        hooks.before_load(state)
        missing = {fold(one["name"]) for one in self._missing}
        kept = {name: one for name, one in parts["plugins"].items() if name in missing}
        capture.plugins.kept = read_all(kept)
        made = MadeWith(state)
        capture.put(state, parts)
        if loop.feeds.was_rebuilt:
            loop.feeds.take(state, hooks.build_train_dataloader(state))
        capture.put_own(state, parts)
        if self._allowed.config_change:
            made.restore(state, self.changes)
        is_in_epoch = loop.feeds.current.under_way
        # Of a run that is over, until it is extended to another end.
        if found := self._then.get("tested"):
            state.manifest = {**state.manifest, "tested": found}
            name = found["checkpoint"]
            run.best_weights.lent = None if name is None else self._place.parent / name
        loop.entry = AfterCheckpoint(hooks, is_in_epoch, capture.generators.go_on)

    def _check_missing(self, manifest: Mapping[str, Any]) -> None:
        now = {fold(one["name"]): one for one in manifest["plugins"]}
        off = {fold(one["name"]): one for one in manifest["off"]}
        for one in self._algorithms():
            name = fold(one["name"])
            if name in now:
                continue
            if name in off:
                reason = off[name]["reason"]
                self._refuse([f"{one['name']}: active -> off ({reason})"])
            elif name in map(fold, self._allowed.missing_plugin):
                self._missing.append(one)
            else:
                get = f"bring it as before, by {one['source']}"
                if one["distribution"]:
                    get = pip("install", f"{one['distribution']}=={one['version']}")
                raise ResumeError(
                    f"the run was begun with {one['name']}, which isn't here",
                    checkpoint=self._place,
                    fix=f"{get}, or go on without it: {allowing('missing_plugin', one['name'])}",
                )
        known = {fold(one["name"]) for one in self._algorithms()}
        new = [one for name, one in now.items() if name not in known]
        self.changes += [f"{one['name']} takes part" for one in new if one["role"] == "algorithm"]

    def _algorithms(self) -> Iterator[Mapping[str, Any]]:
        there = (one for one in self._then["plugins"] if one["role"] == "algorithm")
        return itertools.chain(there, self._then.get("absent", ()))

    def _refuse(self, differences: list[str]) -> None:
        if not differences:
            return
        if self._allowed.config_change:
            self.changes += differences
            return
        raise ResumeError(
            "the run was begun with another configuration",
            **self._diff(differences),
            fix="start it as it was begun, begin a new one in another run_dir, or go on with the "
            f"change: {allowing('config_change')}",
        )

    def _diff(self, lines: Sequence[str]) -> dict[str, Any]:
        listed = "\n    ".join(["", *lines]) if len(lines) > 1 else lines[0]
        return {"checkpoint": self._place, "changed": listed}
