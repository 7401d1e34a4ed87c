"""The static check: finds problems of a plugin from its files, without running it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop.actions import ACTIONS
from eventloop.config.option_types import flag
from eventloop.errors import closest, text_of
from eventloop.events import EVENTS_AND_QUESTIONS
from eventloop.hook_markers import REMOVED_HOOKS
from eventloop.naming import fold
from eventloop.plugin.build import awaited
from eventloop.plugin.load import split_label
from eventloop.plugin.static_names import Scope, bound_names, locate, origin_of, top_level_spec

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration
    from eventloop.plugin.records import Found, Plugin

_HOOKS = {**EVENTS_AND_QUESTIONS, **ACTIONS}
_MAX_REDIRECTIONS = 4


@dataclass(frozen=True)
class StaticReport:
    """The result of a static check.

    Args:
        problem: a line that describes the first problem; "" if there is none.
        needs: options without a default.
        wakes_with: options of which at least one must be set.
        off_until_named: whether the plugin waits for its name, or any option.
    """

    problem: str = ""
    needs: tuple[str, ...] = ()
    wakes_with: tuple[str, ...] = ()
    off_until_named: bool = False


def static_check(plugin: Found, other_plugins: Iterable[Found] = ()) -> StaticReport:
    """Reads a plugin's files and reports why it can't be used, and which options it waits for.

    Finds missing modules, names and imports, files that aren't Python, and misspelt hooks. Problems
    that only show when the code runs are found by `eventloop plugins check`.

    Args:
        found: the plugin.
        others: plugins that may declare the hooks that it implements.
    """
    if plugin.path is not None:
        file, attribute = split_label(plugin.entry_point.value)
        if file.endswith(".py"):
            return _look(str(plugin.path), plugin.path, attribute, other_plugins)
    try:
        module = plugin.entry_point.module
        attribute = plugin.entry_point.attr or ""
    except (ValueError, AttributeError):
        return StaticReport(f"the entry point {plugin.entry_point.value!r} isn't `module:name`")
    path, problem = locate(module)
    if problem or path is None:
        return StaticReport(problem)
    return _look(module, path, attribute.partition(".")[0], other_plugins)


def seen_status(
    plugin: Plugin, configuration: Configuration, other_plugins: Iterable[Found]
) -> tuple[str, str]:
    """Returns a plugin's status and reason, including problems and dormancy that its files show."""
    if plugin.stage != "chosen" or plugin.found is None:
        return plugin.status, plugin.reason
    report = static_check(plugin.found, other_plugins)
    section = configuration.section(plugin.name)
    if report.problem:
        return "problem", report.problem
    if reason := awaited(
        plugin, configuration, report.needs, report.wakes_with, report.off_until_named
    ):
        return "off", reason
    lacking = [flag(name, plugin.name) for name in report.needs if fold(name) not in section]
    if lacking:
        return "problem", f"needs {' and '.join(lacking)}"
    return plugin.status, plugin.reason


@functools.cache
def static_hooks(plugin: Found) -> frozenset[str]:
    """Returns the names of the hooks that a plugin declares, as far as its files show."""
    try:
        scope = _scope_of(plugin)
        value = dict(scope.assigned()).get("hookspecs") if scope else None
        if scope is None or value is None:
            return frozenset()
        specs = scope.scope(ast.unparse(value).split("."))
        return frozenset(specs.marked("hookspec") if specs else ())
    except (SyntaxError, ValueError, OSError):
        return frozenset()


def foreign_hooks(found: Found, other_plugins: Iterable[Found]) -> list[str]:
    """Returns the hooks that a plugin implements but neither the core nor another plugin declares.

    Args:
        found: the plugin.
        others: plugins that may declare the hooks that it implements.
    """
    try:
        scope = _scope_of(found)
        names = [name for name in (scope.marked("hookimpl") if scope else ()) if name not in _HOOKS]
    except (SyntaxError, ValueError, OSError):
        return []
    return [
        name for name in names if not any(name in static_hooks(plugin) for plugin in other_plugins)
    ]


