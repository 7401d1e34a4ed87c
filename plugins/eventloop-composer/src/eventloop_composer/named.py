"""Algorithms, callbacks and loggers by name: `composer.algorithms.MixUp`, with arguments or without."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from eventloop import PluginError
from eventloop.toolbox import closest

# Where a name without a module is looked up.
_SHORT = {
    "algorithms": "composer.algorithms",
    "callbacks": "composer.callbacks",
    "loggers": "composer.loggers",
}


def objects_of(option: str, given: object, kind: type) -> list[Any]:
    """Returns the objects that an option of the plugin specifies.

    Args:
        option: its name: algorithms, callbacks or loggers.
        given: nothing, one, or several: a name, a mapping of a name and its arguments, a class, or
            an instance.
        kind: what each of them has to be.

    Raises:
        PluginError: there is nothing of a name, it can't be built, or it is something else.
    """
    if given is None:
        return []
    several = given if isinstance(given, list | tuple) else [given]
    return [_checked(option, one, built, kind) for one in several for built in _built(option, one)]


def _built(option: str, given: object) -> Iterable[object]:
    if isinstance(given, Mapping):
        for name, arguments in given.items():
            yield _called(name, _found(option, name), dict(arguments or {}))
        return
    found = _found(option, given) if isinstance(given, str) else given
    yield _called(given, found, {}) if inspect.isclass(found) else found


def _called(name: object, target: Any, arguments: dict[str, Any]) -> object:
    try:
        return target(**arguments)
    except TypeError as error:
        raise PluginError(
            f"{name} can't be built: {error}",
            fix="give its arguments, `[{composer.algorithms.MixUp: {alpha: 0.2}}]`, or an instance in "
            "Python",
        ) from error


def _found(option: str, name: str) -> object:
    module, colon, attribute = name.rpartition(":" if ":" in name else ".")
    place = module if colon else _SHORT[option]
    try:
        found = importlib.import_module(place)
    except ImportError as error:
        raise PluginError(
            f"{option}: {name!r} can't be imported: {error}",
            fix=f"write it as `{_SHORT[option]}.Name`, `package.module.Class` or `package.module:name`",
        ) from error
    if not hasattr(found, attribute):
        raise PluginError(
            f"{option}: {place} has no {attribute!r}{closest(attribute, dir(found))}",
            fix=f"name something in {place}",
        )
    return getattr(found, attribute)


def _checked(option: str, given: object, built: object, kind: type) -> object:
    _check_loads_weights(built)
    if not isinstance(built, kind):
        raise PluginError(
            f"{option}: {given!r} is {type(built).__name__}, not a {kind.__module__}.{kind.__name__}",
            fix="give algorithms, callbacks and loggers by the options of their names",
        )
    return built


def _check_loads_weights(built: object) -> None:
    from composer.callbacks import LoadCheckpoint

    if isinstance(built, LoadCheckpoint) and not built.load_weights_only:
        raise PluginError(
            f"LoadCheckpoint({built.load_path!r}) loads a whole checkpoint of Composer's, which has no "
            "place in the data and no generators to go on from exactly",
            fix="give load_weights_only=True for its weights, or resume from a checkpoint of eventloop",
        )
