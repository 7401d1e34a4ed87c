"""Step 2, select: which of the found plugins take part, and why the others don't."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eventloop.errors import PluginError, UsageError, closest, raise_all
from eventloop.plugin.records import Found, Selected, fold

RESERVED = ("task", "core")
_NAME = re.compile(r"[A-Za-z0-9]+(?:[-_]?[A-Za-z0-9]+)*")


@dataclass(frozen=True)
class Choice:
    """Which plugins a person wants.

    Args:
        insist: names given with `-p NAME`.
        off: names given with `-p no:NAME`.
        autoload: whether plugins take part because they are installed.
        autoload_reason: what said so, as the reason why a plugin is off.
    """

    insist: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    autoload: bool = True
    autoload_reason: str = ""

    @classmethod
    def parse(cls, values: Iterable[str]) -> Choice:
        """Reads the values of `-p`: `NAME` or `no:NAME`.

        Raises:
            UsageError: a value has no name, or one name is both wanted and not.
        """
        insist: dict[str, str] = {}
        off: dict[str, str] = {}
        for value in values:
            name = value.removeprefix("no:")
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
        return cls(tuple(insist.values()), tuple(off.values()))


def select(found: Sequence[Found], choice: Choice) -> tuple[Selected, ...]:
    """Decides for every found plugin whether it takes part.

    Raises:
        UsageError: the choice names a plugin that isn't installed.
        PluginError: two plugins that would take part have one name, or one has a name that can't
            be used; all such problems at once.
    """
    selected = decide(found, choice)
    raise_all(list(dict.fromkeys(name_problems(selected).values())))
    return selected


def decide(found: Sequence[Found], choice: Choice) -> tuple[Selected, ...]:
    """Decides as `select` does, whatever the plugins are called.

    Raises:
        UsageError: the choice names a plugin that isn't installed.
    """
    names = {fold(one.name): one.name for one in found}
    for name in (*choice.insist, *choice.off):
        if fold(name) not in names:
            raise UsageError(
                f"no plugin is named {name!r}{closest(name, sorted(names.values()))}",
                fix="list what is installed with `eventloop plugins`",
            )
    return tuple(_decide(one, choice) for one in found)


def name_problems(selected: Iterable[Selected]) -> dict[Found, PluginError]:
    """Finds the plugins that would take part under a name that can't be theirs."""
    by_name: dict[str, list[Found]] = {}
    for one in selected:
        if one.status == "active":
            by_name.setdefault(fold(one.found.name), []).append(one.found)
    problems = {}
    for name, group in by_name.items():
        problem = None
        if len(group) > 1:
            problem = _several(group)
        elif name in RESERVED or not _NAME.fullmatch(group[0].name):
            problem = _unusable(group[0])
        if problem is not None:
            problems.update(dict.fromkeys(group, problem))
    return problems


def _decide(found: Found, choice: Choice) -> Selected:
    name = fold(found.name)
    if name in map(fold, choice.off):
        return Selected(found, "off", f"-p no:{found.name}")
    if choice.autoload:
        return Selected(found, "active")
    if name in map(fold, choice.insist):
        return Selected(found, "active", f"-p {found.name}")
    return Selected(found, "off", choice.autoload_reason)


def _several(group: Sequence[Found]) -> PluginError:
    origins = [f"{one.distribution} {one.version}" for one in group]
    removal = " or ".join(f"`pip uninstall {one.distribution}`" for one in group)
    return PluginError(
        f"{len(group)} plugins are named {group[0].name!r}: {' and '.join(origins)}",
        fix=f"keep one with {removal}, or switch all off with `-p no:{group[0].name}`",
    )


def _unusable(found: Found) -> PluginError:
    return PluginError(
        f"a plugin can't be named {found.name!r}: names are letters, digits and single dashes, "
        f"and {' and '.join(RESERVED)} stand for something else",
        plugin=found.origin,
        fix=f"rename its entry point, or switch the plugin off with `-p no:{found.name}`",
    )
