"""Functions that are marked as hooks: their names, arguments, results and options are checked."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pluggy

from eventloop.errors import PluginError, a, closest
from eventloop.fixes import published
from eventloop.hook_markers import OF_ITSELF, PROJECT, TELL_ALL, Hook, ImplOptions, impl_options
from eventloop.naming import fold
from eventloop.plugin.declared_hooks import HookTable
from eventloop.plugin.hook_intervals import interval_misfits
from eventloop.plugin.mistakes import method_of, mistakes, never_called
from eventloop.plugin.order import Implementation
from eventloop.plugin.records import Plugin

_READER = pluggy.PluginManager(PROJECT)


def implementations(
    plugin: Plugin, hooks: HookTable
) -> tuple[list[Implementation], list[PluginError]]:
    """Reads a plugin's hook implementations, and every problem with them."""
    found: list[Implementation] = []
    problems = list(mistakes(plugin, hooks))
    marked = list(_marked(plugin))
    logs = any((impl.opts["specname"] or name) in ("log", "log_text") for name, impl in marked)
    for name, impl in marked:
        hook_name = impl.opts["specname"] or name
        if (hook := hooks.get(hook_name)) is None:
            if not impl.opts["optionalhook"]:
                problems.append(_unknown_hook(plugin, name, hook_name, hooks))
            continue
        options = impl_options(impl.function)
        # The core's are held to the hooks' signatures by a test.
        misfits = [] if plugin.role == "core" else [*_misfits(plugin, name, impl, hook, options)]
        problems += misfits
        if not misfits:
            phase = 1
            if impl.tryfirst:
                phase = 0
            elif impl.trylast:
                phase = 2
            found.append(
                Implementation(
                    plugin=plugin,
                    hook=hook,
                    function=impl.function,
                    argnames=_argnames(impl),
                    phase=phase,
                    wrapper=impl.wrapper,
                    logs=logs,
                    **vars(options),
                )
            )
    return found, [*problems, *_phases_without_effect(found)]


def takes_part(plugin: Plugin, hooks: HookTable) -> bool:
    """Returns whether a plugin has a hook implementation, or seems meant to, or declares hooks."""
    declares = plugin.facts.hookspecs is not None
    return declares or any(_marks(plugin)) or any(never_called(plugin, hooks))


def equal_plugins(plugins: Sequence[Plugin]) -> Iterator[PluginError]:
    """Finds different plugins that compare equal, of which pluggy would register only one."""
    fix = "take __eq__ out of the class, or use @dataclass(eq=False)"
    distinct: list[Plugin] = []
    for one in plugins:
        if _equals(one, _Nothing()):
            what = "compares equal to anything, or can't be compared, so that it can't be told from"
            yield one.problem(f"{one.name} {what} other plugins", fix)
            continue
        for other in distinct:
            if one.target is not other.target and _equals(one, other.target):
                yield PluginError(
                    f"the plugins {other.name} and {one.name} compare equal, so that they can't "
                    "be told apart",
                    subjects=[other, one],
                    plugins=f"{other.origin}, {one.origin}",
                    fix=one.fix(fix),
                )
        distinct.append(one)


def unknown_names(found: Sequence[Implementation], known: Sequence[str]) -> Iterator[PluginError]:
    """Finds edges that misspell the name of an installed plugin.

    A name without a similar one, or one of `published`, belongs to a plugin that isn't installed,
    which is allowed.
    """
    for one, name in unknown_edges(found, known):
        is_published = fold(name).replace("_", "-") in published()
        if not is_published and (hint := closest(name, known)):
            what = f"no plugin is named {name!r}{hint}"
            yield one.problem(what, "fix the name in before= or after=")


def unknown_edges(
    found: Iterable[Implementation], known: Sequence[str]
) -> Iterator[tuple[Implementation, str]]:
    """Yields edges to an unknown name, each with its implementation."""
    folded = {fold(name) for name in (*known, "task", "core")}
    for one in found:
        for name in (*one.before, *one.after):
            if fold(name) not in folded:
                yield one, name


