"""Owners of actions: the plugin that answers, as `[tool.eventloop.owners]` chooses it among several."""

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
        owner: the chosen one.
        others: the plugins and the task that weren't chosen.
        by_owners: whether the user chose, with `owners`.
    """

    action: str
    owner: Plugin
    others: tuple[Plugin, ...]
    by_owners: bool

    def __str__(self) -> str:
        others = [_as_owner(one) for one in self.others]
        chosen = ", by owners" if self.by_owners else ""
        listed = ", ".join(others[:-1]) + " and " if len(others) > 1 else ""
        return f"{self.action}: {_as_owner(self.owner)}{chosen}, instead of {listed}{others[-1]}"


def choose_owners(
    by_hook: Mapping[str, list[Implementation]], rules: Rules, hooks: HookTable
) -> tuple[dict[str, tuple[Implementation, ...]], list[PluginError]]:
    """Removes owners for which another was chosen; returns them by action, and problems with that."""
    taken_out: dict[str, tuple[Implementation, ...]] = {}
    problems = []
    for action, value in rules.owners.items():
        name = value.value
        claims = [one for one in by_hook.get(action, ()) if _claims(one)]
        chosen = [one for one in claims if fold(one.plugin.name) == fold(name)]
        if action not in hooks and hooks.knows(action):
            continue  # the plugin that declares it is off
        if action not in hooks or hooks[action].kind != "action":
            problems.append(
                PluginError(
                    f"owners names {action!r}, but no action has this name{hooks.hint(action)}",
                    fix="fix it in [tool.eventloop.owners]",
                )
            )
        elif not chosen:
            known = [one.plugin.name for one in claims if one.plugin.role != "core"]
            problems.append(
                PluginError(
                    f"owners gives {action} to {name!r}, which doesn't implement it"
                    f"{closest(name, known)}",
                    fix=f"one of {', '.join(known)}, in [tool.eventloop.owners]"
                    if known
                    else "leave it out of [tool.eventloop.owners]; no other plugin implements it",
                )
            )
        else:
            losers = [one for one in claims if one not in chosen and one.plugin.role != "core"]
            by_hook[action][:] = [one for one in by_hook[action] if one not in losers]
            taken_out[action] = tuple(losers)
    return taken_out, problems


def several_owners(by_hook: Mapping[str, Sequence[Implementation]]) -> Iterator[PluginError]:
    """Finds actions that several algorithms own."""
    for name, found in by_hook.items():
        if len(found) < 2:
            continue
        owners = [one.plugin for one in found if one.plugin.role == "algorithm" and _claims(one)]
        if len(owners) > 1:
            owners.sort(key=lambda plugin: fold(plugin.name))
            yield PluginError(
                f"{len(owners)} plugins claim the action {name}: "
                f"{' and '.join(one.origin for one in owners)}",
                subjects=owners,
                fix="choose one in pyproject.toml, or " + owners[-1].way_out + ":\n"
                f'[tool.eventloop.owners]\n{name} = "{owners[0].name}"',
            )


def undecided(ordered: Mapping[str, Ordered]) -> Iterator[PluginError]:
    """Finds owners and conditional implementations of which the plugins' names decide who is asked."""
    for action, found in ordered.items():
        several = found.implementations
        for one in several:
            if not one.conditional or one.wrapper or one.plugin.role != "algorithm":
                continue
            for owner in several:
                if owner.plugin.role == "algorithm" and _claims(owner):
                    first, then = sorted([one, owner], key=several.index)
                    if not found.reason(first, then):
                        yield _named_first(action, one.plugin, owner.plugin)


def _named_first(action: str, conditional: Plugin, owner: Plugin) -> PluginError:
    return PluginError(
        f"{conditional.name} may take the action {action} over and {owner.name} always does; nothing "
        "but their names says which is asked first",
        subjects=[conditional, owner],
        fix="declare it in pyproject.toml, or " + owner.way_out + ":\n"
        f'[tool.eventloop.order]\n{action} = ["{conditional.name}", "{owner.name}"]',
    )


def _as_owner(plugin: Plugin) -> str:
    return "the task's" if plugin.role == "task" else plugin.name


def _claims(one: Implementation) -> bool:
    return one.hook.kind == "action" and not one.wrapper and not one.conditional
