"""Whether the slices in several files make up whole tensors: each entry once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from eventloop.checkpoint.tensors import Entry
from eventloop.files.disk import CorruptFileError

_Place = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and shape


class Slices:
    """Where the slices of a part's tensors stand, as the headers of its files say."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._places: dict[str, list[_Place]] = {}

    def add(self, entries: Mapping[str, Entry]) -> None:
        """Adds what the header of a file says.

        Raises:
            CorruptFileError: a tensor isn't the one that another file has slices of.
        """
        for name, entry in entries.items():
            kind = (entry.dtype, entry.whole)
            if self._kinds.setdefault(name, kind) != kind:
                raise CorruptFileError(f"its slice of {name[:80]!r} is one of another tensor")
            if math.prod(entry.shape):
                self._places.setdefault(name, []).append((entry.offsets, entry.shape))

    def require_whole(self) -> None:
        """Makes sure that each entry of each tensor is in one slice.

        Raises:
            CorruptFileError: one is in none, or in two.
        """
        for name, (_, whole) in self._kinds.items():
            places = self._places.get(name, [])
            if sum(math.prod(shape) for _, shape in places) != math.prod(whole):
                raise CorruptFileError(f"the slices don't make up all of {name[:80]!r}")
            if _overlap(places):
                raise CorruptFileError(f"two slices of {name[:80]!r} overlap")


def _overlap(places: Sequence[_Place]) -> bool:
    """Returns whether two boxes share an entry."""
    if len(places) < 2 or not places[0][0]:
        return len(places) > 1
    # Along the dimension that tells most of them apart, a few are open at a time.
    num_starts = [len({place[0][dim] for place in places}) for dim in range(len(places[0][0]))]
    along = num_starts.index(max(num_starts))
    open_now: list[_Place] = []
    for place in sorted(places, key=lambda one: one[0][along]):
        start = place[0][along]
        open_now = [one for one in open_now if one[0][along] + one[1][along] > start]
        if any(_meet(place, one) for one in open_now):
            return True
        open_now.append(place)
    return False


def _meet(one: _Place, other: _Place) -> bool:
    dims = zip(*one, *other, strict=True)
    return all(a < b + num_b and b < a + num_a for a, num_a, b, num_b in dims)
