"""Local plugins: reads the file or module that a flag or a project names, without running it."""

from __future__ import annotations

import ast
from pathlib import Path

from importlib_metadata import EntryPoint

from eventloop.config.plugin_flags import Local
from eventloop.errors import PluginError, UsageError, closest, closest_at
from eventloop.naming import kebab
from eventloop.plugin.load import look_in, split_label
from eventloop.plugin.records import GROUP_OF, GROUPS, Found
from eventloop.plugin.static_names import bound_names, locate, origin_of

_MAX_REDIRECTIONS = 8


def found_local(local: Local) -> Found:
    """Reads the object named by `FILE.py:NAME`, `FILE.py` or `MODULE:NAME` without running it.

    A class attribute or a variable of the module, `role = "algorithm"`, makes the plugin an
    algorithm; otherwise it is a callback. An attribute or variable `name` is the plugin's name; the
    default is the class's or file's name in kebab-case.

    Raises:
        UsageError: the file or the name in it doesn't exist, or its role is unknown.
        PluginError: the file isn't Python.
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


def _parts(local: Local) -> tuple[str, Path, str]:
    """Returns the name of the module, its file, and the name in the module, or ""."""
    module, attribute = split_label(local.label)
    if module.endswith(".py"):
        path = (local.folder / module).absolute()
        return path.stem, path, attribute
    look_in(local.folder.absolute())
    source, problem = locate(module)
    if source is None:
        raise UsageError(
            f"{local}: {problem or f'{module!r} has no Python source'}",
            folder=local.folder.absolute(),
            fix="name a module that can be imported, as in `-p package.module:Class`, or a file",
        )
    return module, source, attribute


def _definition(
    local: Local, module: str, path: Path, attribute: str
) -> tuple[Path, dict[str, str]]:
    """Follows the imports of a name to its definition.

    Returns:
        The file that defines it, and the string constants of the class, or of the module for an
        instance.
    """
    for _ in range(_MAX_REDIRECTIONS):
        body = _parsed(local, path).body
        names = dict(bound_names(body))
        if attribute not in names:
            raise UsageError(
                f"{local}: the file has no {attribute!r}{closest(attribute, names)}",
                file=path,
                fix="name a class, an instance, or only the file",
            )
        if isinstance(node := names[attribute], ast.ClassDef):
            return path, _constants(node.body)
        if (following := origin_of(node, attribute, module, path)) is None:
            break
        source, _ = locate(following[0])
        if source is None:
            break
        module, attribute = following
        path = source
    return path, _constants(body)


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
    """Returns the string constants by the names they are assigned to."""
    return {
        name: node.value.value
        for name, node in bound_names(body)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
