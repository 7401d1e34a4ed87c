"""Validation: what pluggy would accept in silence, or refuse without a way out, found by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pluggy

from eventloop.errors import PluginError, closest
from eventloop.hooks import PROJECT, Hook, impl_options
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
                argnames=tuple(impl.argnames),
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
        fix=f"rename the method, or switch the plugin off with `-p no:{plugin.name}`",
    )


def _misfit(plugin: Plugin, method: str, impl: pluggy.HookImpl, hook: Hook) -> PluginError | None:
    """Finds what makes an implementation unfit for its hook."""
    who = f"{plugin.origin}, {_method(plugin, method)}"
    unknown = [name for name in impl.argnames if name not in hook.argnames]
    if unknown:
        return PluginError(
            f"{hook.name} has no argument {unknown[0]!r}{closest(unknown[0], hook.argnames)}",
            plugin=who,
            fix=f"take what the hook passes: {', '.join(hook.argnames)}",
        )
    if plugin.role == "callback" and hook.kind == "action":
        return PluginError(
            f"a callback can't take part in the action {hook.name}; it may only watch",
            plugin=who,
            fix="register it in eventloop.algorithms, or pass it to Trainer(algorithms=...)",
        )
    return None


def _method(plugin: Plugin, method: str) -> str:
    target = plugin.target
    kind = getattr(target, "__name__", None) or type(target).__name__
    return f"method {kind}.{method}"
