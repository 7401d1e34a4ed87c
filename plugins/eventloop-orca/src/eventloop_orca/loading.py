"""Callbacks by name: `package.module:Class` or `./file.py:Class`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

from eventloop import PluginError
from eventloop.toolbox import closest, module_of_file


def callback_of(specification: object) -> object:
    """Returns the callback specified as a path, a class or an instance; instantiates a class.

    Raises:
        PluginError: the path names nothing, or the class can't be built without arguments.
    """
    target = _imported(specification) if isinstance(specification, str) else specification
    if not inspect.isclass(target):
        return target
    try:
        return target()
    except TypeError as error:
        raise PluginError(
            f"the callback {target.__name__} can't be built without arguments: {error}",
            fix="give its parameters defaults, name an instance in its module, or hand one over in "
            f"Python: Orca(callbacks=[{target.__name__}(...)])",
        ) from error


def _imported(path: str) -> object:
    module_or_file, colon, name = path.rpartition(":")
    if not colon or not module_or_file or not name:
        raise PluginError(
            f"the callback {path!r} is not a path of a class",
            fix="write `package.module:Class` or `./file.py:Class`",
        )
    module = _module(module_or_file, path)
    try:
        target: object = getattr(module, name)
    except AttributeError:
        raise PluginError(
            f"the callback {path!r} isn't there: {module_or_file} has no {name!r}"
            f"{closest(name, list(vars(module)))}",
            fix="name a class, or an instance, in it",
        ) from None
    return target


def _module(module_or_file: str, path: str) -> ModuleType:
    if not module_or_file.endswith(".py"):
        try:
            return importlib.import_module(module_or_file)
        except ImportError as error:
            raise PluginError(
                f"the callback {path!r} can't be imported: {error}",
                fix="install its package, or give its file, `./file.py:Class`",
            ) from error
    file = Path(module_or_file).expanduser().absolute()
    if not file.is_file():
        raise PluginError(
            f"the callback {path!r} isn't there: there is no file {str(file)!r}",
            fix="give the path of a file, as in `./callbacks.py:Clip`",
        )
    return module_of_file(f"eventloop_orca_file_{file.stem}", file)
