"""The plain records that the steps of a plugin's life pass to each other."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from importlib_metadata import EntryPoint

from eventloop.config.plugin_flags import Cause, Local, Reason
from eventloop.errors import EventloopError, PluginError
from eventloop.fixes import in_command, switch_off
from eventloop.plugin.plugin_attributes import PluginFacts, facts_of

Role = Literal["task", "algorithm", "callback", "core", "command", "storage", "option"]
# How far a plugin came on its way into a run. A plugin that is passed in Python begins as active.
PluginStage = Literal["chosen", "off", "loaded", "dormant", "failed", "active"]
FROM_ENTRY_POINT = "entry point"
GROUPS: dict[str, Role] = {"eventloop.algorithms": "algorithm", "eventloop.callbacks": "callback"}
GROUP_OF: dict[str, str] = {role: group for group, role in GROUPS.items()}
# Extensions that packages add besides plugins. They are imported when they are used, and aren't
# called in every run.
EXTENSIONS: dict[str, Role] = {
    "eventloop.commands": "command",
    "eventloop.storage": "storage",
    "eventloop.options": "option",
}


@dataclass(frozen=True)
class Found:
    """A plugin as described by its distribution's metadata; not imported.

    Args:
        name: the entry point's name, as its author wrote it.
        role: from the entry-point group.
        entry_point: names the plugin's class, instance or module.
        distribution: the name of its distribution; "" for a file, or if the metadata is missing.
        version: the distribution's version.
        marks: how the distribution was installed, if unusual: "dependency" (not installed by name),
            "user site", "PYTHONPATH"; for a local plugin, the file that names it.
        path: for a local plugin, the file that defines it.
        local: for a local plugin, how it was named.
        needs: the versions of torch-eventloop that its distribution requires: ">=0.1,<0.2"; "" for
            any.
    """

    name: str
    role: Role
    entry_point: EntryPoint
    distribution: str
    version: str
    marks: tuple[str, ...] = ()
    path: Path | None = None
    local: Local | None = None
    needs: str = ""

    @property
    def by_flag(self) -> bool:
        """Whether a flag `-p` names its file or module."""
        return self.local is not None and not self.local.source

    @property
    def way_out(self) -> str:
        """How to continue without this plugin, for messages."""
        if self.local is None:
            return "switch the plugin off with " + switch_off(self.name)
        return self.local.way_out

    @property
    def origin(self) -> str:
        """The plugin as messages name it: `mixup (eventloop-mixup 0.1.0)`."""
        if not self.distribution:
            return f"{self.name} ({self.entry_point.value})"
        return f"{self.name} ({self.distribution} {self.version})"

    def problem(self, message: str, fix: str, **fields: str) -> PluginError:
        """Returns an error about this plugin; see `Plugin.problem`."""
        return PluginError(message, subjects=[self], plugin=self.origin, **fields, fix=fix)


@dataclass(frozen=True)
class Unread:
    """A distribution whose entry points can't be read, so its plugins aren't known.

    Args:
        name: the name of the distribution, or of its folder.
    """

    name: str


_BY_DEFAULT = Reason("")


@dataclass(frozen=True)
class Plugin:
    """A plugin, with the stage that it has reached on its way into a run.

    A discovered plugin is chosen, loaded and built, and then active. If it doesn't take part, it
    becomes off, dormant or failed instead.

    Args:
        name: as the user types it.
        role: decides its position in the order and whether it can change the State.
        target: the instance or module whose methods are called; None until it is built.
        distribution, version: its package and the version; "" for an object passed in Python.
        source: its origin, for messages: "entry point", "Trainer(callbacks=...)".
        options: its options that differ from the defaults; empty until it is built.
        found: its metadata; None if it wasn't discovered.
        imported: the object that its entry point names, such as a class; None until it is loaded.
        by: the caller that passed it, if it wasn't discovered.
        stage: see `PluginStage`.
        reason: why it is off or dormant, or why it is on without autoload; "" if it is on because
            it is installed.
        kind: the kind of reason; see `Reason`.
        undo: how to undo the decision; see `Reason`.
        failure: the error of a failed plugin.
    """

    name: str
    role: Role
    target: object = None
    distribution: str = ""
    version: str = ""
    source: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    found: Found | None = None
    imported: object = None
    by: Literal["Trainer", "Task", "flag"] = "Trainer"
    stage: PluginStage = "active"
    reason: str = ""
    kind: Cause = ""
    undo: str = ""
    failure: EventloopError | None = None

    @classmethod
    def of(
        cls, found: Found, stage: PluginStage = "chosen", reason: Reason = _BY_DEFAULT
    ) -> Plugin:
        """Returns the record of a discovered plugin."""
        return cls(
            name=found.name,
            role=found.role,
            distribution=found.distribution,
            version=found.version,
            source=found.entry_point.value if found.path else FROM_ENTRY_POINT,
            found=found,
            stage=stage,
            reason=reason.text,
            kind=reason.kind,
            undo=reason.fix,
        )

    @property
    def by_flag(self) -> bool:
        """Whether a flag `-p` names its file or module."""
        return self.found is not None and self.found.by_flag

    @property
    def status(self) -> str:
        """The stage as commands print it: "active", "off" or "problem"."""
        if self.stage in ("off", "dormant"):
            return "off"
        return "problem" if self.stage == "failed" else "active"

    def failed(self, problem: EventloopError) -> Plugin:
        """Returns the record with the stage "failed" and its error."""
        return replace(self, stage="failed", failure=problem)

    @property
    def origin(self) -> str:
        """The plugin as messages name it: `mixup (eventloop-mixup 0.1.0)`."""
        if self.found is not None:
            return self.found.origin
        if self.distribution:
            return f"{self.name} ({self.distribution} {self.version})"
        return f"{self.name} ({self.source})" if self.source else self.name

    @functools.cached_property
    def facts(self) -> PluginFacts:
        """The attributes with which the plugin describes itself."""
        return facts_of(self.target)

    @property
    def way_out(self) -> str:
        """How to continue without this plugin, for messages; "" for the task and the core."""
        if self.role in ("task", "core"):
            return ""
        if self.source == FROM_ENTRY_POINT:
            return "switch the plugin off with " + switch_off(self.name)
        if self.found is not None:
            return self.found.way_out
        if self.by == "flag":
            return f"leave `{self.source}` out"
        if self.by == "Task":
            flag = f"run with {switch_off(self.name)}, or " if in_command() else ""
            return f"{flag}leave it out of Task({self.role}s=[...])"
        return f"leave the plugin out of `{self.role}s=[...]`"

    def fix(self, how: str) -> str:
        """Returns `how`, followed by the way to continue without this plugin, if there is one."""
        return how + ", or " + self.way_out if self.way_out else how

    def problem(self, message: str, fix: str, method: str = "", **fields: str) -> PluginError:
        """Returns an error about this plugin.

        Args:
            message: describes the problem.
            fix: how to fix it; the way to continue without the plugin is appended.
            method: the method in which it occurred: `method Ema.batch_end`.
            fields: further fields of the message.
        """
        subject = ", ".join(filter(None, [self.origin, method]))
        return PluginError(message, subjects=[self], plugin=subject, **fields, fix=self.fix(fix))
