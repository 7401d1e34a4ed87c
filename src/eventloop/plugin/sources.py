"""Python sources, read and never run: which names a module binds, and where they come from."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


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


def origin_of(node: ast.stmt, attribute: str, module: str, path: Path) -> tuple[str, str] | None:
    """Returns module and name from which `from ... import` takes a name, within the package."""
    if not isinstance(node, ast.ImportFrom):
        return None
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    origin = f"{package}.{node.module or ''}".strip(".") if node.level else node.module or ""
    if origin.partition(".")[0] != module.partition(".")[0]:
        return None
    for alias in node.names:
        if (alias.asname or alias.name) == attribute:
            return origin, alias.name
    return None


def locate(module: str) -> tuple[Path | None, str]:
    """Finds a module's file without importing its parents.

    Returns:
        The file, None where it is not a Python source; and what is wrong, or "".
    """
    parts = module.split(".")
    spec = top_level_spec(parts[0])
    for idx in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            break
        name = ".".join(parts[:idx])
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    if spec is None:
        return None, f"can't be imported: no module named {module!r}"
    is_source = spec.origin is not None and spec.origin.endswith(".py")
    return (Path(spec.origin) if is_source and spec.origin else None), ""


def top_level_spec(name: str) -> ModuleSpec | None:
    """Finds a module that isn't inside another."""
    return _spec_on(tuple(sys.path), name)


@functools.lru_cache(maxsize=1024)
def _spec_on(path: tuple[str, ...], name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # of something in sys.modules that has no spec
        return None
