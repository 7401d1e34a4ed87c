"""Walks over an object graph without running properties, `__getattr__` or other code of the objects."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from eventloop.object_state.attributes import Location
from eventloop.object_state.entering import PLAIN_TYPES, has_identity, is_entered
from eventloop.object_state.parts import locations_in
from eventloop.rng import objects_of_global_generators

# A walk over this many objects takes half a second, and each checkpoint needs a walk.
MAX_OBJECTS = 20_000


class Walk(NamedTuple):
    """The result of a walk.

    Attributes:
        locations: the visited locations by path, those near the roots first.
        objects: all objects that were entered or can be changed in place, by path.
        beyond: locations that weren't visited, because `MAX_OBJECTS` objects had been entered.
    """

    locations: dict[str, Location]
    objects: dict[str, Any]
    beyond: Collection[Location] = ()


def where_most_are(paths: Collection[str]) -> str:
    """Returns the longest path with which more than half of the paths begin."""
    steps = [re.findall(r"\[[^\]]*\]|[.:]?[^.:\[]+", path) for path in paths]
    prefix: list[str] = []
    while steps:
        step, count = Counter(path[len(prefix)] for path in steps).most_common(1)[0]
        if 2 * count <= len(paths):
            break
        prefix.append(step)
        steps = [path for path in steps if path[: len(prefix)] == prefix and path[len(prefix) :]]
    return "".join(prefix)


def walk(
    roots: Mapping[str, Any], excluded: Collection[int] = (), paths: Mapping[int, str] | None = None
) -> Walk:
    """Visits each object once, breadth first.

    Args:
        roots: objects by name; paths begin with the names.
        excluded: ids of objects that aren't entered unless they are roots.
        paths: known paths by the objects' ids; these objects keep their paths wherever they are found.
    """
    paths = paths or {}
    locations: dict[str, Location] = {}
    objects: dict[str, Any] = {}
    # Not the global generators, which are saved in another part of a checkpoint. A bound method such as
    # `random.random` leads to them.
    visited = set(map(id, objects_of_global_generators()))
    excluded = set(excluded) - set(map(id, roots.values()))
    waiting = deque(Location(name, "", root) for name, root in roots.items())
    num_entered = 0
    # Breadth first, so that only the most deeply nested objects are beyond the limit.
    while waiting and num_entered < MAX_OBJECTS:
        location = waiting.popleft()
        value = location.value
        existing = locations.get(location.path)
        # A compiled module has the same path as the module before compilation.
        if existing and existing.value is not value and location.owner != location.path:
            location = location._replace(path=_unique_path(location.path, locations))
        locations[location.path] = location
        if type(value) in PLAIN_TYPES or id(value) in visited or id(value) in excluded:
            continue
        enters = is_entered(value)
        if enters or has_identity(value):
            visited.add(id(value))
            path = paths.get(id(value), location.path)
            objects[path] = value
            if enters:
                num_entered += 1
                waiting.extend(locations_in(value, path))
    return Walk(locations, objects, waiting)


def _unique_path(path: str, locations: Collection[str]) -> str:
    """Returns a path with a number, for example for classes with the same name, or equal labels of keys."""
    number = 2
    while f"{path}#{number}" in locations:
        number += 1
    return f"{path}#{number}"
