"""Random numbers of the pretend device: another sequence than the host's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from eventloop_testing.pretend.private import key_of_generator


class Generator(torch.Generator):
    """A generator of the pretend device; `torch.Generator(device="pretend")` makes one.

    Its numbers are those that a generator of the host gives from the same seed.
    """

    def __new__(cls) -> Self:
        """Makes one with torch's default seed."""
        made = super().__new__(cls)
        _of_device[key_of_generator(made)] = made
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The pretend device."""
        return torch.device("pretend", 0)


# Operators are handed another object for the same generator.
_of_device: weakref.WeakValueDictionary[int, Generator] = weakref.WeakValueDictionary()
DEFAULT = Generator()


def is_of_device(generator: torch.Generator) -> bool:
    """Whether a generator is one of the pretend device."""
    return key_of_generator(generator) in _of_device


def get_rng_state(device: Any = None) -> Tensor:
    """Returns the state of the device's own generator."""
    return DEFAULT.get_state()


def set_rng_state(new_state: Tensor, device: Any = None) -> None:
    """Puts the device's own generator into a state."""
    DEFAULT.set_state(new_state)


def manual_seed(seed: int) -> None:
    """Seeds the device's own generator, as `torch.manual_seed` does."""
    DEFAULT.manual_seed(seed)


@contextmanager
def in_place_of_the_hosts() -> Iterator[None]:
    """Has operators that take no generator draw from the device's."""
    kept = torch.get_rng_state()
    torch.set_rng_state(DEFAULT.get_state())
    try:
        yield
    finally:
        DEFAULT.set_state(torch.get_rng_state())
        torch.set_rng_state(kept)
