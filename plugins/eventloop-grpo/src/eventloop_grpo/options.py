"""Options of the plugin: what they may be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from eventloop_grpo.losses import LOSSES, SCALES

if TYPE_CHECKING:
    from eventloop_grpo.plugin import Grpo


def check_options(given: Grpo) -> None:
    """Checks the values.

    Raises:
        ValueError: one is out of its range.
    """
    for name, least in (
        ("num_generations", 2), ("max_tokens", 1), ("num_iterations", 1), ("steps_per_generation", 1),
    ):  # fmt: skip
        value = getattr(given, name)
        if type(value) is not int or value < least:
            raise ValueError(f"{name}={value!r} is not an int of {least} or more")
    if given.top_k is not None and given.top_k < 1:
        raise ValueError(f"top_k={given.top_k!r} is not an int of 1 or more")
    for name in ("temperature", "top_p"):
        if not 0 < getattr(given, name) < math.inf:
            raise ValueError(f"{name}={getattr(given, name)!r} isn't a positive number")
    if given.top_p > 1:
        raise ValueError(f"top_p={given.top_p!r} isn't in (0, 1]")
    if not 0 < given.epsilon < 1:
        raise ValueError(f"epsilon={given.epsilon!r} isn't in (0, 1)")
    if given.epsilon_high is not None and not given.epsilon_high > 0:
        raise ValueError(f"epsilon_high={given.epsilon_high!r} isn't a positive number")
    if not 0 <= given.beta < math.inf:
        raise ValueError(f"beta={given.beta!r} isn't a finite number of 0 or more")
    for name, value, known in (
        ("loss", given.loss_kind, LOSSES),
        ("scale_rewards", given.scale_rewards, SCALES),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, known))}")