def _scope_of(plugin: Found) -> Scope | None:
    """Returns the class or module of a plugin."""
    module, _, name = plugin.entry_point.value.partition("[")[0].replace(" ", "").partition(":")
    if plugin.path is not None:
        name = split_label(plugin.entry_point.value)[1]
    return Scope(module, plugin.path or locate(module)[0]).scope(name.split(".") if name else [])


def _look(module: str, path: Path, attribute: str, other_plugins: Iterable[Found]) -> StaticReport:
    """Follows a name from the entry point's module to its definition, and checks the modules."""
    for _ in range(_MAX_REDIRECTIONS):
        try:
            body = ast.parse(path.read_bytes()).body
        except (SyntaxError, ValueError) as error:
            return StaticReport(
                f"can't be imported: {type(error).__name__}: {text_of(error)}, {path}"
            )
        except OSError as error:
            return StaticReport(f"can't be imported: {error}")
        if problem := _import_problem(body, path):
            return StaticReport(problem)
        names = dict(bound_names(body))
        if not attribute or "*" in names or ("__getattr__" in names and attribute not in names):
            return StaticReport()
        if attribute not in names:
            return StaticReport(f"{module} has no {attribute!r}{closest(attribute, names)}")
        if isinstance(node := names[attribute], ast.ClassDef):
            assigned = dict(Scope(module, path, node.body).assigned())
            waits = getattr(assigned.get("off_until_named"), "value", None) is True
            waking = _texts(assigned.get("wakes_with"))
            needs = tuple(_needs(node))
            return StaticReport(_hook_problem(node, other_plugins), needs, waking, waits)
        if (following := origin_of(node, attribute, module, path)) is None:
            return StaticReport()
        module, attribute = following
        source, problem = locate(module)
        if problem or source is None:
            return StaticReport(problem)
        path = source
    return StaticReport()


def _import_problem(body: list[ast.stmt], path: Path) -> str:
    """Finds statements at the top of a module that always raise: missing imports, a `raise`."""
    for node in body:
        if isinstance(node, ast.Raise):
            return f"can't be imported: raises, {path}:{node.lineno}"
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            if top_level_spec(top) is None:
                return f"can't be imported: no module named {top!r}, {path}:{node.lineno}"
    return ""


def _hook_problem(node: ast.ClassDef, other_plugins: Iterable[Found]) -> str:
    """Finds a marked method whose name is close to a hook's name."""
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.name in _HOOKS:
            continue
        for mark in method.decorator_list:
            call = mark.func if isinstance(mark, ast.Call) else mark
            keywords = (
                {plugin.arg for plugin in mark.keywords} if isinstance(mark, ast.Call) else set()
            )
            is_mark = isinstance(call, ast.Name) and call.id == "hookimpl"
            hint = closest(method.name, _HOOKS)
            if method.name in REMOVED_HOOKS:
                hint = f"; it was {REMOVED_HOOKS[method.name]}"
            if not is_mark or not hint or keywords & {"specname", "optionalhook"}:
                continue
            if not any(method.name in static_hooks(plugin) for plugin in other_plugins):
                return f"no hook is named {method.name!r}{hint}"
    return ""


def _needs(node: ast.ClassDef) -> Iterator[str]:
    """Yields the parameters of the constructor that have no default."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            positional = [*method.args.posonlyargs, *method.args.args][1:]
            num_needed = len(positional) - len(method.args.defaults)
            yield from (argument.arg for argument in positional[: max(num_needed, 0)])
            pairs = zip(method.args.kwonlyargs, method.args.kw_defaults, strict=True)
            yield from (argument.arg for argument, default in pairs if default is None)


def _texts(value: ast.expr | None) -> tuple[str, ...]:
    """Returns the texts in an expression, such as the options in `wakes_with`, if they are literals."""
    values = (getattr(node, "value", None) for node in (ast.walk(value) if value else ()))
    return tuple(node for node in values if isinstance(node, str))
