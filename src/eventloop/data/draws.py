"""Which data sets draw random numbers, and from which of the host's generators: these alone are seeded."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from eventloop.data.in_memory import parts_of
from eventloop.object_state.not_savable import NotSavableError
from eventloop.object_state.values import Encoder
from eventloop.rng import KeptGenerators, host_generators

Seed = Callable[[int], Any]
Read = Callable[[Any, Seed | None], Any]


def may_draw(dataset: Any) -> bool:
    """Returns whether reading a data set may draw random numbers: no, if it is known not to."""
    if parts := parts_of(dataset):
        return any(map(may_draw, parts))
    known = (list, tuple, range, dict, Tensor, TensorDataset)
    numpy = sys.modules.get("numpy")
    return type(dataset) not in (known if numpy is None else (*known, numpy.ndarray))


class Draws:
    """Seeds those of the host's generators that a function draws from.

    The first call finds them. A later one that draws from another is repeated with that one seeded.

    Args:
        who: the function, for a warning.

    Attributes:
        moved: whether the last call drew.
        seeds_all: whether all generators are seeded, whatever the function draws from.
    """

    def __init__(self, who: str, *, seeds_all: bool = False) -> None:
        self._who = who
        self.seeds_all = seeds_all
        self._known: set[str] | None = None  # names of generators
        self.moved = False

    def run(self, read: Read, what: Any, saved: KeptGenerators) -> Any:
        """Returns `read(what, seed)`; `read` calls `seed`, if it isn't None, before it draws.

        Args:
            saved: the RNG states before the call.
        """
        self.moved = True
        if (known := self._known) is None or self.seeds_all:
            moved, result = self._look(read, what)
            self._known = moved | (known or set())
            return result
        seeds = [host_generators()[name].seed for name in known]
        proxy = _SeedProxy()
        try:
            found = proxy.call(read, what, _together(seeds))
        except Exception:
            if not (saved.moved() | proxy.names) - known:
                raise
        if not (late := (saved.moved() | proxy.names) - known):
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

    def take_all(self) -> None:
        """Seeds all generators from now on, and no longer looks which of them move."""
        self._known = set(host_generators())
        self.seeds_all = False

    def reads_seeds(self, read: Read, what: Any) -> bool:
        """Returns whether the function reads seeds or states of generators that it doesn't draw from.

        Reads twice, with other seeds for the generators that don't move. If the results differ, they
        depend on one of them.
        """
        unmoved = host_generators().keys() - (self._known or set())

        def result_for(shift: int) -> Any:
            def seed(number: int) -> None:
                for name, generator in host_generators().items():
                    generator.seed(number + shift if name in unmoved else number)

            return read(what, seed)

        return bool(unmoved) and not is_same(result_for(0), result_for(1))

    def _look(self, read: Read, what: Any) -> tuple[set[str], Any]:
        """Reads with all generators seeded; returns the names of those that moved, and the result."""
        hosts = host_generators()
        moved = set[str]()
        seeded = dict[str, Any]()

        def look() -> None:
            moved.update(name for name, one in seeded.items() if hosts[name].fingerprint() != one)

        def seed(number: int) -> None:
            look()
            for name, one in host_generators().items():
                one.seed(number)
                seeded[name] = one.fingerprint()

        proxy = _SeedProxy()
        found = proxy.call(read, what, seed)
        look()
        return moved | proxy.names, found


def _together(seeds: Sequence[Seed]) -> Seed | None:
    """Returns a function that calls all of these functions; None if there is none."""
    if len(seeds) < 2:
        return seeds[0] if seeds else None

    def seed(number: int) -> None:
        for seed_generator in seeds:
            seed_generator(number)

    return seed


def is_same(result: Any, other: Any) -> bool:
    """Returns whether two results are equal to the bit; True if they can't be compared."""
    try:
        return bool(_bits_of(result) == _bits_of(other))
    except NotSavableError:
        return True


def _bits_of(result: Any) -> Any:
    """Returns a value that is equal for equal results; raises NotSavableError."""
    encoded = Encoder(lambda value: None).encode(result)

    def bits(value: Any) -> Any:
        if isinstance(value, Tensor):
            raw = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            return value.dtype, value.shape, raw.numpy().tobytes()
        if isinstance(value, dict):
            return {key: bits(entry) for key, entry in value.items()}
        return [bits(entry) for entry in value] if isinstance(value, list) else repr(value)

    return bits(encoded)


class _SeedProxy:
    """Replaces torch's generator in `torch.random`, to notice a read of its seed, which moves nothing."""

    names: frozenset[str] = frozenset()

    def call(self, read: Read, what: Any, seed: Seed | None) -> Any:
        """Reads while it is in place."""
        torch.random.default_generator = self  # type: ignore[attr-defined, assignment]
        try:
            return read(what, seed)
        finally:
            torch.random.default_generator = torch.default_generator  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        self.names = frozenset(["torch"])
        return getattr(torch.default_generator, name)
