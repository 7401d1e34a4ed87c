"""Saved states of torch's generators, so that a second pass can draw what the first one drew."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from eventloop.devices import kind_of


class Draws:
    """The saved states of the generators: the host's, the device's, and others.

    Those of Python and NumPy, which layers hardly draw from, would cost more than all the rest.

    Args:
        device: where the model computes.
        others: more of torch's generators.
    """

    def __init__(self, device: torch.device, others: Iterable[torch.Generator] = ()) -> None:
        self._kind = kind_of(device)
        self._of_host = torch.get_rng_state()
        self._of_device = self._kind.get_rng_state()
        self._of_others = [(one, one.get_state()) for one in others]

    def put_back(self) -> None:
        """Sets them to where they stood."""
        torch.set_rng_state(self._of_host)
        if self._of_device is not None:
            self._kind.set_rng_state(self._of_device)
        for generator, saved in self._of_others:
            generator.set_state(saved)
