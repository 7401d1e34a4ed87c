"""Saved states of torch's generators, so that a second pass draws the same random numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from eventloop.devices import kind_of


class Draws:
    """The saved states of the generators: the host's, the device's, and others.

    Generators of Python and NumPy, which layers rarely use, are left out: saving them would take longer
    than everything else here.

    Args:
        device: device of the model.
        extra_generators: more of torch's generators.
    """

    def __init__(
        self, device: torch.device, extra_generators: Iterable[torch.Generator] = ()
    ) -> None:
        self._kind = kind_of(device)
        self._of_host = torch.get_rng_state()
        self._of_device = self._kind.get_rng_state()
        self._of_extra = [(generator, generator.get_state()) for generator in extra_generators]

    def put_back(self) -> None:
        """Restores the saved states."""
        torch.set_rng_state(self._of_host)
        if self._of_device is not None:
            self._kind.set_rng_state(self._of_device)
        for generator, saved in self._of_extra:
            generator.set_state(saved)
