"""The state of Composer's objects in a checkpoint: state dicts, and attributes that they omit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer.core import Callback
from composer.core import State as ComposerState

from eventloop import CheckpointError, State
from eventloop_composer.attributes import Attributes
from eventloop_composer.encoded import decoded, encoded


class SavedState:
    """The states of algorithms, callbacks, loggers and layers.

    In addition to state dicts, it has attributes that have changed since the objects were built: those of
    algorithms, of layers (masks of gyro dropout, rates of stochastic depth) and of callbacks, except
    for wall-clock times (such as the best result that an early stopper has seen).

    Args:
        state: eventloop's State.
        theirs: Composer's State, before INIT.
        callbacks: Composer's callbacks, without loggers.
    """

    def __init__(self, state: State, theirs: ComposerState, callbacks: Sequence[Callback]) -> None:
        self._state = state
        self._theirs = theirs
        self._algorithms = Attributes(lambda: _by_place(theirs.algorithms))
        self._callbacks = Attributes(lambda: _by_place(callbacks), with_numbers=False)
        self._layers = Attributes(lambda: dict(state.model.named_modules()))

    def begin_layers(self) -> None:
        """Takes a snapshot of the layers when the model is complete."""
        self._layers.note()

    def state_dict(self) -> dict[str, Any]:
        """Returns the states, and the names of the trained parameters."""
        theirs = self._theirs
        return {
            "algorithms": _states_of(theirs.algorithms),
            "callbacks": _states_of(theirs.callbacks),
            "attributes": self._algorithms.changed() | self._callbacks.changed(),
            "layers": self._layers.changed(),
            "trained": trained_names(self._state),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores algorithms, callbacks and loggers.

        Raises:
            CheckpointError: the run had other algorithms.
        """
        theirs = self._theirs
        _put_states(theirs.algorithms, saved["algorithms"], must_be_same=True)
        _put_states(theirs.callbacks, saved["callbacks"], must_be_same=False)
        self._algorithms.put(saved["attributes"])
        self._callbacks.put(saved["attributes"])
        self.put_layers(saved)

    def put_layers(self, saved: Mapping[str, Any]) -> None:
        """Restores the layers that exist by now."""
        self._layers.put(saved["layers"])


def trained_names(state: State) -> dict[str, Any]:
    """Returns the names of the optimizers' parameters, by group, and of frozen parameters."""
    params = dict(state.model.named_parameters())
    names = {id(param): name for name, param in params.items()}
    return {
        "groups": {
            key: [
                [names[id(param)] for param in group["params"] if id(param) in names]
                for group in optimizer.param_groups
            ]
            for key, optimizer in state.optimizers.items()
        },
        "frozen": [name for name, param in params.items() if not param.requires_grad],
    }


def _by_place(objects: Sequence[Any]) -> dict[str, Any]:
    return {
        f"{idx}.{type(saved_object).__qualname__}": saved_object
        for idx, saved_object in enumerate(objects)
    }


def _states_of(objects: Sequence[Any]) -> list[Any]:
    return [
        [type(saved_object).__qualname__, encoded(_lasting(saved_object.state_dict()))]
        for saved_object in objects
    ]


def _lasting(state: Mapping[str, Any]) -> dict[str, Any]:
    """Removes a `repr` with an address, which differs between runs, and which Composer doesn't read."""
    is_address = " at 0x" in str(state.get("repr", ""))
    return {key: value for key, value in state.items() if key != "repr" or not is_address}


def _put_states(objects: Sequence[Any], saved: Sequence[Any], *, must_be_same: bool) -> None:
    names = [name for name, _ in saved]
    class_names = [type(target).__qualname__ for target in objects]
    if must_be_same and names != class_names:
        raise CheckpointError(
            f"the run was trained with the algorithms {', '.join(names) or 'none'} of Composer's, now "
            f"it has {', '.join(class_names) or 'none'}",
            fix="go on with those that it was begun with",
        )
    remaining = list(saved)
    for name, target in zip(class_names, objects, strict=True):
        saved_entry = next((entry for entry in remaining if entry[0] == name), None)
        if saved_entry is not None:
            remaining.remove(saved_entry)
            target.load_state_dict(decoded(saved_entry[1]))
