"""Validation: what pluggy would accept in silence, or refuse without a way out, found by name."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import pluggy

from eventloop.errors import PluginError, a, closest
from eventloop.hooks import PROJECT, TELL_ALL, Hook, ImplOptions, impl_options
from eventloop.plugin.order import Implementation
from eventloop.plugin.records import Plugin, fold


def implementations(
    plugin: Plugin, hooks: Mapping[str, Hook]
) -> tuple[list[Implementation], list[PluginError]]:
    """Reads a plugin's hook implementations, and every problem with them."""
    found: list[Implementation] = []
    problems = [*_unmarked(plugin, hooks), *_hidden(plugin, hooks)]
    marked = list(_marked(plugin))
    logs = any((impl.opts["specname"] or name) == "log" for name, impl in marked)
    for name, impl in marked:
        hook_name = impl.opts["specname"] or name
        hook = hooks.get(hook_name)
        if hook is None:
            if not impl.opts["optionalhook"]:
                problems.append(_unknown_hook(plugin, name, hook_name, hooks))
            continue
        options = impl_options(impl.function)
        misfits = list(_misfits(plugin, name, impl, hook, options))
        problems += misfits
        if not misfits:
            found.append(_implementation(plugin, impl, hook, options, logs=logs))
    return found, problems


def takes_part(plugin: Plugin, hooks: Mapping[str, Hook]) -> bool:
    """Tells whether a plugin has a hook implementation, meant to have one, or adds hooks."""
    adds_hooks = getattr(plugin.target, "hookspecs", None) is not None
    return adds_hooks or any(_marked(plugin)) or any(_unmarked(plugin, hooks))


def equal_plugins(plugins: Sequence[Plugin]) -> Iterator[PluginError]:
    """Finds different plugins that compare equal, of which pluggy would register one."""
    for idx, one in enumerate(plugins):
        for other in plugins[:idx]:
            if one.target is not other.target and one.target == other.target:
                yield PluginError(
                    f"the plugins {other.name} and {one.name} compare equal, so that they can't "
                    "be told apart",
                    plugins=f"{other.origin}, {one.origin}",
                    fix="take __eq__ out of the class, or use @dataclass(eq=False)",
                )


def unknown_names(found: Sequence[Implementation], known: Sequence[str]) -> Iterator[PluginError]:
    """Finds edges that misspell the name of an installed plugin.

    A name that is like none is that of a plugin that isn't installed, which is no mistake.
    """
    folded = [fold(name) for name in known]
    for one in found:
        for name in (*one.before, *one.after):
            if fold(name) not in folded and (hint := closest(fold(name), folded)):
                yield PluginError(
                    f"no plugin is named {name!r}{hint}",
                    plugin=one.origin,
                    at=one.where,
                    fix="mend the name in before= or after=",
                )


def _implementation(
    plugin: Plugin, impl: pluggy.HookImpl, hook: Hook, options: ImplOptions, *, logs: bool
) -> Implementation:
    return Implementation(
        plugin=plugin,
        hook=hook,
        function=impl.function,
        argnames=_argnames(impl, hook),
        phase=0 if impl.tryfirst else 2 if impl.trylast else 1,
        wrapper=impl.wrapper,
        conditional=options.conditional,
        before=options.before,
        after=options.after,
        every=options.every,
        rank_zero=options.rank_zero,
        logs=logs,
    )


def _marked(plugin: Plugin) -> Iterator[tuple[str, pluggy.HookImpl]]:
    """Gives what `hookimpl` marked, as pluggy reads it, by the name of its function."""
    reader = pluggy.PluginManager(PROJECT)
    for name in (one for one in dir(plugin.target) if not one.startswith("__")):
        opts = reader.parse_hookimpl_opts(plugin.target, name)
        if opts is not None:
            function = getattr(plugin.target, name)
            for option in ("tryfirst", "trylast", "wrapper", "optionalhook", "hookwrapper"):
                opts.setdefault(option, False)  # type: ignore[misc]
            opts.setdefault("specname", None)
            yield name, pluggy.HookImpl(plugin.target, plugin.name, function, opts)


def _misfits(
    plugin: Plugin, method: str, impl: pluggy.HookImpl, hook: Hook, options: ImplOptions
) -> Iterator[PluginError]:
    """Finds what makes an implementation unfit for its hook."""
    who = {"plugin": f"{plugin.origin}, {_method(plugin, method)}"}
    yield from _signature_misfits(impl, hook, who)
    yield from _generator_misfits(impl, hook, who)
    if plugin.role == "callback" and hook.for_algorithms:
        yield PluginError(
            f"a callback can't take part in the {hook.kind} {hook.name}; it may only watch",
            **who,
            fix="register it in eventloop.algorithms, or pass it to Trainer(algorithms=...)",
        )
    if impl.wrapper and hook.name in TELL_ALL:
        yield PluginError(
            f"{hook.name} can't be wrapped: everybody is told, whatever the others do",
            **who,
            fix="implement it without wrapper=True",
        )
    if options.every is not None and hook.kind != "event":
        yield PluginError(
            f"every={str(options.every)!r} is for events, but {hook.name} is {a(hook.kind)}",
            **who,
            fix="compare the clock in the implementation: state.clock.crossed(Time(...))",
        )
    if options.conditional and hook.kind != "action":
        yield PluginError(
            f"conditional=True has no effect on {hook.name}, which asks everybody",
            **who,
            fix="leave it out; None is an answer here",
        )
    if options.rank_zero and (plugin.role != "callback" or hook.kind != "event"):
        yield PluginError(
            f"rank_zero=True is for events of callbacks, but this is {a(hook.kind)} of "
            f"{a(plugin.role)}: ranks that do different things drift apart",
            **who,
            fix="leave it out",
        )


