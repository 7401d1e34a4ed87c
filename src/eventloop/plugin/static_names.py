"""Reads Python sources without running them: the names that a module binds, and their origins."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_MAX_REDIRECTIONS = 4


def bound_names(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yields each name that the statements bind, with the statement."""
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


def origin_of(
    node: ast.stmt, attribute: str, module: str, path: Path, *, anywhere: bool = False
) -> tuple[str, str] | None:
    """Returns the module and name that `from ... import` binds a name to, within the package.

    Args:
        node: the statement.
        attribute: the name.
        module, path: the module that has the statement, and its file.
        anywhere: whether to also return a module outside of the package.
    """
    if not isinstance(node, ast.ImportFrom):
        return None
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    origin = f"{package}.{node.module or ''}".strip(".") if node.level else node.module or ""
    if not anywhere and origin.partition(".")[0] != module.partition(".")[0]:
        return None
    for alias in node.names:
        if (alias.asname or alias.name) == attribute:
            return origin, alias.name
    return None


def locate(module: str) -> tuple[Path | None, str]:
    """Finds a module's file without importing its parents.

    Returns:
        The file, or None if the module has no Python source; and the problem, or "".
    """
    top_level_name, *submodule_names = module.split(".")
    spec = top_level_spec(top_level_name)
    for name in submodule_names:
        if spec is None or spec.submodule_search_locations is None:
            break
        # With a dotted name, Python would look for the parents in `sys.modules`.
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    if spec is None:
        return None, f"can't be imported: no module named {module!r}"
    path = None if spec.origin is None else Path(spec.origin)
    # The path of a module in a wheel or egg isn't a file.
    return (path if path and path.suffix == ".py" and path.is_file() else None), ""


def top_level_spec(name: str) -> ModuleSpec | None:
    """Finds a top-level module."""
    return _spec_on(tuple(sys.path), name)


@functools.lru_cache(maxsize=1024)
def _spec_on(path: tuple[str, ...], name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module in sys.modules without a spec
        return None


@dataclass(frozen=True)
class Scope:
    """A module, or a class in it, as read from its file.

    Args:
        module: the name of the module.
        path: its file, or None if it has no Python source.
        body: the statements of the class; None for the module.
    """

    module: str
    path: Path | None
    body: list[ast.stmt] | None = None

    def scope(self, names: list[str], depth: int = 0) -> Scope | None:
        """Resolves a dotted name in the module to a module or a class."""
        if self.path is None or depth > _MAX_REDIRECTIONS:
            return None
        if not names:
            return self
        head, *tail = names
        node = dict(bound_names(_parsed(self.path))).get(head)
        if isinstance(node, ast.ClassDef):
            return Scope(self.module, self.path, node.body)
        if isinstance(node, ast.Import):
            alias = next(
                name_alias
                for name_alias in node.names
                if head in (name_alias.asname, *name_alias.name.split("."))
            )
            module = alias.name if alias.asname else head
            return Scope(module, locate(module)[0]).scope(tail, depth + 1)
        if isinstance(node, ast.ImportFrom):
            origin, name = origin_of(node, head, self.module, self.path, anywhere=True) or ("", "")
            return Scope(origin, locate(origin)[0]).scope([name, *tail], depth + 1)
        if node is None and self.path.name == "__init__.py":
            module = f"{self.module}.{head}"
            return Scope(module, locate(module)[0]).scope(tail, depth + 1)
        return None

    def assigned(self) -> Iterator[tuple[str, ast.expr]]:
        """Yields each name with the value assigned to it."""
        for name, node in bound_names(self.body if self.body is not None else _parsed(self.path)):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                yield name, node.value

    def marked(self, marker: str) -> Iterator[str]:
        """Yields the names of functions with a marker: `@hookspec(...)`, `@hookimpl`."""
        for node in self.body if self.body is not None else _parsed(self.path):
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(mark).partition("(")[0].rpartition(".")[2] == marker
                for mark in node.decorator_list
            ):
                yield node.name


def _parsed(path: Path | None) -> list[ast.stmt]:
    return ast.parse(path.read_bytes()).body if path is not None else []
