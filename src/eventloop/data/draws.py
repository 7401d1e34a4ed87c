"""Finds the generators of the host that a data set draws from, so that only these are seeded."""

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
    """Returns whether reading a data set may draw random numbers; False only for known types."""
    if parts := parts_of(dataset):
        return any(map(may_draw, parts))
    types_without_draws = (list, tuple, range, dict, Tensor, TensorDataset)
    numpy = sys.modules.get("numpy")
    return type(dataset) not in (
        types_without_draws if numpy is None else (*types_without_draws, numpy.ndarray)
    )


class Draws:
    """Calls a function with the host's generators seeded that it draws from.

    The first call finds these generators. A later call that draws from another generator is repeated
    with that generator seeded, too. Seeding all generators for each sample would take longer.

    Args:
        function_name: the name of the function, for a warning.

    Attributes:
        moved: whether the last call drew.
        seeds_all: whether all generators are seeded, regardless of the function's draws.
    """

    def __init__(self, function_name: str, *, seeds_all: bool = False) -> None:
        self._who = function_name
        self.seeds_all = seeds_all
        self._known: set[str] | None = None  # names of generators
        self.moved = False

    def run(self, read: Read, argument: Any, saved: KeptGenerators) -> Any:
        """Returns `read(argument, seed)`.

        Args:
            read: calls `seed`, if it isn't None, before it draws.
            argument: its first argument.
            saved: the RNG states before the call.
        """
        self.moved = True
        if (known_names := self._known) is None or self.seeds_all:
            moved, result = self._look(read, argument)
            self._known = moved | (known_names or set())
            return result
        seeds = [host_generators()[name].seed for name in known_names]
        proxy = _SeedProxy()
        try:
            result = proxy.call(read, argument, _together(seeds))
        except Exception:
            if not (saved.moved() | proxy.names) - known_names:
                raise
        if not (unseeded := (saved.moved() | proxy.names) - known_names):
            self.moved = bool(known_names)
            return result
        moved, result = self._look(read, argument)
        if unseeded - moved:
            warnings.warn(
                f"{self._who} drew from the generator of {' and '.join(sorted(unseeded - moved))} when a batch "
                "was read, but not when it was read again: its numbers don't depend on the run's seed; "
                "draw them in __init__, or each time a sample is read",
                stacklevel=2,
            )
        self._known = known_names | unseeded | moved
        return result

    def take_all(self) -> None:
        """Seeds all generators from now on, without checking which of them move."""
        self._known = set(host_generators())
        self.seeds_all = False

    def reads_seeds(self, read: Read, argument: Any) -> bool:
        """Returns whether the function reads seeds or states of generators that it doesn't draw from.

        Calls the function twice, with different seeds for the generators that it doesn't move. If the
        results differ, they depend on such a seed.
        """
        unmoved = host_generators().keys() - (self._known or set())

        def result_for(shift: int) -> Any:
            def seed(number: int) -> None:
                for name, generator in host_generators().items():
                    generator.seed(number + shift if name in unmoved else number)

            return read(argument, seed)

        return bool(unmoved) and not is_same(result_for(0), result_for(1))

    def _look(self, read: Read, argument: Any) -> tuple[set[str], Any]:
        """Reads with all generators seeded.

        Returns:
            The names of the generators that moved, and the result.
        """
        hosts = host_generators()
        moved = set[str]()
        seeded = dict[str, Any]()

        def note_moved() -> None:
            moved.update(
                name for name, generator in seeded.items() if hosts[name].fingerprint() != generator
            )

        def seed(number: int) -> None:
            note_moved()
            for name, generator in host_generators().items():
                generator.seed(number)
                seeded[name] = generator.fingerprint()

        proxy = _SeedProxy()
        result = proxy.call(read, argument, seed)
        note_moved()
        return moved | proxy.names, result


def _together(seeds: Sequence[Seed]) -> Seed | None:
    """Returns a function that calls all given functions; None if there are none."""
    if len(seeds) < 2:
        return seeds[0] if seeds else None

    def seed(number: int) -> None:
        for seed_generator in seeds:
            seed_generator(number)

    return seed


def is_same(result: Any, second_result: Any) -> bool:
    """Returns whether two results are bitwise equal; True if they can't be compared."""
    try:
        return bool(_bits_of(result) == _bits_of(second_result))
    except NotSavableError:
        return True


def _bits_of(result: Any) -> Any:
    """Returns a value that compares equal for bitwise equal results.

    Raises:
        NotSavableError: the result contains an object of an unknown type.
    """
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
    """Stands for torch's generator in `torch.random`, to notice reads of its seed.

    Reading a seed, as `torch.initial_seed()` does, doesn't change the generator's state.
    """

    names: frozenset[str] = frozenset()

    def call(self, read: Read, argument: Any, seed: Seed | None) -> Any:
        """Calls `read` with torch's generator replaced."""
        torch.random.default_generator = self  # type: ignore[attr-defined, assignment]
        try:
            return read(argument, seed)
        finally:
            torch.random.default_generator = torch.default_generator  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        self.names = frozenset(["torch"])
        return getattr(torch.default_generator, name)
