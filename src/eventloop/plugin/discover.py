"""Step 1, discover: which plugins are installed, from metadata alone."""

from __future__ import annotations

import functools
import os
import site
from collections.abc import Iterable, Iterator
from typing import Any

import importlib_metadata
from importlib_metadata import Distribution, EntryPoint

from eventloop.errors import EventloopError
from eventloop.plugin.from_file import found_in_file
from eventloop.plugin.records import GROUPS, Found, Role, fold


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
        entry_points = importlib_metadata.entry_points()
    found = [_found(point, GROUPS[point.group]) for point in entry_points if point.group in GROUPS]
    return tuple(sorted([*found, *map(found_in_file, files)], key=_key))


def discover_all(files: Iterable[str]) -> tuple[tuple[Found, ...], list[EventloopError]]:
    """Finds what is installed and what files hold, as far as it can be read.

    Returns:
        What was found, and a problem for each of the other files.
    """
    readable, problems = [], []
    for file in files:
        try:
            found_in_file(file)
        except EventloopError as error:
            problems.append(error)
        else:
            readable.append(file)
    return discover(files=readable), problems


def _found(point: EntryPoint, role: Role) -> Found:
    # Typed as less than it is by some versions of importlib_metadata.
    distribution: Any = point.dist
    if distribution is None:
        return Found(point.name, role, point, "", "")
    metadata = distribution.metadata  # is read anew each time
    marks = tuple(_marks(distribution))
    return Found(point.name, role, point, metadata["Name"], metadata["Version"], marks)


def _marks(distribution: Distribution) -> Iterator[str]:
    """Tells how a distribution came in, where that is worth a look."""
    if distribution.read_text("REQUESTED") is None and _keeps_requests(distribution):
        yield "dependency"
    location = _real(str(distribution.locate_file("")))
    if site.ENABLE_USER_SITE and location == _real(site.getusersitepackages()):
        yield "user site"
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if location in map(_real, paths):
        yield "PYTHONPATH"


@functools.lru_cache(maxsize=256)
def _real(path: str) -> str:
    return os.path.realpath(path)  # Path.resolve does the same at thrice the time


def _keeps_requests(distribution: Distribution) -> bool:
    """Tells whether the installer notes in a file REQUESTED what it was asked for, as pip does."""
    if distribution.read_text("METADATA") is None:
        return False  # no dist-info; an egg-info knows no such file
    installer = (distribution.read_text("INSTALLER") or "pip").strip()
    return installer in ("pip", "uv")


def _key(found: Found) -> tuple[str, ...]:
    return (
        fold(found.name),
        found.name,
        found.role,
        found.distribution,
        found.version,
        found.entry_point.value,
    )
