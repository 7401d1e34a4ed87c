"""A walk over an object graph. No property, `__getattr__` or other code of the objects runs."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from eventloop.object_state.attributes import Location
from eventloop.object_state.entering import PLAIN_TYPES, has_identity, is_entered
from eventloop.object_state.parts import locations_in
from eventloop.rng import objects_of_global_generators

# A walk over so many takes half a second, and each checkpoint takes one.
MAX_OBJECTS = 20_000


class Walk(NamedTuple):
    """The result of a walk.

    Attributes:
        locations: by path, those near the roots first.
        objects: by path, all that were entered and all that can be changed in place.
        beyond: locations that weren't visited, because more than `MAX_OBJECTS` were entered.
    """

    locations: dict[str, Location]
    objects: dict[str, Any]
    beyond: Collection[Location] = ()


def where_most_are(paths: Collection[str]) -> str:
    """Returns the longest path that more than half of these paths begin with."""
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
    roots: Mapping[str, Any], apart: Collection[int] = (), paths: Mapping[int, str] | None = None
) -> Walk:
    """Visits each object once, the nearest first.

    Args:
        roots: objects by name; names begin the paths.
        apart: identities of objects that aren't entered, unless they are roots.
        paths: by identity, of objects that keep their path wherever they are now.
    """
    paths = paths or {}
    locations: dict[str, Location] = {}
    objects: dict[str, Any] = {}
    # A bound method, `random.random` for example, leads to these. Other parts of a checkpoint have them.
    seen = set(map(id, objects_of_global_generators()))
    apart = set(apart) - set(map(id, roots.values()))
    waiting = deque(Location(name, "", root) for name, root in roots.items())
    num_entered = 0
    while waiting and num_entered < MAX_OBJECTS:
        location = waiting.popleft()
        value = location.value
        homonym = locations.get(location.path)
        # A compiled module has the path of the plain module.
        if homonym and homonym.value is not value and location.owner != location.path:
            location = location._replace(path=_unique_path(location.path, locations))
        locations[location.path] = location
        if type(value) in PLAIN_TYPES or id(value) in seen or id(value) in apart:
            continue
        enters = is_entered(value)
        if enters or has_identity(value):
            seen.add(id(value))
            path = paths.get(id(value), location.path)
            objects[path] = value
            if enters:
                num_entered += 1
                waiting.extend(locations_in(value, path))
    return Walk(locations, objects, waiting)


def _unique_path(path: str, locations: Collection[str]) -> str:
    """Returns a path of its own for a class that a function makes anew, or for a key of a dict."""
    number = 2
    while f"{path}#{number}" in locations:
        number += 1
    return f"{path}#{number}"
