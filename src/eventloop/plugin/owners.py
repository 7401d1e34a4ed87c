"""The assembly: the implementations of a run's plugins, in order, and the owners of actions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pluggy

from eventloop.config.plugin_rules import Rules
from eventloop.errors import EventloopError, PluginError, closest
from eventloop.hook_markers import PROJECT
from eventloop.naming import fold
from eventloop.plugin.declared_hooks import HookTable, hooks_of
from eventloop.plugin.name_problems import clashing_names
from eventloop.plugin.order import (
    Implementation,
    Ordered,
    edges_that_cannot_hold,
    order,
    order_of_owners,
)
from eventloop.plugin.order_rules import edges_of, order_problems
from eventloop.plugin.records import Candidate, Plugin
from eventloop.plugin.select import relation_problems
from eventloop.plugin.validate import equal_plugins, implementations, unknown_names


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


@dataclass(frozen=True)
class Assembly:
    """The plugins of a run, and their implementations.

    Args:
        plugins: the active ones, in order of role and name, with the task and the core.
        off: the installed plugins that are inactive, each with the reason.
        hooks: all hooks by name, including those that plugins declare.
        implementations: for every hook.
        rules: of the configuration, on order and owners.
        installed: the names of all installed and passed plugins, active or not.
        losers: for each action, the owner if the user hadn't chosen another.
    """

    plugins: tuple[Plugin, ...]
    off: tuple[Candidate, ...]
    hooks: HookTable
    implementations: Mapping[str, Ordered]
    rules: Rules = field(default_factory=Rules)
    installed: tuple[str, ...] = ()
    losers: Mapping[str, tuple[Implementation, ...]] = field(default_factory=dict)

    def owner(self, action: str) -> Plugin:
        """Returns the owner of an action.

        Raises:
            PluginError: it has no implementation, or there is no such action.
        """
        if action not in self.implementations or self.hooks[action].kind != "action":
            actions = [name for name, hook in self.hooks.items() if hook.kind == "action"]
            raise PluginError(
                f"no action is named {action!r}{closest(action, actions)}",
                fix="list the hooks with `eventloop plugins hooks`",
            )
        asked = self.asked(action)
        if not asked:
            raise PluginError(
                f"action {action} has no implementation",
                fix=f"implement {action} in the task or in an algorithm",
            )
        return asked[-1].plugin

    def asked(self, action: str) -> tuple[Implementation, ...]:
        """Returns an action's implementations in calling order: conditional, then the owner's."""
        ordered = self.implementations[action]
        plain = order_of_owners(one for one in ordered if not one.wrapper)
        idxs = (idx for idx, one in enumerate(plain) if not one.conditional)
        return plain[: next(idxs, len(plain)) + 1]

    @property
    def exporting(self) -> list[str]:
        """The folded names of plugins that export other weights than the model's."""
        return [fold(one.plugin.name) for one in self.implementations["export"] if one.wrapper]

    @property
    def evaluates(self) -> bool:
        """Whether a plugin or the task evaluates by itself, with or without eval data.

        It does if it owns `evaluate`, or implements an event of evaluation for more than watching.
        """
        if self.owner("evaluate").role != "core":
            return True
        return any(
            not one.plugin.facts.needs_eval_data
            for name, hook in self.hooks.items()
            if hook.kind == "event" and hook.per in ("eval", "eval batch")
            for one in self.implementations[name]
            if one.plugin.role != "core"
        )

    def idle(self, hook: str) -> set[str]:
        """Returns the folded names of plugins without a hook and without its closing event."""
        if hook not in self.hooks:
            return set()
        called = [hook, *(one.name for one in self.hooks.values() if one.closes == hook)]
        busy = {fold(one.plugin.name) for name in called for one in self.implementations[name]}
        return {fold(one.name) for one in self.plugins} - busy

    def decisions(self) -> Iterator[Decision]:
        """Yields the actions in which a plugin replaces the task, or the user chose the owner."""
        for name, hook in self.hooks.items():
            if hook.kind != "action":
                continue
            losers = [one.plugin for one in self.losers.get(name, ())]
            claims = [*losers]
            for one in self.implementations[name].implementations:
                if one.plugin.role != "core" and not one.wrapper and not one.conditional:
                    claims.append(one.plugin)
            if not claims:
                continue
            owner = self.owner(name)
            if others := [one for one in claims if one is not owner]:
                others.sort(key=lambda one: (one.role == "task", fold(one.name)))
                yield Decision(name, owner, tuple(others), bool(losers))