def _signature_misfits(
    impl: pluggy.HookImpl, hook: Hook, who: dict[str, str]
) -> Iterator[PluginError]:
    takes = f"take what the hook passes: {', '.join(hook.argnames)}"
    filled = _argnames(impl, hook)
    for name, parameter in inspect.signature(impl.function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            yield PluginError(
                f"{hook.name} passes nothing to {parameter}: arguments are matched by name",
                **who,
                fix=takes,
            )
        elif parameter.kind == parameter.KEYWORD_ONLY:
            yield PluginError(
                f"{hook.name} passes no keyword-only argument {name!r}", **who, fix=takes
            )
        elif name in filled and name not in hook.argnames:
            hint = closest(name, hook.argnames)
            yield PluginError(f"{hook.name} has no argument {name!r}{hint}", **who, fix=takes)


def _generator_misfits(
    impl: pluggy.HookImpl, hook: Hook, who: dict[str, str]
) -> Iterator[PluginError]:
    function = inspect.unwrap(impl.function)
    is_generator = inspect.isgeneratorfunction(function)
    is_silent = impl.wrapper and is_generator and not _returns_something(function)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        yield PluginError(
            f"{hook.name} can't be implemented by an `async def`: nobody would await it",
            **who,
            fix="write `def`",
        )
    elif is_generator and not impl.wrapper:
        yield PluginError(
            f"this implementation of {hook.name} yields, so that its body would never run",
            **who,
            fix="mark it with @hookimpl(wrapper=True), or take the yield out",
        )
    elif impl.wrapper and not is_generator:
        yield PluginError(
            f"this wrapper of {hook.name} doesn't yield, so that nothing would run inside it",
            **who,
            fix="yield once and return the result, or take wrapper=True out",
        )
    elif is_silent and hook.kind != "event" and not impl_options(function).conditional:
        yield PluginError(
            f"this wrapper of the {hook.kind} {hook.name} never returns a result",
            **who,
            fix="write `result = yield` and `return result`",
        )


def _returns_something(function: Callable[..., Any]) -> bool:
    """Tells whether a function ever gives something other than None, or always raises."""
    previous: dis.Instruction | None = None
    returns = []
    for instruction in dis.get_instructions(function):
        if instruction.opname == "RETURN_CONST":
            returns.append(instruction.argval is not None)
        if instruction.opname == "RETURN_VALUE" and previous is not None:
            returns.append(previous.opname != "LOAD_CONST" or previous.argval is not None)
        previous = instruction
    return any(returns) or not returns


def _unmarked(plugin: Plugin, hooks: Mapping[str, Hook]) -> Iterator[PluginError]:
    """Finds functions that have a hook's name and look like it, but lack the mark."""
    target = plugin.target
    own = target if isinstance(target, ModuleType) else type(target)
    # An nn.Module's forward is its own affair.
    is_module = any(base.__module__.startswith("torch.nn.") for base in type(target).__mro__)
    for name, function in vars(own).items():
        if name not in hooks or not inspect.isfunction(function) or plugin.role == "core":
            continue
        if function.__module__ != getattr(own, "__name__" if own is target else "__module__"):
            continue
        if hasattr(function, f"{PROJECT}_impl") or (is_module and name == "forward"):
            continue
        parameters = [one for one in inspect.signature(function).parameters if one != "self"]
        if not parameters or parameters[0] == "state":
            yield PluginError(
                f"{name} is the name of a hook, but this function isn't marked, so that nobody "
                "would call it",
                plugin=f"{plugin.origin}, {_method(plugin, name)}",
                fix="put @hookimpl above it, or rename it",
            )


def _hidden(plugin: Plugin, hooks: Mapping[str, Hook]) -> Iterator[PluginError]:
    """Finds attributes of an instance that hide a hook method of its class."""
    target = plugin.target
    if isinstance(target, ModuleType):
        return
    for name in getattr(target, "__dict__", {}):
        method = getattr(type(target), name, None)
        if name in hooks and hasattr(method, f"{PROJECT}_impl"):
            yield PluginError(
                f"the attribute {name} hides the hook method of the same name",
                plugin=f"{plugin.origin}, {_method(plugin, name)}",
                fix="give the attribute another name",
            )


def _unknown_hook(
    plugin: Plugin, method: str, hook_name: str, hooks: Mapping[str, Hook]
) -> PluginError:
    return PluginError(
        f"no hook is named {hook_name!r}{closest(hook_name, hooks)}",
        plugin=f"{plugin.origin}, {_method(plugin, method)}",
        fix=plugin.fix("rename the method, list the hooks with `eventloop plugins hooks`"),
    )


def _argnames(impl: pluggy.HookImpl, hook: Hook) -> tuple[str, ...]:
    """Gives the parameters to fill: those without a default, and others that the hook passes."""
    names = (*impl.argnames, *impl.kwargnames)
    passed = [idx for idx, name in enumerate(names) if name in hook.argnames]
    return names[: max([len(impl.argnames), *(idx + 1 for idx in passed)])]


def _method(plugin: Plugin, method: str) -> str:
    target = plugin.target
    kind = getattr(target, "__name__", None) or type(target).__name__
    return f"method {kind}.{method}"
