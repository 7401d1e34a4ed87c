"""Step 3, load: import what takes part, from packages and from files, one by one."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.abc import SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

from importlib_metadata import EntryPoint

from eventloop.errors import PluginError, UsageError, closest
from eventloop.naming import kebab
from eventloop.plugin.records import EXTENSIONS, GROUPS, Found, Selected
from eventloop.signals import Interrupted, told_from_a_key
from eventloop.text import pip, shell, switch_off


@dataclass(frozen=True)
class Loaded:
    """A plugin and the object that its entry point names: a class, an instance or a module."""

    found: Found
    target: object


def load(
    selected: Iterable[Selected],
) -> tuple[tuple[Loaded, ...], tuple[PluginError, ...]]:
    """Imports the active plugins.

    Returns:
        Those that could be imported, and a problem for each of the others.
    """
    loaded = []
    problems = []
    for one in selected:
        if one.status == "active":
            try:
                loaded.append(Loaded(one.found, imported(one.found)))
            except PluginError as error:
                problems.append(error)
    return tuple(loaded), tuple(problems)


def imported(found: Found) -> object:
    """Imports what an entry point or `-p FILE:CLASS` names.

    Raises:
        PluginError: it can't be imported.
    """
    try:
        with told_from_a_key():
            return found.entry_point.load() if found.path is None else import_from_file(found)
    except Interrupted:
        raise
    # Whatever its code does when imported, SystemExit too, is that package's problem.
    except BaseException as error:
        raise _problem(found, error) from error


def _problem(found: Found, error: BaseException) -> PluginError:
    what = "plugin" if found.role in GROUPS.values() else found.role
    way_out = f"leave {shell('-p', found.entry_point.value)} out"
    if found.role in EXTENSIONS.values():
        way_out = (
            f"install it with all that it needs, {pip('install', found.distribution)}, or remove it "
            f"with {pip('uninstall', found.distribution)}"
        )
    elif found.path is None:
        way_out = (
            f"switch the plugin off with {switch_off(found.name)}, or remove it with "
            f"{pip('uninstall', found.distribution)}"
        )
    return PluginError(
        f"{what} {found.name!r} can't be imported: {type(error).__name__}: {error}",
        subjects=[found],
        plugin=found.origin,
        entry_point=f"{found.entry_point.group}: {found.entry_point.value}",
        fix=way_out,
    )


def found_in_file(label: str) -> Found:
    """Reads what `FILE.py:NAME` or `FILE.py` names; runs nothing of it.

    A class attribute, or a variable of the module, `role = "algorithm"` makes it an algorithm;
    else it is a callback. Likewise `name`; else it is the class's or the file's in kebab-case.

    Raises:
        UsageError: there is no such file, or nothing of that name in it, or its role is none.
        PluginError: it isn't Python.
    """
    file, _, attribute = label.partition(".py:")
    path = Path(f"{file}.py" if attribute or label.endswith(":") else label).absolute()
    body = _parsed(label, path).body
    constants = _constants(body)
    name = path.stem.replace("_", "-").replace(".", "-")
    if attribute:
        top = dict(bound_names(body))
        if attribute not in top:
            raise UsageError(
                f"-p {label}: the file has no {attribute!r}{closest(attribute, top)}",
                file=path,
                fix="name a class, an instance, or the file alone",
            )
        name = kebab(attribute).replace("_", "-")
        if isinstance(node := top[attribute], ast.ClassDef):
            constants = _constants(node.body)
    role = constants.get("role", "callback")
    groups: dict[str, str] = {named: group for group, named in GROUPS.items()}
    if role not in groups:
        raise UsageError(
            f"-p {label}: role is {role!r}{closest(role, groups)}",
            file=path,
            fix=f"write role = {' or '.join(map(repr, groups))}",
        )
    name = constants.get("name", name)
    point = EntryPoint(name, label, groups[role])
    return Found(name, GROUPS[groups[role]], point, "", "", path=path)


def import_from_file(found: Found) -> object:
    """Imports what a file holds; its folder is the last place where its imports are looked for."""
    path = found.path
    assert path is not None
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"eventloop_plugin_{path.stem}".replace(".", "_")  # never that of a module
    module = sys.modules.get(name)
    if module is None or getattr(module, "__file__", None) != str(path):
        spec = spec_of_file(name, path)
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # so that its classes can be pickled
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    attribute = found.entry_point.value.partition(".py:")[2]
    return getattr(module, attribute) if attribute else module


def _parsed(label: str, path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        folder = path.parent
        names = sorted(one.name for one in folder.glob("*.py")) if folder.is_dir() else []
        raise UsageError(
            f"-p {label}: there is no file {str(path)!r}{closest(path.name, names)}",
            folder=folder if folder.is_dir() else f"{folder}, which doesn't exist",
            fix="give the path of a file, as in `-p ./watch.py:Watch`",
        ) from error
    except (SyntaxError, ValueError) as error:
        raise PluginError(
            f"-p {label} isn't Python: {error}",
            file=path,
            fix="fix the file, or leave it out",
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


def bound_names(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yields the names that statements bind, each with its statement."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id, node
        elif isinstance(node, ast.If | ast.Try):
            for block in (node.body, node.orelse, getattr(node, "finalbody", [])):
                yield from bound_names(block)
            for handler in getattr(node, "handlers", []):
                yield from bound_names(handler.body)


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
