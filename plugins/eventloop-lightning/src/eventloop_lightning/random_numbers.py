"""States of the global random generators, including every accelerator's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# Private: Python's, NumPy's, torch's and CUDA's (lightning 2.6.6).
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states


def rng_states() -> dict[str, Any]:
    """Returns the states of the global generators."""
    states = _collect_rng_states()
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and not states.get(f"torch.{device.type}"):
        states["accelerator"] = torch.get_device_module(device).get_rng_state()
    return states


def set_rng_states(states: Mapping[str, Any]) -> None:
    """Restores states from `rng_states`."""
    _set_rng_states(dict(states))
    if "accelerator" in states:
        torch.get_device_module().set_rng_state(states["accelerator"])
