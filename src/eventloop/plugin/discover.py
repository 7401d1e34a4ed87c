"""Step 1, discover: which plugins are installed, from metadata alone."""

from __future__ import annotations

from collections.abc import Iterable

from importlib_metadata import EntryPoint

from eventloop.errors import EventloopError
from eventloop.naming import fold
from eventloop.plugin.from_file import found_in_file
from eventloop.plugin.metadata import Installed, installed_entry_points, marks, name_and_version
from eventloop.plugin.records import EXTENSIONS, GROUPS, Found, Role


def discover(
    entry_points: Iterable[EntryPoint] | None = None, files: Iterable[str] = ()
) -> tuple[Found, ...]:
    """Finds the plugins of all installed distributions; imports none of them.

    Args:
        entry_points: where to look; all that are installed unless given.
        files: what was given with `-p FILE.py:NAME`; read, not run.

    Returns:
        Sorted by what is found, so that the order in which the file system lists it is no matter.

    Raises:
        UsageError: a file isn't there, or hasn't what is named.
    """
    if entry_points is None:
        entry_points, _ = installed_entry_points()
    found = [_found(point, GROUPS[point.group]) for point in entry_points if point.group in GROUPS]
    return tuple(sorted([*found, *map(found_in_file, files)], key=_key))


def discover_all(
    files: Iterable[str], installed: Installed | None = None
) -> tuple[tuple[Found, ...], list[EventloopError]]:
    """Finds what is installed and what files hold, as far as it can be read.

    Args:
        installed: what `installed_entry_points` returned, where it was asked already.

    Returns:
        What was found, and a problem for each file and distribution that can't be read.
    """
    points, unreadable = installed or installed_entry_points()
    problems = [*unreadable]
    readable = []
    for file in files:
        try:
            found_in_file(file)
        except EventloopError as error:
            problems.append(error)
        else:
            readable.append(file)
    return discover(points, readable), problems


def extensions(*groups: str, installed: Installed | None = None) -> tuple[Found, ...]:
    """Returns what packages add beside plugins, from metadata alone, sorted by name.

    Args:
        groups: the entry-point groups, `eventloop.commands` say; all of `EXTENSIONS` unless given.
        installed: what `installed_entry_points` returned, where it was asked already.
    """
    points, _ = installed or installed_entry_points()
    wanted = groups or tuple(EXTENSIONS)
    found = [_found(point, EXTENSIONS[point.group]) for point in points if point.group in wanted]
    return tuple(sorted(found, key=_key))


def _found(point: EntryPoint, role: Role) -> Found:
    if point.dist is None:
        return Found(point.name, role, point, "", "")
    name, version = name_and_version(point.dist)
    if not (name and version):  # is told of by name_problems
        return Found(point.name, role, point, "", "")
    return Found(point.name, role, point, name, version, tuple(marks(point.dist)))


def _key(found: Found) -> tuple[str, ...]:
    return (
        fold(found.name),
        found.name,
        found.role,
        found.distribution,
        found.version,
        found.entry_point.value,
    )
