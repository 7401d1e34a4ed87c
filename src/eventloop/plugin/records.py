"""What the seven steps hand to each other: plain data."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from importlib_metadata import EntryPoint

from eventloop.config.choice import Cause, Local
from eventloop.errors import EventloopError, PluginError
from eventloop.plugin.facts import PluginFacts, facts_of
from eventloop.text import is_command, switch_off

Role = Literal["task", "algorithm", "callback", "core", "command", "storage"]
Status = Literal["active", "off"]
FROM_ENTRY_POINT = "entry point"
GROUPS: dict[str, Role] = {
    "eventloop.algorithms": "algorithm",
    "eventloop.callbacks": "callback",
}
# What packages add beside plugins: it takes part in no run, and is imported when it is used.
EXTENSIONS: dict[str, Role] = {
    "eventloop.commands": "command",
    "eventloop.storage": "storage",
}


@dataclass(frozen=True)
class Found:
    """A plugin as its distribution's metadata tells of it; nothing of it is imported.

    Args:
        name: the entry point's name, as its author wrote it.
        role: from the entry-point group.
        entry_point: where its object is found.
        distribution: the name of the distribution that brought it; "" for a file, or where its
            metadata is gone.
        version: that distribution's version.
        marks: how the distribution came in, where that is worth a look: "dependency" (not
            asked for by name), "user site", "PYTHONPATH"; of a local one the file that names it.
        path: the file that defines it, of one that isn't installed.
        local: what names it, of one that isn't installed.
        needs: the versions of torch-eventloop that its distribution asks for: ">=0.1,<0.2"; "" for
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
        """How to go on without it, as messages say it."""
        if self.local is None:
            return f"switch the plugin off with {switch_off(self.name)}"
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
    """A distribution that can't be read, so that its plugins aren't known.

    Args:
        name: the distribution's, or that of its folder.
    """

    name: str


@dataclass(frozen=True)
class Selected:
    """A found plugin and whether it is to take part.

    Args:
        status: "active", or "off".
        reason: why it is off, or why it is on although autoload is off; "" where it is on
            because it is installed.
        kind, fix: what decided, and how to take that back; see `Reason`.
    """

    found: Found
    status: Status
    reason: str = ""
    kind: Cause = ""
    fix: str = ""


@dataclass(frozen=True)
class FlagPlugin:
    """A plugin that a flag of the command stands for, to be handed over like any other.

    Args:
        target: the plugin.
        flag: as typed, `--dry-run`.
    """

    target: object
    flag: str


@dataclass(frozen=True)
class Plugin:
    """A plugin that takes part: an object with hook implementations.

    Args:
        name: what a person types.
        role: decides its place in the order and whether it may change the State.
        target: the instance or module whose methods are called.
        distribution, version: where it came from; "" for an object handed over in Python.
        source: what brought it, as a person would say it: "entry point", "Trainer(callbacks=...)".
        by: what handed it over, where it wasn't discovered.
        options: its options as set, defaults left out.
        found: what was discovered, where it came from an entry point.
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
        """What it says about itself."""
        return facts_of(self.target)

    @property
    def way_out(self) -> str:
        """How to go on without it, as messages say it; "" for the task and the core."""
        if self.role in ("task", "core"):
            return ""
        if self.source == FROM_ENTRY_POINT:
            return f"switch the plugin off with {switch_off(self.name)}"
        if self.found is not None:
            return self.found.way_out
        if self.by == "flag":
            return f"leave `{self.source}` out"
        if self.by == "Task":
            flag = f"run with {switch_off(self.name)}, or " if is_command() else ""
            return f"{flag}leave it out of Task({self.role}s=[...])"
        return f"leave the plugin out of `{self.role}s=[...]`"

    def fix(self, how: str) -> str:
        """Returns what to do next: fix it, or go on without it where that is possible."""
        return f"{how}, or {self.way_out}" if self.way_out else how

    def problem(self, what: str, fix: str, where: str = "", **at: str) -> PluginError:
        """Returns what is wrong with it.

        Args:
            fix: what to do, beside going on without it.
            where: in which of its methods.
            at: what else the message names.
        """
        who = ", ".join(filter(None, [self.origin, where]))
        return PluginError(what, subjects=[self], plugin=who, **at, fix=self.fix(fix))


@dataclass(frozen=True)
class Candidate:
    """What is known of one plugin that was found.

    Args:
        selected: whether it takes part; a dormant one is off.
        target: what its entry point names; None where it wasn't or couldn't be imported.
        plugin: what takes part, where it could be built.
        problems: what keeps it, or the run, from going on.
    """

    selected: Selected
    target: object = None
    plugin: Plugin | None = None
    problems: tuple[EventloopError, ...] = ()

    @property
    def found(self) -> Found:
        """What its metadata says."""
        return self.selected.found
