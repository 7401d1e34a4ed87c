"""A walk over an object graph. No property, `__getattr__` or other code of the objects runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from eventloop.object_state.attributes import Location
from eventloop.object_state.entering import PLAIN_TYPES, has_identity, is_entered
from eventloop.object_state.parts import locations_in
from eventloop.rng import objects_of_global_generators

MAX_OBJECTS = 20_000


class Walk(NamedTuple):
    """The result of a walk.

    Attributes:
        locations: by path, those near the roots first.
        objects: by path, all that were entered and all that can be changed in place.
        is_complete: whether there were at most `MAX_OBJECTS`.
    """

    locations: dict[str, Location]
    objects: dict[str, Any]
    is_complete: bool


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
        locations[location.path] = location
        value = location.value
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
    return Walk(locations, objects, not waiting)
