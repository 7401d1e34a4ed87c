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
    """Why a plugin is off, or active.

    Args:
        text: as commands and headers print it.
        kind: what decided: the site's file, a rule of the configuration, a flag, the resumed run
            ("unsuitable": and the task when it began), an option that isn't set, the task, the
            version of eventloop, `autoload`.
        fix: how to undo that.
    """

    text: str
    kind: Cause = ""
    fix: str = ""


class Local(NamedTuple):
    """A plugin that isn't installed, as the user names it.

    Args:
        label: `./watch.py:Watch`, `./watch.py` or `package.module:Class`.
        source: the file with `plugins = [...]` that names it; "" for a flag.
        folder: the base of its path, also searched for its module.
    """

    label: str
    source: str = ""
    folder: Path = Path()

    def __str__(self) -> str:
        """The plugin as messages name it."""
        return f"{self.label}, named in {self.source}" if self.source else f"-p {self.label}"

    @property
    def way_out(self) -> str:
        """How to continue without it."""
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
        autoload: whether installed plugins are active by default; "callbacks": those alone.
        autoload_reason: what decided that, as the reason why a plugin is off.
        begun_with: the folded names of the algorithms that a resumed run began with; None for a
                new run.
        off_then: why others were off then, by folded name.
    """

    insist: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    autoload: bool | Literal["callbacks"] = True
    autoload_reason: str = ""
    begun_with: frozenset[str] | None = None
    off_then: Mapping[str, Reason] = field(default_factory=dict)

    def stays_out(self, found: Found) -> Reason | None:
        """Returns why an algorithm isn't part of a resumed run; None if it can be."""
        name = fold(found.name)
        if found.role != "algorithm" or self.begun_with is None or name in self.begun_with:
            return None
        way_in = shell("-p", found.name) if in_command() else f"`{found.role}s=[...]`"
        text = f"{_NOT_IN_RUN}: installed after the run began; add it with {way_in}"
        then = self.off_then.get(name)
        kind: Cause = "since"
        if then is not None and then.kind != "since":
            is_known = then.kind in ("run", "unsuitable")  # so when the run went on the last time
            text = then.text if is_known else f"{_NOT_IN_RUN}: off when it began, {then.text}"
            kind = "unsuitable" if then.kind in ("task", "unsuitable") else "run"
        return Reason(text, kind, "take it in with " + way_in)

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
                        f"-p {value} switches off what isn't installed",
                        fix="leave it out, or name a plugin",
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
    """Returns whether a label names a file or a module, and not an installed plugin."""
    return label.endswith(".py") or ":" in label
