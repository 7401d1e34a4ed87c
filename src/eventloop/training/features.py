"""Features: parts of the core that are plugins, there only in runs that ask for them.

What nobody asked for costs nothing: no feature, no hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch

from eventloop.training.garbage import GarbageCollection
from eventloop.training.kernels import ChannelsLast, Deterministic, TunedConvolutions

if TYPE_CHECKING:
    from eventloop.config.settings import Settings
    from eventloop.training.precision import Precision


class Feature(Protocol):
    """A plugin of the core."""

    @property
    def note(self) -> str:
        """What the header says of it; "" for nothing."""
        ...


def features_of(
    settings: Settings, device: torch.device, precision: Precision
) -> Iterator[Feature]:
    """Gives the features that a run asks for."""
    if settings.gc_interval is not None:
        yield GarbageCollection(settings.gc_interval)
    if settings.deterministic:
        yield Deterministic(device)
        return
    if device.type == "cuda":
        yield TunedConvolutions()
    if precision.name in ("bf16", "fp16"):
        yield ChannelsLast(precision)
