"""The points of a run, and whose method is called at each.

A callback is any object with some of the methods: one that comes from no class of this package,
too, and under either of the document's namings.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable as Function
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from eventloop import PluginError
from eventloop.toolbox import closest
from eventloop_orca.callbacks import MainCallback

# What alone a main callback has.
OF_MAIN = (
    "on_iter_forward",
    "on_train_forward",
    "on_val_forward",
    "on_pred_forward",
    "on_iter_backward",
    "on_lr_adjust",
)
# Which method stands in for one that a callback doesn't have.
_INSTEAD = {
    f"{when}_{kind}_{what}": f"{when}_{what}"
    for kind in ("train", "val", "pred")
    for what in ("epoch", "iter")
    for when in ("before", "after")
}
POINTS = ("before_run", "after_run", *_INSTEAD)
_INSTEAD |= {
    f"{when}_{what}": f"on_{what}_{second}"
    for what in ("run", "epoch", "iter")
    for when, second in (("before", "begin"), ("after", "end"))
}
_INSTEAD |= {f"on_{kind}_forward": "on_iter_forward" for kind in ("train", "val")}
_ALL = {*OF_MAIN, *_INSTEAD, *_INSTEAD.values()}

Method = Function[[Any], Any]


class Points:
    """Calls the callbacks at each point, the main one first.

    Args:
        callbacks: in the order in which they are called.

    Attributes:
        callbacks: the same, the main one first.
        main: the main callback; None where there is none.

    Raises:
        PluginError: several are main callbacks, or one has no point's method.
    """

    def __init__(self, callbacks: Sequence[object]) -> None:
        for one in callbacks:
            meant = "; ".join(_misspelt(one))
            if not any(callable(getattr(one, name, None)) for name in _ALL):
                raise PluginError(
                    f"the callback {type(one).__name__} has no method of any point of a run"
                    + (f": {meant}" if meant else ""),
                    fix="give one such as before_run, after_train_iter or on_epoch_end; orca "
                    "runs classes that were written for BigDL Orca, not plugins of eventloop",
                )
            if meant:
                warnings.warn(
                    f"orca never calls a method of the callback {type(one).__name__}: {meant}",
                    stacklevel=4,
                )
        mains = [one for one in callbacks if is_main(one)]
        if len(mains) > 1:
            names = " and ".join(type(one).__name__ for one in mains)
            raise PluginError(
                f"{len(mains)} callbacks are main callbacks, {names}, but one alone can make the "
                f"step: a main callback is what has {', '.join(OF_MAIN[:-1])} or {OF_MAIN[-1]}",
                fix="leave all but one of them out",
            )
        self.main = mains[0] if mains else None
        self.callbacks = (*mains, *(one for one in callbacks if not is_main(one)))
        self._methods = {point: list(_methods(self.callbacks, point)) for point in POINTS}
        if self.main is not None:
            for point in OF_MAIN:
                self._methods[point] = [_method_of_main(self.main, point)]

    def call(self, point: str, runner: Any) -> None:
        """Calls every callback's method for this point."""
        for method in self._methods[point]:
            method(runner)

    def overrides(self, point: str) -> bool:
        """Returns whether the main callback has a method of its own for a point of such ones."""
        own = getattr(type(self.main), point, None)
        return own is not None and own is not getattr(MainCallback, point)


def is_main(callback: object) -> bool:
    """Returns whether a callback is a main one: whether it has a method that those alone have."""
    return any(callable(getattr(callback, name, None)) for name in OF_MAIN)


def _misspelt(callback: object) -> Iterator[str]:
    """Yields a hint for each method whose name resembles that of a point."""
    for name in dir(type(callback)):
        if name.startswith(("before_", "after_", "on_")) and name not in _ALL:
            meant = closest(name, sorted(_ALL))
            if meant:
                yield f"{name!r} is not a point{meant}"


def _methods(callbacks: Iterable[object], point: str) -> Iterator[Method]:
    for one in callbacks:
        method = _method(one, point)
        if method is not None:
            yield method


def _method(callback: object, point: str) -> Method | None:
    """Returns the method for a point, else its fallback; None if there is neither."""
    name: str | None = point
    while name is not None:
        method: Method | None = getattr(callback, name, None)
        if method is not None:
            return method
        name = _INSTEAD.get(name)
    return None


def _method_of_main(main: object, point: str) -> Method:
    """Returns the main callback's method, else what a main callback does by default."""
    method = _method(main, point)
    if method is None:
        method = functools.partial(getattr(MainCallback, _INSTEAD.get(point, point)), main)
    return method
