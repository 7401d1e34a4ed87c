"""Step 3, load: imports plugins, from installed packages, files and modules."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from eventloop.errors import PluginError, text_of
from eventloop.fixes import pip
from eventloop.plugin.records import EXTENSIONS, GROUPS, Found
from eventloop.signals import is_interrupted, named_interrupts


def imported(plugin: Found) -> object:
    """Imports the object of a plugin or an extension.

    Raises:
        PluginError: the import fails.
    """
    try:
        with named_interrupts(), _restored_directory():
            return plugin.entry_point.load() if plugin.local is None else import_local(plugin)
    # A module may raise anything when it is imported, even SystemExit; the plugin is blamed for it.
    except BaseException as error:
        if is_interrupted(error):
            raise
        raise _problem(plugin, error) from error


def imported_callable(extension: Found) -> Callable[..., Any]:
    """Imports the class or function that an extension's entry point names.

    Raises:
        PluginError: the object can't be imported, or isn't callable.
    """
    if not callable(target := imported(extension)):
        raise PluginError(
            f"{extension.role} {extension.name!r} can't be called: its entry point names {target!r}",
            plugin=extension.origin,
            entry_point=f"{extension.entry_point.group}: {extension.entry_point.value}",
            fix=f"name a function, `{extension.name} = {extension.entry_point.module}:run`",
        )
    return target


@contextmanager
def _restored_directory() -> Iterator[None]:
    """Restores the working directory, which a module may change when it is imported."""
    try:
        folder = os.getcwd()  # noqa: PTH109 - Path.cwd() does the same
    except FileNotFoundError:
        yield
        return
    try:
        yield
    finally:
        os.chdir(folder)


def _problem(plugin: Found, error: BaseException) -> PluginError:
    kind = "plugin" if plugin.role in GROUPS.values() else plugin.role
    way_out = plugin.way_out
    if plugin.role in EXTENSIONS.values():
        way_out = (
            f"install it with all that it needs, {pip('install', plugin.distribution)}, or remove it "
            f"with {pip('uninstall', plugin.distribution)}"
        )
    elif plugin.local is not None:
        way_out = "fix the error, or " + way_out
    else:
        way_out += f", or remove it with {pip('uninstall', plugin.distribution)}"
    return plugin.problem(
        f"{kind} {plugin.name!r} can't be imported: {type(error).__name__}: " + text_of(error),
        way_out,
        entry_point=f"{plugin.entry_point.group}: {plugin.entry_point.value}",
    )


def split_label(label: str) -> tuple[str, str]:
    """Splits `FILE.py:NAME` or `MODULE:NAME` into the file or module, and the name or ""."""
    file, _, attribute = label.partition(".py:")
    if attribute or label.endswith((".py", ".py:")):
        return f"{file.removesuffix('.py')}.py", attribute
    module, _, attribute = label.partition(":")
    return module, attribute


def import_local(plugin: Found) -> object:
    """Imports the object of a local plugin.

    Its folder is appended to the import path, so that it can't hide installed modules.
    """
    local = plugin.local
    path = plugin.path
    assert local is not None
    assert path is not None
    file_or_module, attribute = split_label(local.label)
    if not file_or_module.endswith(".py"):
        look_in(local.folder.absolute())
        module = importlib.import_module(file_or_module)
        return getattr(module, attribute) if attribute else module
    look_in(path.parent)
    # The prefix keeps a file such as `random.py` from replacing the module of that name.
    name = f"eventloop_plugin_{path.stem}".replace(".", "_")
    module = module_of_file(name, path)
    return getattr(module, attribute) if attribute else module


def look_in(folder: Path) -> None:
    """Appends a folder to the import path, if it isn't on it."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def module_of_file(name: str, path: str | Path) -> ModuleType:
    """Imports a file as a module, once; an import that fails leaves nothing in `sys.modules`.

    Args:
        name: the name of the module, unique.
        path: the absolute path of the file.
    """
    existing = sys.modules.get(name)
    if existing is not None and getattr(existing, "__file__", None) == str(path):
        return existing
    spec = spec_of_file(name, path)
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes can be pickled
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def spec_of_file(name: str, path: str | Path) -> ModuleSpec:
    """Returns the spec of a module that is always compiled from source.

    Python's cache compares the size and the time in seconds, so it would miss an edit of one digit
    within a second.

    Args:
        name: the name of the module.
        path: its file, with any suffix.
    """
    spec = spec_from_file_location(name, path, loader=_FromSource(Path(path)))
    assert spec is not None
    return spec


class _FromSource(SourceLoader):
    """Loads a module from its source file, without a cache."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        return self._path.read_bytes()
