"""Where torch's random generators stand, so that a second pass can draw what the first one drew."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Draws:
    """Where the generators stand: the host's, the device's, and others.

    Those of Python and NumPy, which layers hardly draw from, would cost more than all the rest.

    Args:
        device: where the model computes.
        others: more of torch's generators.
    """

    def __init__(self, device: torch.device, others: Iterable[torch.Generator] = ()) -> None:
        self._gpu = device if device.type == "cuda" else None
        self._of_host = torch.get_rng_state()
        self._of_gpu = None if self._gpu is None else torch.cuda.get_rng_state(self._gpu)
        self._of_others = [(one, one.get_state()) for one in others]

    def put_back(self) -> None:
        """Sets them to where they stood."""
        torch.set_rng_state(self._of_host)
        if self._gpu is not None and self._of_gpu is not None:
            torch.cuda.set_rng_state(self._of_gpu, self._gpu)
        for generator, standing in self._of_others:
            generator.set_state(standing)
