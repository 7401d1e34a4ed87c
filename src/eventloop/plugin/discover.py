"""Step 1, discover: which plugins are installed, from metadata alone."""

from __future__ import annotations

from collections.abc import Iterable

import importlib_metadata
from importlib_metadata import EntryPoint

from eventloop.plugin.records import Found, Role, fold

GROUPS: dict[str, Role] = {
    "eventloop.algorithms": "algorithm",
    "eventloop.callbacks": "callback",
}


def discover(entry_points: Iterable[EntryPoint] | None = None) -> tuple[Found, ...]:
    """Finds the plugins of all installed distributions; imports none of them.

    Args:
        entry_points: where to look; all that are installed unless given.

    Returns:
        Sorted by what is found, so that the order in which the file system lists it is no matter.
    """
    if entry_points is None:
        entry_points = importlib_metadata.entry_points()
    found = [_found(point, GROUPS[point.group]) for point in entry_points if point.group in GROUPS]
    return tuple(sorted(found, key=_key))


def _found(point: EntryPoint, role: Role) -> Found:
    distribution = point.dist
    if distribution is None:
        return Found(point.name, role, point, "", "")
    return Found(point.name, role, point, distribution.name, distribution.version)


def _key(found: Found) -> tuple[str, ...]:
    return (
        fold(found.name),
        found.name,
        found.role,
        found.distribution,
        found.version,
        found.entry_point.value,
    )
