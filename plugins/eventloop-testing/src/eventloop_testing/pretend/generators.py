"""Random numbers of the pretend device: another sequence than the host's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from eventloop_testing.pretend.private import key_of_generator, selected


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
        return selected()


# Operators are handed another object for the same generator.
_of_device: weakref.WeakValueDictionary[int, Generator] = weakref.WeakValueDictionary()
DEFAULT = Generator()
is_hosts = False  # whether what is given no generator draws from the host's


def is_of_device(generator: torch.Generator) -> bool:
    """Whether a generator is one of the pretend device."""
    return key_of_generator(generator) in _of_device


def default() -> torch.Generator:
    """Returns the generator that is used when none is passed."""
    return torch.default_generator if is_hosts else DEFAULT


def get_rng_state(device: Any = None) -> Tensor:
    """Returns the state of the device's own generator."""
    return default().get_state()


def set_rng_state(new_state: Tensor, device: Any = None) -> None:
    """Puts the device's own generator into a state."""
    default().set_state(new_state)


def manual_seed(seed: int) -> None:
    """Seeds the device's own generator, as `torch.manual_seed` does."""
    default().manual_seed(seed)


@contextmanager
def drawing_from_host(is_on: bool) -> Iterator[None]:
    """Has the device draw from the host's generator inside its `with`, if it is on."""
    global is_hosts
    before, is_hosts = is_hosts, is_on
    try:
        yield
    finally:
        is_hosts = before


@contextmanager
def in_place_of_the_hosts() -> Iterator[None]:
    """Has operators that take no generator draw from the device's."""
    if is_hosts:
        yield
        return
    saved = torch.get_rng_state()
    torch.set_rng_state(DEFAULT.get_state())
    try:
        yield
    finally:
        DEFAULT.set_state(torch.get_rng_state())
        torch.set_rng_state(saved)
