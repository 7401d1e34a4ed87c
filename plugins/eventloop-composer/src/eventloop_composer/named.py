"""Algorithms, callbacks and loggers by name: `composer.algorithms.MixUp`, with arguments or without."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from eventloop import PluginError
from eventloop.toolbox import closest

# The module in which a name without a module is looked up.
_SHORT = {
    "algorithms": "composer.algorithms",
    "callbacks": "composer.callbacks",
    "loggers": "composer.loggers",
}


def objects_of(option: str, specification: object, kind: type) -> list[Any]:
    """Returns the objects that an option of the plugin specifies.

    Args:
        option: its name: algorithms, callbacks or loggers.
        specification: None, an object or a list: a name, a mapping of a name and its arguments, a class, or
            an instance.
        kind: the class that each object must have.

    Raises:
        PluginError: a name doesn't exist, or an object can't be built or has another class.
    """
    if specification is None:
        return []
    specifications = specification if isinstance(specification, list | tuple) else [specification]
    return [
        _checked(option, entry, built, kind)
        for entry in specifications
        for built in _built(option, entry)
    ]


def _built(option: str, specification: object) -> Iterable[object]:
    if isinstance(specification, Mapping):
        for name, arguments in specification.items():
            yield _called(name, _imported(option, name), dict(arguments or {}))
        return
    target = _imported(option, specification) if isinstance(specification, str) else specification
    yield _called(specification, target, {}) if inspect.isclass(target) else target


def _called(name: object, target: Any, arguments: dict[str, Any]) -> object:
    try:
        return target(**arguments)
    except TypeError as error:
        raise PluginError(
            f"{name} can't be built: {error}",
            fix="give its arguments, `[{composer.algorithms.MixUp: {alpha: 0.2}}]`, or an instance in "
            "Python",
        ) from error


def _imported(option: str, name: str) -> object:
    module, colon, attribute = name.rpartition(":" if ":" in name else ".")
    module_name = module if colon else _SHORT[option]
    try:
        imported_module = importlib.import_module(module_name)
    except ImportError as error:
        raise PluginError(
            f"{option}: {name!r} can't be imported: {error}",
            fix=f"write it as `{_SHORT[option]}.Name`, `package.module.Class` or `package.module:name`",
        ) from error
    if not hasattr(imported_module, attribute):
        raise PluginError(
            f"{option}: {module_name} has no {attribute!r}{closest(attribute, dir(imported_module))}",
            fix=f"name something in {module_name}",
        )
    return getattr(imported_module, attribute)


def _checked(option: str, specification: object, built: object, kind: type) -> object:
    _check_loads_weights(built)
    if not isinstance(built, kind):
        raise PluginError(
            f"{option}: {specification!r} is {type(built).__name__}, not a {kind.__module__}.{kind.__name__}",
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