class _Nothing:
    """Equal to no plugin."""


def _equals(one: Plugin, other: object) -> bool:
    """Compares as pluggy does; objects that can't be compared count as equal."""
    try:
        return bool(one.target == other)
    except Exception:  # noqa: BLE001 - whatever its author does there
        return True


def _marks(plugin: Plugin) -> Iterator[tuple[str, pluggy.HookimplOpts]]:
    """Yields the options of each function that `hookimpl` marked, by name."""
    for name in dir(plugin.target):
        if not name.startswith("__") and (opts := _READER.parse_hookimpl_opts(plugin.target, name)):
            yield name, opts


def _marked(plugin: Plugin) -> Iterator[tuple[str, pluggy.HookImpl]]:
    """Yields what pluggy makes of each of these functions, by name."""
    for name, opts in _marks(plugin):
        for option in ("tryfirst", "trylast", "wrapper", "optionalhook", "hookwrapper"):
            opts.setdefault(option, False)  # type: ignore[misc]
        opts.setdefault("specname", None)
        yield name, pluggy.HookImpl(plugin.target, plugin.name, getattr(plugin.target, name), opts)


def _misfits(
    plugin: Plugin, method: str, impl: pluggy.HookImpl, hook: Hook, options: ImplOptions
) -> Iterator[PluginError]:
    """Finds problems of an implementation with its hook."""
    misfits = (
        *_signature_misfits(impl, hook),
        *_generator_misfits(impl, hook),
        *_role_misfits(plugin, impl, hook, options),
        *_option_misfits(plugin, impl, hook, options),
    )
    for what, fixes in misfits:
        yield plugin.problem(what, fixes, method_of(plugin, method))


# What is wrong, and how to fix it.
Misfits = Iterator[tuple[str, str]]


def _role_misfits(
    plugin: Plugin, impl: pluggy.HookImpl, hook: Hook, options: ImplOptions
) -> Misfits:
    if plugin.role == "callback" and hook.for_algorithms:
        fixes = "register it in eventloop.algorithms, or pass it to Trainer(algorithms=...)"
        if plugin.found is not None and plugin.found.path is not None:
            fixes = 'write role = "algorithm" in the class, or at the top of a module'
        yield (f"a callback can't implement the {hook.kind} {hook.name}; it can only watch", fixes)
    if options.rank_zero and (plugin.role != "callback" or hook.kind != "event"):
        yield (
            f"rank_zero=True is for events of callbacks, but this is {a(hook.kind)} of "
            f"{a(plugin.role)}: ranks that do different things drift apart",
            "leave it out",
        )


def _option_misfits(
    plugin: Plugin, impl: pluggy.HookImpl, hook: Hook, options: ImplOptions
) -> Misfits:
    if impl.hookwrapper:
        yield (
            f"this implementation of {hook.name} is marked with pluggy's hookwrapper=True, the older "
            "kind of wrapper, which isn't called here",
            "write @hookimpl(wrapper=True), `result = yield` and `return result`",
        )
    if impl.wrapper and hook.name in (*TELL_ALL, *OF_ITSELF):
        yield (
            f"{hook.name} can't be wrapped: each plugin is called, whatever another one does",
            "implement it without wrapper=True",
        )
    if impl.tryfirst and impl.trylast:
        yield (
            f"{hook.name} is to run first and last: tryfirst=True and trylast=True",
            "leave one of them out",
        )
    for option in ("before", "after"):
        for name in getattr(options, option):
            if fold(name) == fold(plugin.name):
                yield f"{option}={name!r} names the plugin itself", "leave it out"
    yield from interval_misfits(hook, options.every)
    if options.conditional and hook.kind != "action":
        yield (
            f"conditional=True has no effect on {hook.name}, which asks every plugin",
            "leave it out; None is an answer here",
        )


