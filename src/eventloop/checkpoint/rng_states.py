"""Where the random generators of a rank stand, as a checkpoint keeps it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from eventloop.checkpoint.schema import loading
from eventloop.generators import global_generators, put, standing_of

if TYPE_CHECKING:
    from eventloop.state import State


class Generators:
    """The random generators of this rank: those of the host, the device, the plugins.

    Those of a run that was loaded are put back when it goes on, after the events of its entry,
    which may draw. Whatever is saved before that has them where the checkpoint had them.

    Args:
        state: of the run.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._loaded: Mapping[str, Any] | None = None

    def state_dict(self) -> Mapping[str, Any]:
        """Returns where they stand, or will stand when the run goes on."""
        return _standing(self._state) if self._loaded is None else self._loaded

    def load_state_dict(self, standing: Mapping[str, Any]) -> None:
        """Takes what `state_dict` returned, for `go_on`."""
        self._loaded = standing

    def go_on(self) -> None:
        """Puts them where the checkpoint that was loaded had them, once.

        On a device of another kind its generators begin anew.

        Raises:
            CheckpointError: no generators of their kinds stand there.
        """
        if self._loaded is not None:
            with loading(f"rank{self._state.rank}.generators"):
                _put(self._state, self._loaded)
            self._loaded = None


def _standing(state: State) -> dict[str, Any]:
    standing: dict[str, Any] = {
        "host": {name: standing_of(one) for name, one in global_generators().items()},
        "named": {name: one.get_state() for name, one in state.generators().items()},
    }
    if state.device.type == "cuda":
        standing["device"] = torch.cuda.get_rng_state(state.device)
    return standing


def _put(state: State, standing: Mapping[str, Any]) -> None:
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
            put(generator, one)
