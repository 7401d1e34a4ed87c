"""The records that the steps pass to each other: plain data."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from importlib_metadata import EntryPoint

from eventloop.config.plugin_flags import Cause, Local
from eventloop.errors import EventloopError, PluginError, Wording
from eventloop.fixes import switch_off
from eventloop.plugin.plugin_attributes import PluginFacts, facts_of

Role = Literal["task", "algorithm", "callback", "core", "command", "storage", "option"]
Status = Literal["active", "off"]
FROM_ENTRY_POINT = "entry point"
GROUPS: dict[str, Role] = {"eventloop.algorithms": "algorithm", "eventloop.callbacks": "callback"}
GROUP_OF: dict[str, str] = {role: group for group, role in GROUPS.items()}
# What packages add beside plugins: it is imported when it is used, and takes part in no run by itself.
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
        entry_point: where its object is found.
        distribution: the name of its distribution; "" for a file, or if the metadata is missing.
        version: that distribution's version.
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
        """How to continue without it, for messages."""
        if self.local is None:
            return "switch the plugin off with " + switch_off(self.name)
        return self.local.way_out

    @property
    def origin(self) -> str:
        """The plugin as messages name it: `mixup (eventloop-mixup 0.1.0)`."""
        if not self.distribution:
            return f"{self.name} ({self.entry_point.value})"
        return f"{self.name} ({self.distribution} {self.version})"

    def problem(self, what: str, fix: str, **at: str) -> PluginError:
        """Returns what is wrong with it; see `Plugin.problem`."""
        return PluginError(what, subjects=[self], plugin=self.origin, **at, fix=fix)


@dataclass(frozen=True)
class Unread:
    """A distribution that can't be read, so its plugins aren't known.

    Args:
        name: of the distribution, or of its folder.
    """

    name: str


@dataclass(frozen=True)
class FlagPlugin:
    """A plugin that a flag of the command adds.

    Args:
        target: the plugin.
        flag: as typed, `--dry-run`.
    """

    target: object
    flag: str


@dataclass(frozen=True)
class Plugin:
    """An active plugin: an object with hook implementations.

    Args:
        name: as the user types it.
        role: decides its position in the order and whether it can change the State.
        target: the instance or module whose methods are called.
        distribution, version: of its package; "" for an object passed in Python.
        source: where it is from, for messages: "entry point", "Trainer(callbacks=...)".
        by: what passed it, if it wasn't discovered.
        options: its options, without defaults.
        found: the discovered plugin, if it is from an entry point.
    """

    name: str
    role: Role
    target: object
    distribution: str = ""
    version: str = ""
    source: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    found: Found | None = None
    by: Literal["Trainer", "Task", "flag"] = "Trainer"

    @property
    def origin(self) -> str:
        """The plugin as messages name it: `mixup (eventloop-mixup 0.1.0)`."""
        if self.distribution:
            return f"{self.name} ({self.distribution} {self.version})"
        return f"{self.name} ({self.source})" if self.source else self.name

    @functools.cached_property
    def facts(self) -> PluginFacts:
        """Its facts."""
        return facts_of(self.target)

    @property
    def way_out(self) -> str:
        """How to continue without it, for messages; "" for the task and the core."""
        if self.role in ("task", "core"):
            return ""
        if self.source == FROM_ENTRY_POINT:
            return "switch the plugin off with " + switch_off(self.name)
        if self.found is not None:
            return self.found.way_out
        if self.by == "flag":
            return f"leave `{self.source}` out"
        if self.by == "Task":
            flag = f"run with {switch_off(self.name).shell}, or "
            return Wording("", flag) + f"leave it out of Task({self.role}s=[...])"
        return f"leave the plugin out of `{self.role}s=[...]`"

    def fix(self, how: str) -> str:
        """Returns what to do: fix it, or continue without it if possible."""
        return how + ", or " + self.way_out if self.way_out else how

    def problem(self, what: str, fix: str, where: str = "", **at: str) -> PluginError:
        """Returns a problem with it.

        Args:
            fix: what to do, besides continuing without it.
            where: in which of its methods.
            at: further fields of the message.
        """
        who = ", ".join(filter(None, [self.origin, where]))
        return PluginError(what, subjects=[self], plugin=who, **at, fix=self.fix(fix))


@dataclass(frozen=True)
class Candidate:
    """A discovered plugin on its way into a run.

    Args:
        status: "active", or "off"; a dormant one is off.
        reason: why it is off, or why it is on without autoload; "" if it is on because it is
            installed.
        kind, fix: what decided, and how to undo it; see `Reason`.
        target: the entry point's object; None if it wasn't or couldn't be imported.
        plugin: the built plugin, if it could be built.
        problems: the errors of this plugin.
    """

    found: Found
    status: Status
    reason: str = ""
    kind: Cause = ""
    fix: str = ""
    target: object = None
    plugin: Plugin | None = None
    problems: tuple[EventloopError, ...] = ()