def _phases_without_effect(found: Sequence[Implementation]) -> Iterator[PluginError]:
    """Finds phases on events that run in the reverse of the opening one's order."""
    opened = {one.hook.name for one in found if not one.wrapper}
    for one in found:
        is_reversed = one.plugin.role in ("task", "algorithm") and one.hook.closes in opened
        if is_reversed and one.phase != 1 and not one.wrapper:
            phase = "tryfirst" if one.phase == 0 else "trylast"
            yield one.problem(
                f"{phase}=True has no effect on {one.hook.name}, which runs in the reverse order "
                f"of {one.hook.closes}",
                f"write it on {one.hook.closes}, or before= or after= on {one.hook.name}",
            )


def _signature_misfits(impl: pluggy.HookImpl, hook: Hook) -> Misfits:
    takes = f"take what the hook passes: {', '.join(hook.argnames)}"
    function = getattr(impl.function, "__func__", impl.function)
    parameters = list(inspect.signature(function).parameters.values())
    first = parameters[0].name if parameters else ""
    if inspect.ismethod(impl.function) and (not first or first in hook.argnames):
        is_plugin = f"'s first parameter is {first!r}, which would be" if first else " can't take"
        yield (
            f"this method{is_plugin} the plugin itself: `self` is missing",
            f"write `def {impl.function.__name__}(self, {first})`".replace(", )", ")"),
        )
    for parameter in parameters[1:] if inspect.ismethod(impl.function) else parameters:
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            yield f"{hook.name} passes nothing to {parameter}: arguments are matched by name", takes
        elif parameter.kind == parameter.KEYWORD_ONLY:
            yield f"{hook.name} passes no keyword-only argument {name!r}", takes
        elif name not in hook.argnames:
            hint = closest(name, hook.argnames)
            fix = takes
            if parameter.default is not parameter.empty:
                fix = f"{takes}; a value of the plugin's own belongs on it, `self.{name}`"
            yield f"{hook.name} has no argument {name!r}{hint}", fix


def _generator_misfits(impl: pluggy.HookImpl, hook: Hook) -> Misfits:
    function = inspect.unwrap(impl.function)
    is_generator = inspect.isgeneratorfunction(function)
    is_silent = impl.wrapper and is_generator and not _returns_something(function)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        yield (
            f"{hook.name} can't be implemented by an `async def`: it would never be awaited",
            "write `def`",
        )
    elif is_generator and not impl.wrapper and not impl.hookwrapper:
        yield (
            f"this implementation of {hook.name} yields, so that its body would never run",
            "mark it with @hookimpl(wrapper=True), or take the yield out",
        )
    elif impl.wrapper and not is_generator:
        yield (
            f"this wrapper of {hook.name} doesn't yield, so that nothing would run inside it",
            "yield once and return the result, or take wrapper=True out",
        )
    elif is_silent and hook.kind != "event" and not impl_options(function).conditional:
        yield (
            f"this wrapper of the {hook.kind} {hook.name} never returns a result",
            "write `result = yield` and `return result`",
        )


def _returns_something(function: Callable[..., Any]) -> bool:
    """Returns whether a function can return something other than None, or always raises."""
    previous: dis.Instruction | None = None
    returns = []
    for instruction in dis.get_instructions(function):
        if instruction.opname == "RETURN_CONST":
            returns.append(instruction.argval is not None)
        if instruction.opname == "RETURN_VALUE" and previous is not None:
            returns.append(previous.opname != "LOAD_CONST" or previous.argval is not None)
        previous = instruction
    return any(returns) or not returns


def _unknown_hook(plugin: Plugin, method: str, hook_name: str, hooks: HookTable) -> PluginError:
    hint = hooks.hint(hook_name)
    fix = "rename the method, list the hooks with `eventloop plugins hooks`"
    if hooks.knows(hook_name) or not hint:
        missing = "switch that plugin on" if hint else "install the package that declares it"
        fix = f"{missing}, mark the method with @hookimpl(optionalhook=True)"
    what = f"no hook is named {hook_name!r}{hint or ', and no installed plugin declares it'}"
    return plugin.problem(what, fix, method_of(plugin, method))


def _argnames(impl: pluggy.HookImpl) -> tuple[str, ...]:
    """Returns the parameters to pass, those with a default included."""
    return (*impl.argnames, *impl.kwargnames)
