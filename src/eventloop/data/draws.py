"""Which of the host's random generators a function draws from: these alone are seeded for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from eventloop.rng import KeptGenerators, host_generators

Seed = Callable[[int], Any]


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

    def run(self, read: Callable[[Seed | None], Any], kept: KeptGenerators) -> Any:
        """Returns what `read` returns, which calls what it is given, if anything, before it draws.

        Args:
            kept: where the generators stand before it.
        """
        self.moved = True
        if (known := self._known) is None:
            self._known, found = self._look(read)
            return found
        seeds = [host_generators()[name].seed for name in known]
        with _Asked() as asked:
            try:
                found = read((lambda number: [one(number) for one in seeds]) if seeds else None)
            except Exception:
                if not (kept.moved() | asked.names) - known:
                    raise
        if not (late := (kept.moved() | asked.names) - known):
            self.moved = bool(known)
            return found
        moved, found = self._look(read)
        if late - moved:
            warnings.warn(
                f"{self._who} drew from the generator of {' and '.join(sorted(late - moved))} when a batch "
                "was read, and not when it was read again: its numbers aren't tied to the run's seed; "
                "draw them in __init__, or each time a sample is read",
                stacklevel=2,
            )
        self._known = known | late | moved
        return found

    def _look(self, read: Callable[[Seed | None], Any]) -> tuple[set[str], Any]:
        """Reads with all generators seeded; returns which of them moved, too."""
        hosts, moved, words = host_generators(), set[str](), dict[str, Any]()

        def look() -> None:
            moved.update(name for name, before in words.items() if hosts[name].words() != before)

        def seed(number: int) -> None:
            look()
            for name, one in host_generators().items():
                one.seed(number)
                words[name] = one.words()

        with _Asked() as asked:
            found = read(seed)
        look()
        return moved | asked.names, found


class _Asked:
    """Stands for torch's generator in `torch.random`: notes who asks for its seed, which moves nothing."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __enter__(self) -> _Asked:
        torch.random.default_generator = self  # type: ignore[attr-defined, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        torch.random.default_generator = torch.default_generator  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        self.names.add("torch")
        return getattr(torch.default_generator, name)
