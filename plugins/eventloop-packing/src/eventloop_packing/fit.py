"""Best fit: which documents go into one pack."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any


def best_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Packs documents, the longest first, each into the pack with the least room that takes it.

    Args:
        lengths: tokens of each document.
        max_tokens: of a pack at most.

    Returns:
        The indices in each pack, those of a pack in their own order; so are the packs, by their first.

    Raises:
        ValueError: a length isn't between 1 and `max_tokens`.

    Source: Johnson 1973, "Near-optimal bin packing algorithms"; for language models Ding et al. 2024,
    arXiv:2404.10830.
    """
    for idx, length in enumerate(lengths):
        require_fits(length, max_tokens, f"document {idx}")
    packs: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # packs with so much room, by their numbers
    rooms: list[int] = []  # the keys, sorted
    for idx in sorted(range(len(lengths)), key=lambda idx: -lengths[idx]):
        at = bisect.bisect_left(rooms, lengths[idx])
        if at == len(rooms):
            number, room = len(packs), max_tokens
            packs.append([])
        else:
            room = rooms[at]
            number = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        packs[number].append(idx)
        room -= lengths[idx]
        if room:
            if room not in by_room:
                bisect.insort(rooms, room)
            by_room.setdefault(room, []).append(number)
    return sorted(sorted(pack) for pack in packs)


class OpenPacks:
    """Packs that are being filled, of a stream whose documents aren't known beforehand.

    A document goes into the open pack with the least room that takes it. Where none does, a new one is
    opened; where too many are open, the fullest is closed first.

    Args:
        max_tokens: of a pack at most.
        num_open: how many packs may be open.
    """

    def __init__(self, max_tokens: int, num_open: int) -> None:
        self._max_tokens, self._num_open = max_tokens, num_open
        self._packs: list[tuple[int, list[Any]]] = []  # the room of each, and its documents

    def add(self, document: Any, length: int) -> list[list[Any]]:
        """Puts a document into a pack; returns the packs that are closed by it, 2 at most."""
        closed = []
        fits = [at for at, (room, _) in enumerate(self._packs) if room >= length]
        if fits:
            room, pack = self._packs.pop(min(fits, key=lambda at: self._packs[at][0]))
        else:
            if len(self._packs) == self._num_open:
                fullest = min(range(self._num_open), key=lambda at: self._packs[at][0])
                closed.append(self._packs.pop(fullest)[1])
            room, pack = self._max_tokens, []
        pack.append(document)
        if room == length:
            closed.append(pack)
        else:
            self._packs.append((room - length, pack))
        return closed

    def close(self) -> list[list[Any]]:
        """Returns the open packs, in the order in which they were filled last; none is left."""
        packs, self._packs = [pack for _, pack in self._packs], []
        return packs

    def state_dict(self) -> list[Any]:
        """Returns the room and the documents of each open pack."""
        return [[room, list(pack)] for room, pack in self._packs]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Restores what `state_dict` returned."""
        self._packs = [(room, list(pack)) for room, pack in state]


def require_fits(length: int, max_tokens: int, what: str) -> None:
    """Raises a ValueError if a document has no token, or more than a pack takes."""
    if not 0 < length <= max_tokens:
        raise ValueError(
            f"{what} has {length} tokens, and a pack takes 1 to max_tokens={max_tokens}: leave it out, "
            "or cut it into pieces"
        )
