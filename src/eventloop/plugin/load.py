"""Step 3, load: imports plugins; reads those that aren't installed, files and modules, without running them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.abc import SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from importlib_metadata import EntryPoint

from eventloop.config.plugin_flags import Local
from eventloop.errors import PluginError, UsageError, closest, closest_at, text_of
from eventloop.fixes import pip
from eventloop.naming import kebab
from eventloop.plugin.records import EXTENSIONS, GROUP_OF, GROUPS, Candidate, Found
from eventloop.plugin.static_names import bound_names, locate, origin_of
from eventloop.signals import is_interrupted, named_interrupts

_MAX_REDIRECTIONS = 8
Outcome = tuple[object, tuple[PluginError, ...]]  # what was imported, and its problems


def load(one: Candidate, outcomes: dict[Found, Outcome]) -> Candidate:
    """Imports a plugin if it is active; a failure is a problem of the candidate.

    Args:
        outcomes: of earlier imports, which aren't repeated; a new one is added.
    """
    if one.status == "off":
        return one
    if one.found not in outcomes:
        try:
            outcomes[one.found] = imported(one.found), ()
        except PluginError as error:
            outcomes[one.found] = None, (error,)
    target, problems = outcomes[one.found]
    return replace(one, target=target, problems=problems)


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


def found_local(local: Local) -> Found:
    """Reads the object named by `FILE.py:NAME`, `FILE.py` or `MODULE:NAME` without running it.

    A class attribute, or a variable of the module, `role = "algorithm"` makes it an algorithm;
    otherwise it is a callback. Likewise `name`; by default the class's or file's in kebab-case.

    Raises:
        UsageError: the file or the name in it doesn't exist, or its role is unknown.
        PluginError: it isn't Python.
    """
    module, path, attribute = _parts(local)
    name = path.stem.replace("_", "-").replace(".", "-")
    constants: dict[str, str] = {}
    if attribute:
        name = kebab(attribute).replace("_", "-")
        path, constants = _definition(local, module, path, attribute)
    else:
        constants = _constants(_parsed(local, path).body)
    role = constants.get("role", "callback")
    if role not in GROUP_OF:
        raise UsageError(
            f"{local}: role is {role!r}{closest(role, GROUP_OF)}",
            file=path,
            fix=f"write role = {' or '.join(map(repr, GROUP_OF))}",
        )
    name = constants.get("name", name)
    point = EntryPoint(name, local.label, GROUP_OF[role])
    marks = (local.source,) if local.source else ()
    return Found(name, GROUPS[GROUP_OF[role]], point, "", "", marks, path, local)


def split_label(label: str) -> tuple[str, str]:
    """Splits a label into the file or module, and the name in it, or ""."""
    file, _, attribute = label.partition(".py:")
    if attribute or label.endswith((".py", ".py:")):
        return f"{file.removesuffix('.py')}.py", attribute
    module, _, attribute = label.partition(":")
    return module, attribute


def _parts(local: Local) -> tuple[str, Path, str]:
    """Returns the name of the module, its file, and the name in it, or ""."""
    module, attribute = split_label(local.label)
    if module.endswith(".py"):
        path = (local.folder / module).absolute()
        return path.stem, path, attribute
    _look_in(local.folder.absolute())
    found, problem = locate(module)
    if found is None:
        raise UsageError(
            f"{local}: {problem or f'{module!r} has no Python source'}",
            folder=local.folder.absolute(),
            fix="name a module that can be imported, as in `-p package.module:Class`, or a file",
        )
    return module, found, attribute


def _definition(
    local: Local, module: str, path: Path, attribute: str
) -> tuple[Path, dict[str, str]]:
    """Follows a name to its definition; returns the file, and the constants next to it."""
    for _ in range(_MAX_REDIRECTIONS):
        body = _parsed(local, path).body
        names = dict(bound_names(body))
        if attribute not in names:
            raise UsageError(
                f"{local}: the file has no {attribute!r}{closest(attribute, names)}",
                file=path,
                fix="name a class, an instance, or the file alone",
            )
        if isinstance(node := names[attribute], ast.ClassDef):
            return path, _constants(node.body)
        if (following := origin_of(node, attribute, module, path)) is None:
            break
        found, _ = locate(following[0])
        if found is None:
            break
        (module, attribute), path = following, found
    return path, _constants(body)


def import_local(found: Found) -> object:
    """Imports a file or module; its imports are searched in its folder last."""
    local, path = found.local, found.path
    assert local is not None
    assert path is not None
    named, attribute = split_label(local.label)
    if not named.endswith(".py"):
        _look_in(local.folder.absolute())
        module = importlib.import_module(named)
        return getattr(module, attribute) if attribute else module
    _look_in(path.parent)
    name = f"eventloop_plugin_{path.stem}".replace(".", "_")  # never that of a module
    module = module_of_file(name, path)
    return getattr(module, attribute) if attribute else module


def _look_in(folder: Path) -> None:
    """Appends a folder to the import path."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _parsed(local: Local, path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        folder = path.parent
        raise UsageError(
            f"{local}: there is no file {str(path)!r}{closest_at(path, '*.py')}",
            folder=folder if folder.is_dir() else f"{folder}, which doesn't exist",
            fix="give the path of a file, as in `-p ./watch.py:Watch`",
        ) from error
    except (SyntaxError, ValueError) as error:
        raise PluginError(
            f"{local} isn't Python: {error}", file=path, fix="fix the file, or " + local.way_out
        ) from error


def _constants(body: list[ast.stmt]) -> dict[str, str]:
    """Returns the names that are bound to string constants."""
    return {
        name: node.value.value
        for name, node in bound_names(body)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


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
