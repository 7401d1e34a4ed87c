"""The choice of plugins by `-p`, `--no-plugins` and a resumed run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from eventloop.errors import UsageError
from eventloop.fixes import in_command, shell
from eventloop.naming import fold

if TYPE_CHECKING:
    from eventloop.plugin.records import Found

Cause = Literal[
    "", "site", "rule", "flag", "run", "since", "unsuitable", "option", "task", "version",
    "autoload",
]  # fmt: skip
_NOT_IN_RUN = "not part of this run"


class Reason(NamedTuple):
    """The reason why a plugin is off, or active.

    Args:
        text: the reason, as commands and headers print it.
        kind: the cause: the site's file, a rule of the configuration, a flag, the resumed run
            ("unsuitable": and the task when it began), an option that isn't set, the task, the
            version of eventloop, `autoload`.
        fix: how to revert it.
    """

    text: str
    kind: Cause = ""
    fix: str = ""


class Local(NamedTuple):
    """A plugin from a file or module, as the user names it, rather than from an installed package.

    Args:
        label: `./watch.py:Watch`, `./watch.py` or `package.module:Class`.
        source: the file with `plugins = [...]` that names it; "" for a flag.
        folder: the base of its path, also searched for its module.
    """

    label: str
    source: str = ""
    folder: Path = Path()

    def __str__(self) -> str:
        """Returns the name of the plugin in messages."""
        return f"{self.label}, named in {self.source}" if self.source else f"-p {self.label}"

    @property
    def way_out(self) -> str:
        """The advice for continuing without the plugin."""
        if self.source:
            return f"take {self.label!r} out of `plugins = [...]` in {self.source}"
        return f"leave {shell('-p', self.label)} out"


@dataclass(frozen=True)
class Choice:
    """The user's choice of plugins.

    Args:
        insist: names given with `-p NAME`.
        off: names given with `-p no:NAME`.
        files: values of `-p FILE.py:NAME` or `-p MODULE:NAME`, as written.
        autoload: whether installed plugins are active by default; "callbacks": only callbacks.
        autoload_reason: the flag or value that decided about `autoload`, as the reason why a plugin
            is off.
        begun_with: the folded names of the algorithms with which a resumed run began; None for a
            new run.
        off_then: the reasons why other plugins were off when the run began, by folded name.
    """

    insist: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    autoload: bool | Literal["callbacks"] = True
    autoload_reason: str = ""
    begun_with: frozenset[str] | None = None
    off_then: Mapping[str, Reason] = field(default_factory=dict)

    def stays_out(self, plugin: Found) -> Reason | None:
        """Returns the reason why an algorithm isn't part of a resumed run; None if it is, or can be."""
        name = fold(plugin.name)
        if plugin.role != "algorithm" or self.begun_with is None or name in self.begun_with:
            return None
        way_in = shell("-p", plugin.name) if in_command() else "`algorithms=[...]`"
        text = f"{_NOT_IN_RUN}: installed after the run began; add it with {way_in}"
        kind: Cause = "since"
        old_reason = self.off_then.get(name)
        if old_reason is not None and old_reason.kind != "since":
            text = f"{_NOT_IN_RUN}: off when it began, {old_reason.text}"
            if old_reason.kind in ("run", "unsuitable"):
                text = old_reason.text  # from an earlier resume, which has worded it so already
            kind = "unsuitable" if old_reason.kind in ("task", "unsuitable") else "run"
        return Reason(text, kind, "add it with " + way_in)

    @classmethod
    def parse(cls, values: Iterable[str]) -> Choice:
        """Reads the values of `-p`: `NAME`, `no:NAME`, `FILE.py:NAME`, `FILE.py`, `MODULE:NAME`.

        Raises:
            UsageError: a value has no name, or the same name is chosen and switched off.
        """
        insist: dict[str, str] = {}
        off: dict[str, str] = {}
        files: dict[str, None] = {}
        for value in values:
            name = value.removeprefix("no:")
            if is_local(name):
                if value != name:
                    raise UsageError(
                        f"-p {value} switches off a plugin that isn't installed",
                        fix="leave it out, or give the name of an installed plugin",
                    )
                files[value] = None
                continue
            if not name:
                raise UsageError(
                    f"-p {value!r} names no plugin", fix="write `-p NAME` or `-p no:NAME`"
                )
            (off if value.startswith("no:") else insist)[fold(name)] = name
        for key in insist.keys() & off.keys():
            raise UsageError(
                f"-p {insist[key]} and -p no:{off[key]} contradict each other",
                fix="leave one of them out",
            )
        return cls(tuple(insist.values()), tuple(off.values()), tuple(files))


def is_local(label: str) -> bool:
    """Whether a label names a file or a module, rather than an installed plugin."""
    return label.endswith(".py") or ":" in label
