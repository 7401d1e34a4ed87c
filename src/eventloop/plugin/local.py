"""Plugins that aren't installed: files and modules, read without running them, then imported."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from importlib.abc import SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from importlib_metadata import EntryPoint

from eventloop.config.choice import Local
from eventloop.errors import PluginError, UsageError, closest
from eventloop.naming import kebab
from eventloop.plugin.records import GROUPS, Found
from eventloop.plugin.sources import bound_names, locate, origin_of

_MAX_REDIRECTIONS = 8


def found_local(local: Local) -> Found:
    """Reads what `FILE.py:NAME`, `FILE.py` or `MODULE:NAME` names; runs nothing of it.

    A class attribute, or a variable of the module, `role = "algorithm"` makes it an algorithm;
    else it is a callback. Likewise `name`; else it is the class's or the file's in kebab-case.

    Raises:
        UsageError: there is no such file, or nothing of that name in it, or its role is none.
        PluginError: it isn't Python.
    """
    module, path, attribute = _place(local)
    name = path.stem.replace("_", "-").replace(".", "-")
    constants: dict[str, str] = {}
    if attribute:
        name = kebab(attribute).replace("_", "-")
        path, constants = _definition(local, module, path, attribute)
    else:
        constants = _constants(_parsed(local, path).body)
    role = constants.get("role", "callback")
    groups: dict[str, str] = {named: group for group, named in GROUPS.items()}
    if role not in groups:
        raise UsageError(
            f"{local}: role is {role!r}{closest(role, groups)}",
            file=path,
            fix=f"write role = {' or '.join(map(repr, groups))}",
        )
    name = constants.get("name", name)
    point = EntryPoint(name, local.label, groups[role])
    marks = (local.source,) if local.source else ()
    return Found(name, GROUPS[groups[role]], point, "", "", marks, path, local)


def split_label(label: str) -> tuple[str, str]:
    """Returns the file or module that a label names, and the name in it, "" for all of it."""
    file, _, attribute = label.partition(".py:")
    if attribute or label.endswith((".py", ".py:")):
        return f"{file.removesuffix('.py')}.py", attribute
    module, _, attribute = label.partition(":")
    return module, attribute


def _place(local: Local) -> tuple[str, Path, str]:
    """Returns the name of the module, its file, and what is named in it, "" for all of it."""
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
    """Follows a name to where it is defined; returns the file, and constants that stand with it."""
    for _ in range(_MAX_REDIRECTIONS):
        body = _parsed(local, path).body
        names = dict(bound_names(body))
        if attribute not in names:
            raise UsageError(
                f"{local}: the file has no {attribute!r}{closest(attribute, names)}",
                file=path,
                fix="name a class, an instance, or the file alone",
            )
        node = names[attribute]
        if isinstance(node, ast.ClassDef):
            return path, _constants(node.body)
        if (following := origin_of(node, attribute, module, path)) is None:
            break
        found, _ = locate(following[0])
        if found is None:
            break
        (module, attribute), path = following, found
    return path, _constants(body)


def import_local(found: Found) -> object:
    """Imports a file or module; its folder is the last place where its imports are looked for."""
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
    """Has imports look in a folder, after all others."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _parsed(local: Local, path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        folder = path.parent
        names = sorted(one.name for one in folder.glob("*.py")) if folder.is_dir() else []
        raise UsageError(
            f"{local}: there is no file {str(path)!r}{closest(path.name, names)}",
            folder=folder if folder.is_dir() else f"{folder}, which doesn't exist",
            fix="give the path of a file, as in `-p ./watch.py:Watch`",
        ) from error
    except (SyntaxError, ValueError) as error:
        raise PluginError(
            f"{local} isn't Python: {error}",
            file=path,
            fix=f"fix the file, or {local.way_out}",
        ) from error


def _constants(body: list[ast.stmt]) -> dict[str, str]:
    """Returns the names that are bound to plain text."""
    return {
        name: node.value.value
        for name, node in bound_names(body)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def module_of_file(name: str, path: Path) -> ModuleType:
    """Imports a file under a name, once; an import that fails leaves nothing behind.

    Args:
        name: of the module, unlike that of any other.
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


def spec_of_file(name: str, path: Path) -> ModuleSpec:
    """Returns the spec of a module that is compiled from the source each time.

    Python knows a file by its size and its time in seconds, so that an edit of one digit within a
    second would leave the compiled file of before in its place.

    Args:
        name: of the module.
        path: its file, whatever its suffix.
    """
    spec = spec_from_file_location(name, path, loader=_AsItStands(path))
    assert spec is not None
    return spec


class _AsItStands(SourceLoader):
    """Reads a file, and nothing beside it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        return self._path.read_bytes()