def arrange(
    plugins: Sequence[Plugin],
    off: Sequence[Candidate] = (),
    rules: Rules | None = None,
    installed: Sequence[str] = (),
) -> tuple[Assembly, list[PluginError]]:
    """Validates plugins and orders their implementations.

    Args:
        off: the inactive ones.
        rules: of the configuration.
        installed: the names of all installed and passed plugins, active or not.

    Returns:
        The assembly of the valid ones, and every problem with every plugin.
    """
    rules = rules or Rules()
    rank = {"task": 0, "algorithm": 1, "callback": 2, "core": 3}
    plugins = sorted(plugins, key=lambda one: (rank[one.role], fold(one.name)))
    problems = [*clashing_names(plugins), *equal_plugins(plugins), *relation_problems(plugins, off)]
    hooks, clashes = hooks_of(plugins, off)
    by_hook: dict[str, list[Implementation]] = {name: [] for name in hooks}
    for plugin in plugins:
        found, misfits = implementations(plugin, hooks)
        problems += [*misfits, *unknown_names(found, installed)]
        for one in found:
            by_hook[one.hook.name].append(one)
    losers, misfits = _choose_owners(by_hook, rules, hooks)
    problems += [*clashes, *misfits, *_several_owners(by_hook)]

    active = {fold(one.name) for one in plugins if one.role in ("algorithm", "callback")}
    ordered = {}
    for name, hook in hooks.items():
        if any(one.before or one.after for one in by_hook[name]):
            closing = [each.name for each in hooks.values() if each.closes == name]
            closers = [one for each in closing for one in by_hook[each]]
            problems += edges_that_cannot_hold(by_hook[name], closers, active)
        own = by_hook[name]
        if len(own) < 2:
            ordered[name] = order(own)
            continue
        opener = by_hook.get(hook.closes or "", [])
        opener_edges = edges_of(rules, hook.closes) if hook.closes else ()
        edges = edges_of(rules, name, hook.closes)
        try:
            ordered[name] = order(own, edges, opener, opener_edges)
        except PluginError as error:
            problems.append(error)
            ordered[name] = order([dataclasses.replace(one, before=(), after=()) for one in own])
    problems += _undecided(ordered)
    assembly = Assembly(tuple(plugins), tuple(off), hooks, ordered, rules, tuple(installed), losers)
    return assembly, [*problems, *order_problems(assembly)]


def refused_by_pluggy(
    assembly: Assembly, problems: Iterable[EventloopError] = ()
) -> list[PluginError]:
    """Has pluggy check every plugin but the core's against every hook.

    Implementations of deprecated hooks cause their warnings here.

    Args:
        problems: already known; plugins with problems are skipped.
    """
    wrong = [subject for problem in problems for subject in problem.subjects]
    refused = []
    manager = pluggy.PluginManager(PROJECT)
    specs = {name: staticmethod(hook.spec) for name, hook in assembly.hooks.items() if hook.spec}
    manager.add_hookspecs(type("Hooks", (), specs))
    for plugin in assembly.plugins:
        if plugin.role == "core" or any(one is plugin or one is plugin.found for one in wrong):
            continue
        try:
            manager.register(plugin.target, plugin.name)
        except (pluggy.PluginValidationError, ValueError) as error:
            what = f"pluggy refuses {plugin.name!r}: {error}"
            refused.append(plugin.problem(what, "fix it"))
    return refused


def _choose_owners(
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


def _several_owners(by_hook: Mapping[str, Sequence[Implementation]]) -> Iterator[PluginError]:
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


def _undecided(ordered: Mapping[str, Ordered]) -> Iterator[PluginError]:
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
