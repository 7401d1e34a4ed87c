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
    """A generator of the pretend device; made by `torch.Generator(device="pretend")`.

    It draws the same numbers as a generator of the host with the same seed.
    """

    def __new__(cls) -> Self:
        """Makes a generator with torch's default seed."""
        generator = super().__new__(cls)
        _of_device[key_of_generator(generator)] = generator
        return generator

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The pretend device."""
        return selected()


# Operators receive a different Python object for the same generator.
_of_device: weakref.WeakValueDictionary[int, Generator] = weakref.WeakValueDictionary()
DEFAULT = Generator()
is_hosts = False  # whether draws without a generator use the host's


def is_of_device(generator: torch.Generator) -> bool:
    """Whether a generator belongs to the pretend device."""
    return key_of_generator(generator) in _of_device


def default() -> torch.Generator:
    """Returns the generator that is used when none is passed."""
    return torch.default_generator if is_hosts else DEFAULT


def get_rng_state(device: Any = None) -> Tensor:
    """Returns the state of the device's own generator."""
    return default().get_state()


def set_rng_state(new_state: Tensor, device: Any = None) -> None:
    """Sets the state of the device's generator."""
    default().set_state(new_state)


def manual_seed(seed: int) -> None:
    """Seeds the device's own generator, as `torch.manual_seed` does."""
    default().manual_seed(seed)


@contextmanager
def drawing_from_host(is_on: bool) -> Iterator[None]:
    """Makes the device draw from the host's generator inside its context, if `is_on`."""
    global is_hosts
    was_hosts = is_hosts
    is_hosts = is_on
    try:
        yield
    finally:
        is_hosts = was_hosts


@contextmanager
def in_place_of_the_hosts() -> Iterator[None]:
    """Makes operators without a generator argument draw from the device's generator."""
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
