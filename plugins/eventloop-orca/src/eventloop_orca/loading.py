"""Callbacks by name: `package.module:Class` or `./file.py:Class`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

from eventloop import PluginError
from eventloop.toolbox import closest, module_of_file


def callback_of(given: object) -> object:
    """Returns the callback given as a path, a class or an instance; a class is instantiated.

    Raises:
        PluginError: nothing is found there, or the class can't be built without arguments.
    """
    found = _found(given) if isinstance(given, str) else given
    if not inspect.isclass(found):
        return found
    try:
        return found()
    except TypeError as error:
        raise PluginError(
            f"the callback {found.__name__} can't be built without arguments: {error}",
            fix="give its parameters defaults, name an instance in its module, or hand one over in "
            f"Python: Orca(callbacks=[{found.__name__}(...)])",
        ) from error


def _found(path: str) -> object:
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise PluginError(
            f"the callback {path!r} is not a path of a class",
            fix="write `package.module:Class` or `./file.py:Class`",
        )
    module = _module(place, path)
    try:
        found: object = getattr(module, name)
    except AttributeError:
        raise PluginError(
            f"the callback {path!r} isn't there: {place} has no {name!r}"
            f"{closest(name, list(vars(module)))}",
            fix="name a class, or an instance, in it",
        ) from None
    return found


def _module(place: str, path: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ImportError as error:
            raise PluginError(
                f"the callback {path!r} can't be imported: {error}",
                fix="install its package, or give its file, `./file.py:Class`",
            ) from error
    file = Path(place).expanduser().absolute()
    if not file.is_file():
        raise PluginError(
            f"the callback {path!r} isn't there: there is no file {str(file)!r}",
            fix="give the path of a file, as in `./callbacks.py:Clip`",
        )
    return module_of_file(f"eventloop_orca_file_{file.stem}", file)
