"""What a checkpoint keeps of Composer's objects: their state dicts, and what those leave out."""

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

    Beside what their state dicts hold, attributes that have changed since they were built: those of
    algorithms, of layers (masks of gyro dropout, rates of stochastic depth), and of callbacks what
    isn't a time of the day (the best result that an early stopper has seen).

    Args:
        state: ours.
        theirs: Composer's, before INIT.
        callbacks: Composer's, without loggers.
    """

    def __init__(self, state: State, theirs: ComposerState, callbacks: Sequence[Callback]) -> None:
        self._state = state
        self._theirs = theirs
        self._algorithms = Attributes(lambda: _by_place(theirs.algorithms))
        self._callbacks = Attributes(lambda: _by_place(callbacks), with_numbers=False)
        self._layers = Attributes(lambda: dict(state.model.named_modules()))

    def begin_layers(self) -> None:
        """Notes how layers are when the model is complete."""
        self._layers.note()

    def state_dict(self) -> dict[str, Any]:
        """Returns the states, and what is trained."""
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
            CheckpointError: the algorithms aren't those that the run had.
        """
        theirs = self._theirs
        _put_states(theirs.algorithms, saved["algorithms"], must_be_same=True)
        _put_states(theirs.callbacks, saved["callbacks"], must_be_same=False)
        self._algorithms.put(saved["attributes"])
        self._callbacks.put(saved["attributes"])
        self.put_layers(saved)

    def put_layers(self, saved: Mapping[str, Any]) -> None:
        """Restores layers, as far as they are there by now."""
        self._layers.put(saved["layers"])


def trained_names(state: State) -> dict[str, Any]:
    """Returns the names of what the optimizers hold, by group, and of what is frozen."""
    params = dict(state.model.named_parameters())
    names = {id(one): name for name, one in params.items()}
    return {
        "groups": {
            key: [
                [names[id(one)] for one in group["params"] if id(one) in names]
                for group in optimizer.param_groups
            ]
            for key, optimizer in state.optimizers.items()
        },
        "frozen": [name for name, one in params.items() if not one.requires_grad],
    }


def _by_place(objects: Sequence[Any]) -> dict[str, Any]:
    return {f"{idx}.{type(one).__qualname__}": one for idx, one in enumerate(objects)}


def _states_of(objects: Sequence[Any]) -> list[Any]:
    return [[type(one).__qualname__, encoded(_lasting(one.state_dict()))] for one in objects]


def _lasting(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state without what names an object by its address, which Composer doesn't read."""
    is_address = " at 0x" in str(state.get("repr", ""))
    return {key: one for key, one in state.items() if key != "repr" or not is_address}


def _put_states(objects: Sequence[Any], saved: Sequence[Any], *, must_be_same: bool) -> None:
    names = [name for name, _ in saved]
    now = [type(one).__qualname__ for one in objects]
    if must_be_same and names != now:
        raise CheckpointError(
            f"the run was trained with the algorithms {', '.join(names) or 'none'} of Composer's, now "
            f"it has {', '.join(now) or 'none'}",
            fix="go on with those that it was begun with",
        )
    left = list(saved)
    for name, one in zip(now, objects, strict=True):
        found = next((entry for entry in left if entry[0] == name), None)
        if found is not None:
            left.remove(found)
            one.load_state_dict(decoded(found[1]))
