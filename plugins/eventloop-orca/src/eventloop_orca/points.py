"""The points of a run, and the methods of callbacks that are called at each.

A callback is any object with some of the methods, under either naming of the document; it needn't derive
from a class of this package.
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

# Methods that only a main callback has.
OF_MAIN = (
    "on_iter_forward",
    "on_train_forward",
    "on_val_forward",
    "on_pred_forward",
    "on_iter_backward",
    "on_lr_adjust",
)
# The fallback for a method that a callback doesn't have.
_INSTEAD = {
    f"{when}_{kind}_{span}": f"{when}_{span}"
    for kind in ("train", "val", "pred")
    for span in ("epoch", "iter")
    for when in ("before", "after")
}
POINTS = ("before_run", "after_run", *_INSTEAD)
_INSTEAD |= {
    f"{when}_{span}": f"on_{span}_{suffix}"
    for span in ("run", "epoch", "iter")
    for when, suffix in (("before", "begin"), ("after", "end"))
}
_INSTEAD |= {f"on_{kind}_forward": "on_iter_forward" for kind in ("train", "val")}
_ALL = {*OF_MAIN, *_INSTEAD, *_INSTEAD.values()}

Method = Function[[Any], Any]


class Points:
    """Calls the callbacks at each point, the main callback first.

    Args:
        callbacks: callbacks in the order of their calls.

    Attributes:
        callbacks: the same, the main callback first.
        main: the main callback; None without one.

    Raises:
        PluginError: there are several main callbacks, or a callback has no method of a point.
    """

    def __init__(self, callbacks: Sequence[object]) -> None:
        for callback in callbacks:
            hints = "; ".join(_misspelt(callback))
            if not any(callable(getattr(callback, name, None)) for name in _ALL):
                raise PluginError(
                    f"the callback {type(callback).__name__} has no method of any point of a run"
                    + (f": {hints}" if hints else ""),
                    fix="give one such as before_run, after_train_iter or on_epoch_end; orca "
                    "runs classes that were written for BigDL Orca, not plugins of eventloop",
                )
            if hints:
                warnings.warn(
                    f"orca never calls a method of the callback {type(callback).__name__}: {hints}",
                    stacklevel=4,
                )
        mains = [callback for callback in callbacks if is_main(callback)]
        if len(mains) > 1:
            names = " and ".join(type(main_callback).__name__ for main_callback in mains)
            raise PluginError(
                f"{len(mains)} callbacks are main callbacks, {names}, but only one can make the "
                f"step: a main callback is what has {', '.join(OF_MAIN[:-1])} or {OF_MAIN[-1]}",
                fix="leave all but one of them out",
            )
        self.main = mains[0] if mains else None
        others = [callback for callback in callbacks if not is_main(callback)]
        self.callbacks = (*mains, *others)
        self._methods = {point: list(_methods(self.callbacks, point)) for point in POINTS}
        if self.main is not None:
            for point in OF_MAIN:
                self._methods[point] = [_method_of_main(self.main, point)]

    def call(self, point: str, runner: Any) -> None:
        """Calls every callback's method for this point."""
        for method in self._methods[point]:
            method(runner)

    def overrides(self, point: str) -> bool:
        """Whether the main callback overrides a method of MainCallback."""
        method = getattr(type(self.main), point, None)
        return method is not None and method is not getattr(MainCallback, point)


def is_main(callback: object) -> bool:
    """Whether a callback is a main callback: it has a method that only main callbacks have."""
    return any(callable(getattr(callback, name, None)) for name in OF_MAIN)


def _misspelt(callback: object) -> Iterator[str]:
    """Yields a hint for each method whose name resembles a point."""
    for name in dir(type(callback)):
        if name.startswith(("before_", "after_", "on_")) and name not in _ALL:
            suggestion = closest(name, sorted(_ALL))
            if suggestion:
                yield f"{name!r} is not a point{suggestion}"


def _methods(callbacks: Iterable[object], point: str) -> Iterator[Method]:
    for callback in callbacks:
        method = _method(callback, point)
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
    """Returns the main callback's method, or else the default of MainCallback."""
    method = _method(main, point)
    if method is None:
        method = functools.partial(getattr(MainCallback, _INSTEAD.get(point, point)), main)
    return method
