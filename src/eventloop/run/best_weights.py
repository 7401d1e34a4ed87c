"""The weights of the best evaluation, lent to the model while the test sets are evaluated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from eventloop.checkpoint.capture import restore_model
from eventloop.checkpoint.weights import weights_and_states
from eventloop.run.run_manifest import tested

if TYPE_CHECKING:
    from pathlib import Path

    from eventloop.checkpoint.saver import Saver
    from eventloop.checkpoint.states import PluginStates
    from eventloop.plugin.active import ActivePlugins
    from eventloop.state import State
    from eventloop.urls import Place


class BestWeights:
    """Lends the model the weights of the best evaluation.

    Args:
        active: the plugins of the run, and their plans.
        states: what the plugins keep.
        saver: knows the checkpoint of the best evaluation.
        local: returns where a checkpoint can be read on this machine.

    Attributes:
        lent: the checkpoint whose weights the test sets had; None for the last weights.
    """

    def __init__(
        self,
        active: ActivePlugins,
        states: PluginStates,
        saver: Saver,
        local: Callable[[Place], Path],
    ) -> None:
        self._active, self._states, self._saver, self._local = active, states, saver, local
        self.lent: Place | None = None

    @contextmanager
    def __call__(self, state: State) -> Iterator[None]:
        """Lends the weights, and averages those of that moment.

        Collective: every rank must call it. Where none was kept, the model stays as it is. What the
        test sets give with them gets into the manifest of the run.
        """
        self.lent = place = self._saver.best_place(state)
        if place is None:
            yield
            state.manifest = {**state.manifest, "tested": tested(state, None)}
            return
        hooks, names = self._active.plans, self._active.assembly.exporting
        weights, states = weights_and_states(self._local(place), names)
        # As this rank has them: of shards, those that are its own.
        now = copy.deepcopy(dict(state.model.state_dict()))
        taken = self._states.take(per_rank=False).items()
        states_now = copy.deepcopy({name: one for name, one in taken if name in names})
        try:
            self._states.put(states)
            restore_model(state, hooks, weights, strict=True)
            yield
            state.manifest = {**state.manifest, "tested": tested(state, place.name)}
        finally:
            self._states.put(states_now)
            hooks.restore_model(state, now, True)
