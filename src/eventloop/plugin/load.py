"""Step 3, load: imports plugins, those of files and modules that aren't installed, too."""

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


def imported(found: Found) -> object:
    """Imports what an entry point, a file or a module names; raises PluginError if it can't."""
    try:
        with named_interrupts(), _where_it_was():
            return found.entry_point.load() if found.local is None else import_local(found)
    # Whatever its code does when imported, SystemExit too, is that package's problem.
    except BaseException as error:
        if is_interrupted(error):
            raise
        raise _problem(found, error) from error


def imported_callable(found: Found) -> Callable[..., Any]:
    """Imports the class or function that an extension's entry point names.

    Raises:
        PluginError: it can't be imported, or can't be called.
    """
    if not callable(target := imported(found)):
        raise PluginError(
            f"{found.role} {found.name!r} can't be called: its entry point names {target!r}",
            plugin=found.origin,
            entry_point=f"{found.entry_point.group}: {found.entry_point.value}",
            fix=f"name a function, `{found.name} = {found.entry_point.module}:run`",
        )
    return target


@contextmanager
def _where_it_was() -> Iterator[None]:
    """Restores the working directory, which a module may change when it is imported."""
    try:
        folder = os.getcwd()  # noqa: PTH109 - as text, for it may be gone
    except FileNotFoundError:
        yield
        return
    try:
        yield
    finally:
        os.chdir(folder)


def _problem(found: Found, error: BaseException) -> PluginError:
    what = "plugin" if found.role in GROUPS.values() else found.role
    way_out = found.way_out
    if found.role in EXTENSIONS.values():
        way_out = (
            f"install it with all that it needs, {pip('install', found.distribution)}, or remove it "
            f"with {pip('uninstall', found.distribution)}"
        )
    elif found.local is not None:
        way_out = "fix the error, or " + way_out
    else:
        way_out += f", or remove it with {pip('uninstall', found.distribution)}"
    return found.problem(
        f"{what} {found.name!r} can't be imported: {type(error).__name__}: " + text_of(error),
        way_out,
        entry_point=f"{found.entry_point.group}: {found.entry_point.value}",
    )


def split_label(label: str) -> tuple[str, str]:
    """Splits a label into the file or module, and the name in it, or ""."""
    file, _, attribute = label.partition(".py:")
    if attribute or label.endswith((".py", ".py:")):
        return f"{file.removesuffix('.py')}.py", attribute
    module, _, attribute = label.partition(":")
    return module, attribute


def import_local(found: Found) -> object:
    """Imports a file or module; its imports are searched in its folder last."""
    local = found.local
    path = found.path
    assert local is not None
    assert path is not None
    named, attribute = split_label(local.label)
    if not named.endswith(".py"):
        look_in(local.folder.absolute())
        module = importlib.import_module(named)
        return getattr(module, attribute) if attribute else module
    look_in(path.parent)
    name = f"eventloop_plugin_{path.stem}".replace(".", "_")  # never that of a module
    module = module_of_file(name, path)
    return getattr(module, attribute) if attribute else module


def look_in(folder: Path) -> None:
    """Appends a folder to the import path."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def module_of_file(name: str, path: str | Path) -> ModuleType:
    """Imports a file under a name, once; an import that fails leaves nothing behind.

    Args:
        name: of the module, unique.
        path: absolute.
    """
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
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

    Python's cache compares size and seconds, so it would miss an edit of one digit within a
    second.

    Args:
        name: of the module.
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
