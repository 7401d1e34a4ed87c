"""Where the random generators of a rank stand, as a checkpoint keeps it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from eventloop.generators import global_generators, put, standing_of

if TYPE_CHECKING:
    from eventloop.state import State


def generators_of(state: State) -> dict[str, Any]:
    """Gives where the generators of this rank stand: those of the host, the device, the plugins."""
    standing: dict[str, Any] = {
        "host": {name: standing_of(one) for name, one in global_generators().items()},
        "named": {name: one.get_state() for name, one in state.generators().items()},
    }
    if state.device.type == "cuda":
        standing["device"] = torch.cuda.get_rng_state(state.device)
    return standing


def put_generators(state: State, standing: Mapping[str, Any]) -> None:
    """Lets the generators of this rank go on from where `generators_of` found them.

    On a device of another kind its generators begin anew.
    """
    if "numpy" in standing["host"]:
        importlib.import_module("numpy")
    for name, one in global_generators().items():
        if name in standing["host"]:
            put(one, standing["host"][name])
    if "device" in standing and state.device.type == "cuda":
        torch.cuda.set_rng_state(standing["device"], state.device)
    for name, one in standing["named"].items():
        generator = state.generator(name)
        if one.shape == generator.get_state().shape:
            generator.set_state(one)
