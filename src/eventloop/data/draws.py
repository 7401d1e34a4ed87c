"""Which of the host's random generators a function draws from: these alone are seeded for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from eventloop.rng import KeptGenerators, host_generators

Seed = Callable[[int], Any]
Read = Callable[[Any, Seed | None], Any]


class Draws:
    """Seeds those of the host's generators that a function draws from.

    Its first call tells which these are. A later one that draws from another is done again, seeded.

    Args:
        who: draws, for a warning.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._known: set[str] | None = None  # by name
        self.moved = False  # by the last call

    def run(self, read: Read, what: Any, kept: KeptGenerators) -> Any:
        """Returns what `read` makes of `what`; it calls the seed that it is given, if any, before it draws.

        Args:
            kept: where the generators stand before it.
        """
        self.moved = True
        if (known := self._known) is None:
            self._known, found = self._look(read, what)
            return found
        seeds = [host_generators()[name].seed for name in known]
        asked = _Asked()
        try:
            seed = (lambda number: [one(number) for one in seeds]) if seeds else None
            found = asked.watch(read, what, seed)
        except Exception:
            if not (kept.moved() | asked.names) - known:
                raise
        if not (late := (kept.moved() | asked.names) - known):
            self.moved = bool(known)
            return found
        moved, found = self._look(read, what)
        if late - moved:
            warnings.warn(
                f"{self._who} drew from the generator of {' and '.join(sorted(late - moved))} when a batch "
                "was read, and not when it was read again: its numbers aren't tied to the run's seed; "
                "draw them in __init__, or each time a sample is read",
                stacklevel=2,
            )
        self._known = known | late | moved
        return found

    def _look(self, read: Read, what: Any) -> tuple[set[str], Any]:
        """Reads with all generators seeded; returns which of them moved, too."""
        hosts, moved, seeded = host_generators(), set[str](), dict[str, Any]()

        def look() -> None:
            moved.update(name for name, one in seeded.items() if hosts[name].fingerprint() != one)

        def seed(number: int) -> None:
            look()
            for name, one in host_generators().items():
                one.seed(number)
                seeded[name] = one.fingerprint()

        asked = _Asked()
        found = asked.watch(read, what, seed)
        look()
        return moved | asked.names, found


class _Asked:
    """Stands for torch's generator in `torch.random`: notes who asks for its seed, which moves nothing."""

    names: frozenset[str] = frozenset()

    def watch(self, read: Read, what: Any, seed: Seed | None) -> Any:
        """Reads in its presence."""
        torch.random.default_generator = self  # type: ignore[attr-defined, assignment]
        try:
            return read(what, seed)
        finally:
            torch.random.default_generator = torch.default_generator  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        self.names = frozenset(["torch"])
        return getattr(torch.default_generator, name)
