"""Validation: what pluggy would accept in silence, or refuse without a way out, found by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pluggy

from eventloop.errors import PluginError, closest
from eventloop.hooks import PROJECT, TELL_ALL, Hook, impl_options
from eventloop.plugin.order import Implementation
from eventloop.plugin.records import Plugin


def implementations(
    plugin: Plugin, hooks: Mapping[str, Hook]
) -> tuple[list[Implementation], list[PluginError]]:
    """Reads a plugin's hook implementations, and every problem with them."""
    found: list[Implementation] = []
    problems: list[PluginError] = []
    marked = list(_marked(plugin))
    logs = any((impl.opts["specname"] or name) == "log" for name, impl in marked)
    for name, impl in marked:
        hook_name = impl.opts["specname"] or name
        hook = hooks.get(hook_name)
        if hook is None:
            if not impl.opts["optionalhook"]:
                problems.append(_unknown_hook(plugin, name, hook_name, hooks))
            continue
        problem = _misfit(plugin, name, impl, hook)
        if problem is not None:
            problems.append(problem)
            continue
        found.append(
            Implementation(
                plugin=plugin,
                hook=hook,
                function=impl.function,
                argnames=_argnames(impl, hook),
                phase=0 if impl.tryfirst else 2 if impl.trylast else 1,
                wrapper=impl.wrapper,
                conditional=impl_options(impl.function).conditional,
                logs=logs,
            )
        )
    return found, problems


def _marked(plugin: Plugin) -> Iterator[tuple[str, pluggy.HookImpl]]:
    """Gives what `hookimpl` marked, as pluggy reads it, by the name of its function."""
    reader = pluggy.PluginManager(PROJECT)
    for name in dir(plugin.target):
        opts = reader.parse_hookimpl_opts(plugin.target, name)
        if opts is not None:
            function = getattr(plugin.target, name)
            for option in ("tryfirst", "trylast", "wrapper", "optionalhook", "hookwrapper"):
                opts.setdefault(option, False)  # type: ignore[misc]
            opts.setdefault("specname", None)
            yield name, pluggy.HookImpl(plugin.target, plugin.name, function, opts)


def _unknown_hook(
    plugin: Plugin, method: str, hook_name: str, hooks: Mapping[str, Hook]
) -> PluginError:
    return PluginError(
        f"no hook is named {hook_name!r}{closest(hook_name, hooks)}",
        plugin=f"{plugin.origin}, {_method(plugin, method)}",
        fix=plugin.fix("rename the method"),
    )


def _misfit(plugin: Plugin, method: str, impl: pluggy.HookImpl, hook: Hook) -> PluginError | None:
    """Finds what makes an implementation unfit for its hook."""
    who = f"{plugin.origin}, {_method(plugin, method)}"
    unknown = [name for name in _argnames(impl, hook) if name not in hook.argnames]
    if unknown:
        return PluginError(
            f"{hook.name} has no argument {unknown[0]!r}{closest(unknown[0], hook.argnames)}",
            plugin=who,
            fix=f"take what the hook passes: {', '.join(hook.argnames)}",
        )
    if plugin.role == "callback" and hook.for_algorithms:
        return PluginError(
            f"a callback can't take part in the {hook.kind} {hook.name}; it may only watch",
            plugin=who,
            fix="register it in eventloop.algorithms, or pass it to Trainer(algorithms=...)",
        )
    if impl.wrapper and hook.name in TELL_ALL:
        return PluginError(
            f"{hook.name} can't be wrapped: everybody is told, whatever the others do",
            plugin=who,
            fix="implement it without wrapper=True",
        )
    if impl_options(impl.function).conditional and hook.kind != "action":
        return PluginError(
            f"conditional=True has no effect on {hook.name}, which asks everybody",
            plugin=who,
            fix="leave it out; None is an answer here",
        )
    return None


def _argnames(impl: pluggy.HookImpl, hook: Hook) -> tuple[str, ...]:
    """Gives the parameters to fill: those without a default, and others that the hook passes."""
    names = (*impl.argnames, *impl.kwargnames)
    passed = [idx for idx, name in enumerate(names) if name in hook.argnames]
    return names[: max([len(impl.argnames), *(idx + 1 for idx in passed)])]


def _method(plugin: Plugin, method: str) -> str:
    target = plugin.target
    kind = getattr(target, "__name__", None) or type(target).__name__
    return f"method {kind}.{method}"
