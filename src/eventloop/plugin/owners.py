"""Owners of actions; `[tool.eventloop.owners]` chooses the owner if several plugins implement one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from eventloop.config.plugin_rules import Rules
from eventloop.errors import PluginError, closest
from eventloop.naming import fold
from eventloop.plugin.declared_hooks import HookTable
from eventloop.plugin.order import Implementation, Ordered
from eventloop.plugin.records import Plugin


@dataclass(frozen=True)
class Decision:
    """The choice of an action's owner among several plugins, or between a plugin and the task.

    Args:
        action: the name of the action.
        owner: the chosen plugin, or the task.
        others: the plugins and the task that weren't chosen.
        by_owners: whether the user chose the owner with `owners`.
    """

    action: str
    owner: Plugin
    others: tuple[Plugin, ...]
    by_owners: bool

    def __str__(self) -> str:
        names = [_as_owner(plugin) for plugin in self.others]
        chosen = ", by owners" if self.by_owners else ""
        listed = ", ".join(names[:-1]) + " and " if len(names) > 1 else ""
        return f"{self.action}: {_as_owner(self.owner)}{chosen}, instead of {listed}{names[-1]}"


def choose_owners(
    by_hook: Mapping[str, list[Implementation]], rules: Rules, hooks: HookTable
) -> tuple[dict[str, tuple[Implementation, ...]], list[PluginError]]:
    """Removes implementations of actions for which the user chose another owner.

    Args:
        by_hook: the implementations of each hook; changed in place.
        rules: has the user's choice, `owners`.
        hooks: all hooks.

    Returns:
        The removed implementations by action, and the problems with the choice.
    """
    taken_out: dict[str, tuple[Implementation, ...]] = {}
    problems = []
    for action, value in rules.owners.items():
        name = value.value
        claims = [impl for impl in by_hook.get(action, ()) if _claims(impl)]
        chosen = [impl for impl in claims if fold(impl.plugin.name) == fold(name)]
        if action not in hooks and hooks.knows(action):
            continue  # the plugin that declares the action is off
        if action not in hooks or hooks[action].kind != "action":
            problems.append(
                PluginError(
                    f"owners names {action!r}, but no action has this name{hooks.hint(action)}",
                    fix="fix it in [tool.eventloop.owners]",
                )
            )
        elif not chosen:
            candidates = [impl.plugin.name for impl in claims if impl.plugin.role != "core"]
            problems.append(
                PluginError(
                    f"owners assigns {action} to {name!r}, which doesn't implement it"
                    f"{closest(name, candidates)}",
                    fix=f"one of {', '.join(candidates)}, in [tool.eventloop.owners]"
                    if candidates
                    else "leave it out of [tool.eventloop.owners]; no other plugin implements it",
                )
            )
        else:
            losers = [impl for impl in claims if impl not in chosen and impl.plugin.role != "core"]
            by_hook[action][:] = [impl for impl in by_hook[action] if impl not in losers]
            taken_out[action] = tuple(losers)
    return taken_out, problems


def several_owners(by_hook: Mapping[str, Sequence[Implementation]]) -> Iterator[PluginError]:
    """Finds actions that several algorithms own."""
    for name, impls in by_hook.items():
        if len(impls) < 2:
            continue
        owners = [
            impl.plugin for impl in impls if impl.plugin.role == "algorithm" and _claims(impl)
        ]
        if len(owners) > 1:
            owners.sort(key=lambda plugin: fold(plugin.name))
            yield PluginError(
                f"{len(owners)} plugins claim the action {name}: "
                f"{' and '.join(impl.origin for impl in owners)}",
                subjects=owners,
                fix="choose one in pyproject.toml, or " + owners[-1].way_out + ":\n"
                f'[tool.eventloop.owners]\n{name} = "{owners[0].name}"',
            )


def undecided(ordered: Mapping[str, Ordered]) -> Iterator[PluginError]:
    """Finds actions in which only the plugins' names decide whether a conditional one comes first.

    If the owner comes first, the conditional implementation is never called.
    """
    for action, ordered_impls in ordered.items():
        impls = ordered_impls.implementations
        for impl in impls:
            if not impl.conditional or impl.wrapper or impl.plugin.role != "algorithm":
                continue
            for owner in impls:
                if owner.plugin.role == "algorithm" and _claims(owner):
                    earlier, later = sorted([impl, owner], key=impls.index)
                    if not ordered_impls.reason(earlier, later):
                        yield _named_first(action, impl.plugin, owner.plugin)


def _named_first(action: str, conditional: Plugin, owner: Plugin) -> PluginError:
    return PluginError(
        f"{conditional.name} may take the action {action} over and {owner.name} always does; only "
        "their names decide which is asked first",
        subjects=[conditional, owner],
        fix="declare it in pyproject.toml, or " + owner.way_out + ":\n"
        f'[tool.eventloop.order]\n{action} = ["{conditional.name}", "{owner.name}"]',
    )


def _as_owner(plugin: Plugin) -> str:
    return "the task's" if plugin.role == "task" else plugin.name


def _claims(impl: Implementation) -> bool:
    return impl.hook.kind == "action" and not impl.wrapper and not impl.conditional
