"""Checks the functions that are marked as hooks: their names, arguments, results and options."""

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
    """Reads a plugin's hook implementations.

    Returns:
        The valid implementations, and every problem with the plugin's methods and attributes.
    """
    valid: list[Implementation] = []
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
        # A test checks the core's implementations; skipping them here saves time at every start.
        misfits = [] if plugin.role == "core" else [*_misfits(plugin, name, impl, hook, options)]
        problems += misfits
        if not misfits:
            phase = 1
            if impl.tryfirst:
                phase = 0
            elif impl.trylast:
                phase = 2
            valid.append(
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
    return valid, [*problems, *_phases_without_effect(valid)]


def takes_part(plugin: Plugin, hooks: HookTable) -> bool:
    """Returns whether a plugin implements or declares hooks.

    A function that looks like an unmarked implementation counts, so that the message is about it.
    """
    declares = plugin.facts.hookspecs is not None
    return declares or any(_marks(plugin)) or any(never_called(plugin, hooks))


def equal_plugins(plugins: Sequence[Plugin]) -> Iterator[PluginError]:
    """Finds different plugins that compare equal; pluggy would register only one of them."""
    fix = "take __eq__ out of the class, or use @dataclass(eq=False)"
    distinct: list[Plugin] = []
    for plugin in plugins:
        if _equals(plugin, _Nothing()):
            problem = (
                "compares equal to anything, or can't be compared, so that it can't be told from"
            )
            yield plugin.problem(f"{plugin.name} {problem} other plugins", fix)
            continue
        for previous in distinct:
            if plugin.target is not previous.target and _equals(plugin, previous.target):
                yield PluginError(
                    f"the plugins {previous.name} and {plugin.name} compare equal, so that they can't "
                    "be told apart",
                    subjects=[previous, plugin],
                    plugins=f"{previous.origin}, {plugin.origin}",
                    fix=plugin.fix(fix),
                )
        distinct.append(plugin)


def unknown_names(
    implementations: Sequence[Implementation], plugin_names: Sequence[str]
) -> Iterator[PluginError]:
    """Finds edges that misspell the name of an installed plugin.

    Edges to plugins that aren't installed are allowed: a name is misspelt only if it is similar to
    an installed plugin's name, and isn't in `published`.
    """
    for impl, name in unknown_edges(implementations, plugin_names):
        is_published = fold(name).replace("_", "-") in published()
        if not is_published and (hint := closest(name, plugin_names)):
            message = f"no plugin is named {name!r}{hint}"
            yield impl.problem(message, "fix the name in before= or after=")


def unknown_edges(
    implementations: Iterable[Implementation], plugin_names: Sequence[str]
) -> Iterator[tuple[Implementation, str]]:
    """Yields (implementation, name) for each edge to an unknown name."""
    folded = {fold(name) for name in (*plugin_names, "task", "core")}
    for impl in implementations:
        for name in (*impl.before, *impl.after):
            if fold(name) not in folded:
                yield impl, name


class _Nothing:
    """An object that no plugin should compare equal to."""


def _equals(plugin: Plugin, other_target: object) -> bool:
    """Compares as pluggy does; objects that can't be compared count as equal."""
    try:
        return bool(plugin.target == other_target)
    except Exception:  # noqa: BLE001 - a plugin's __eq__ may raise anything
        return True


def _marks(plugin: Plugin) -> Iterator[tuple[str, pluggy.HookimplOpts]]:
    """Yields the name and options of each function that is marked with `hookimpl`."""
    for name in dir(plugin.target):
        if not name.startswith("__") and (opts := _READER.parse_hookimpl_opts(plugin.target, name)):
            yield name, opts


def _marked(plugin: Plugin) -> Iterator[tuple[str, pluggy.HookImpl]]:
    """Yields the name and pluggy's `HookImpl` of each function that is marked with `hookimpl`."""
    for name, opts in _marks(plugin):
        # A marker of an older pluggy lacks some options, and HookImpl reads all of them.
        for option in ("tryfirst", "trylast", "wrapper", "optionalhook", "hookwrapper"):
            opts.setdefault(option, False)  # type: ignore[misc]
        opts.setdefault("specname", None)
        yield name, pluggy.HookImpl(plugin.target, plugin.name, getattr(plugin.target, name), opts)


def _misfits(
    plugin: Plugin, method: str, impl: pluggy.HookImpl, hook: Hook, options: ImplOptions
) -> Iterator[PluginError]:
    """Finds mismatches between an implementation and its hook."""
    misfits = (
        *_signature_misfits(impl, hook),
        *_generator_misfits(impl, hook),
        *_role_misfits(plugin, impl, hook, options),
        *_option_misfits(plugin, impl, hook, options),
    )
    for message, fix in misfits:
        yield plugin.problem(message, fix, method_of(plugin, method))


# Pairs of message and fix.
Misfits = Iterator[tuple[str, str]]


def _role_misfits(
    plugin: Plugin, impl: pluggy.HookImpl, hook: Hook, options: ImplOptions
) -> Misfits:
    if plugin.role == "callback" and hook.for_algorithms:
        fix = "register it in eventloop.algorithms, or pass it to Trainer(algorithms=...)"
        if plugin.found is not None and plugin.found.path is not None:
            fix = 'write role = "algorithm" in the class, or at the top of a module'
        yield (f"a callback can't implement the {hook.kind} {hook.name}; it can only watch", fix)
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
            f"{hook.name} can't be wrapped: every plugin is called, even if another one raises",
            "implement it without wrapper=True",
        )
    if impl.tryfirst and impl.trylast:
        yield (
            f"{hook.name} has both tryfirst=True and trylast=True",
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


def _phases_without_effect(
    implementations: Sequence[Implementation],
) -> Iterator[PluginError]:
    """Finds phases on closing events, whose order is the reverse of the opening event's order."""
    opening_events = {impl.hook.name for impl in implementations if not impl.wrapper}
    for impl in implementations:
        is_reversed = (
            impl.plugin.role in ("task", "algorithm") and impl.hook.closes in opening_events
        )
        if is_reversed and impl.phase != 1 and not impl.wrapper:
            phase = "tryfirst" if impl.phase == 0 else "trylast"
            yield impl.problem(
                f"{phase}=True has no effect on {impl.hook.name}, which runs in the reverse order "
                f"of {impl.hook.closes}",
                f"write it on {impl.hook.closes}, or before= or after= on {impl.hook.name}",
            )


def _signature_misfits(impl: pluggy.HookImpl, hook: Hook) -> Misfits:
    takes = f"take only arguments that the hook passes: {', '.join(hook.argnames)}"
    function = getattr(impl.function, "__func__", impl.function)
    parameters = list(inspect.signature(function).parameters.values())
    first_name = parameters[0].name if parameters else ""
    if inspect.ismethod(impl.function) and (not first_name or first_name in hook.argnames):
        is_plugin = (
            f"'s first parameter is {first_name!r}, which would be" if first_name else " can't take"
        )
        yield (
            f"this method{is_plugin} the plugin itself: `self` is missing",
            f"write `def {impl.function.__name__}(self, {first_name})`".replace(", )", ")"),
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
                fix = f"{takes}; store a value of the plugin as an attribute, `self.{name}`"
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
            f"this implementation of {hook.name} yields, so its body would never run",
            "mark it with @hookimpl(wrapper=True), or take the yield out",
        )
    elif impl.wrapper and not is_generator:
        yield (
            f"this wrapper of {hook.name} doesn't yield, so nothing would run inside it",
            "yield once and return the result, or take wrapper=True out",
        )
    elif is_silent and hook.kind != "event" and not impl_options(function).conditional:
        yield (
            f"this wrapper of the {hook.kind} {hook.name} never returns a result",
            "write `result = yield` and `return result`",
        )


def _returns_something(function: Callable[..., Any]) -> bool:
    """Returns whether a function can return a value other than None, or always raises.

    Reads the bytecode, in which `return None` is LOAD_CONST followed by RETURN_VALUE, or
    RETURN_CONST from Python 3.12 on.
    """
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
    message = f"no hook is named {hook_name!r}{hint or ', and no installed plugin declares it'}"
    return plugin.problem(message, fix, method_of(plugin, method))


def _argnames(impl: pluggy.HookImpl) -> tuple[str, ...]:
    """Returns the names of all parameters, including those with a default."""
    return (*impl.argnames, *impl.kwargnames)
