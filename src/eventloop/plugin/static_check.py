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
        problem: one line; "" if none was found.
        needs: options without a default.
        wakes_with: options of which one must be set.
        off_until_named: whether it waits for its name, or any option.
    """

    problem: str = ""
    needs: tuple[str, ...] = ()
    wakes_with: tuple[str, ...] = ()
    off_until_named: bool = False


def static_check(found: Found, others: Iterable[Found] = ()) -> StaticReport:
    """Returns what prevents a plugin from being used, as far as its files show.

    It finds missing modules, names and imports, files that aren't Python, and misspelt hooks.
    Problems that only show when the code runs are found by `eventloop plugins check`.

    Args:
        others: plugins that may declare the hooks that this one implements.
    """
    if found.path is not None:
        file, attribute = split_label(found.entry_point.value)
        if file.endswith(".py"):
            return _look(str(found.path), found.path, attribute, others)
    try:
        module = found.entry_point.module
        attribute = found.entry_point.attr or ""
    except (ValueError, AttributeError):
        return StaticReport(f"the entry point {found.entry_point.value!r} is no `module:name`")
    path, problem = locate(module)
    if problem or path is None:
        return StaticReport(problem)
    return _look(module, path, attribute.partition(".")[0], others)


def seen_status(
    plugin: Plugin, configuration: Configuration, others: Iterable[Found]
) -> tuple[str, str]:
    """Returns a plugin's status and reason, with a static check's problem or dormancy."""
    if plugin.stage != "chosen" or plugin.found is None:
        return plugin.status, plugin.reason
    seen = static_check(plugin.found, others)
    section = configuration.section(plugin.name)
    if seen.problem:
        return "problem", seen.problem
    if reason := awaited(plugin, configuration, seen.needs, seen.wakes_with, seen.off_until_named):
        return "off", reason
    lacking = [flag(name, plugin.name) for name in seen.needs if fold(name) not in section]
    if lacking:
        return "problem", f"needs {' and '.join(lacking)}"
    return plugin.status, plugin.reason


@functools.cache
def static_hooks(found: Found) -> frozenset[str]:
    """Returns the hooks that a plugin declares, by name, as far as its files show."""
    try:
        own = _scope_of(found)
        value = dict(own.assigned()).get("hookspecs") if own else None
        if own is None or value is None:
            return frozenset()
        specs = own.scope(ast.unparse(value).split("."))
        return frozenset(specs.marked("hookspec") if specs else ())
    except (SyntaxError, ValueError, OSError):
        return frozenset()


def foreign_hooks(found: Found, others: Iterable[Found]) -> list[str]:
    """Returns the hooks that a plugin implements and the core lacks, as far as its files show.

    Args:
        others: plugins that may declare the hooks that this one implements.
    """
    try:
        own = _scope_of(found)
        names = [name for name in (own.marked("hookimpl") if own else ()) if name not in _HOOKS]
    except (SyntaxError, ValueError, OSError):
        return []
    return [name for name in names if not any(name in static_hooks(one) for one in others)]


def _scope_of(found: Found) -> Scope | None:
    """Returns the class or module of a plugin."""
    module, _, name = found.entry_point.value.partition("[")[0].replace(" ", "").partition(":")
    if found.path is not None:
        name = split_label(found.entry_point.value)[1]
    return Scope(module, found.path or locate(module)[0]).scope(name.split(".") if name else [])


def _look(module: str, path: Path, attribute: str, others: Iterable[Found]) -> StaticReport:
    """Follows a name from the entry point's module to its definition."""
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
            return StaticReport(_hook_problem(node, others), needs, waking, waits)
        if (following := origin_of(node, attribute, module, path)) is None:
            return StaticReport()
        module, attribute = following
        found, problem = locate(module)
        if problem or found is None:
            return StaticReport(problem)
        path = found
    return StaticReport()


def _import_problem(body: list[ast.stmt], path: Path) -> str:
    """Finds statements of a module that always raise: missing imports, a bare `raise`."""
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


def _hook_problem(node: ast.ClassDef, others: Iterable[Found]) -> str:
    """Finds a marked method whose name is almost that of a hook."""
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.name in _HOOKS:
            continue
        for mark in method.decorator_list:
            call = mark.func if isinstance(mark, ast.Call) else mark
            keywords = {one.arg for one in mark.keywords} if isinstance(mark, ast.Call) else set()
            is_mark = isinstance(call, ast.Name) and call.id == "hookimpl"
            hint = closest(method.name, _HOOKS)
            if method.name in REMOVED_HOOKS:
                hint = f"; it was {REMOVED_HOOKS[method.name]}"
            if not is_mark or not hint or keywords & {"specname", "optionalhook"}:
                continue
            if not any(method.name in static_hooks(one) for one in others):
                return f"no hook is named {method.name!r}{hint}"
    return ""


def _needs(node: ast.ClassDef) -> Iterator[str]:
    """Yields the parameters of the constructor that have no default."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            positional = [*method.args.posonlyargs, *method.args.args][1:]
            num_needed = len(positional) - len(method.args.defaults)
            yield from (one.arg for one in positional[: max(num_needed, 0)])
            pairs = zip(method.args.kwonlyargs, method.args.kw_defaults, strict=True)
            yield from (one.arg for one, default in pairs if default is None)


def _texts(value: ast.expr | None) -> tuple[str, ...]:
    """Returns the texts in an expression, such as the options in `wakes_with`, if they are literals."""
    values = (getattr(one, "value", None) for one in (ast.walk(value) if value else ()))
    return tuple(one for one in values if isinstance(one, str))
