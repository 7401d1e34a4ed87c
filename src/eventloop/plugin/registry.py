"""The registry: each plugin with its stage and reason, the order of calls, the owners of actions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pluggy

from eventloop.config.plugin_rules import Rules
from eventloop.errors import EventloopError, PluginError, closest, raise_all
from eventloop.hook_markers import PROJECT
from eventloop.naming import fold
from eventloop.plugin.choose import relation_problems
from eventloop.plugin.configured_order import edges_of, order_problems
from eventloop.plugin.declared_hooks import HOOKS, HookTable, hooks_of
from eventloop.plugin.name_problems import clashing_names
from eventloop.plugin.order import (
    Implementation,
    Ordered,
    edges_that_cannot_hold,
    order,
    order_of_owners,
)
from eventloop.plugin.owners import Decision, choose_owners, several_owners, undecided
from eventloop.plugin.records import Found, Plugin
from eventloop.plugin.validate import equal_plugins, implementations, unknown_names

_RANKS = {"task": 0, "algorithm": 1, "callback": 2, "core": 3}


@dataclass(frozen=True)
class Registry:
    """The plugins of a run or of a command, built once and never changed.

    Args:
        records: every plugin with its stage, whether active, off or failed; with the task and the
            core.
        hooks: all hooks by name, including those that plugins declare.
        implementations: the ordered implementations of every hook.
        rules: the configuration's rules on order and owners.
        losers: by action, the owning implementations that the user's `owners` removed.
        problems: every problem with the choice of plugins, with plugins, and with their order.
    """

    records: tuple[Plugin, ...] = ()
    hooks: HookTable = field(default_factory=lambda: HOOKS)
    implementations: Mapping[str, Ordered] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)
    losers: Mapping[str, tuple[Implementation, ...]] = field(default_factory=dict)
    problems: tuple[EventloopError, ...] = ()

    @functools.cached_property
    def plugins(self) -> tuple[Plugin, ...]:
        """The active plugins in order of role and name, with the task and the core."""
        active = (plugin for plugin in self.records if plugin.stage == "active")
        return tuple(sorted(active, key=lambda plugin: (_RANKS[plugin.role], fold(plugin.name))))

    @functools.cached_property
    def off(self) -> tuple[Plugin, ...]:
        """The plugins that are off or dormant, each with the reason."""
        return tuple(plugin for plugin in self.records if plugin.stage in ("off", "dormant"))

    @property
    def discovered(self) -> list[Plugin]:
        """The plugins of packages and files, in order of name."""
        return [plugin for plugin in self.records if plugin.found is not None]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all plugins, active or not, without the task's and the core's."""
        return tuple(plugin.name for plugin in self.records if plugin.role not in ("task", "core"))

    def find(self, name: str) -> Plugin | None:
        """Returns the discovered plugin with a name; the active one if there are several."""
        named = [plugin for plugin in self.discovered if fold(plugin.name) == fold(name)]
        named.sort(key=lambda plugin: plugin.stage != "active")
        return named[0] if named else None

    def problems_of(self, plugin: Plugin) -> list[EventloopError]:
        """Returns the problems with a plugin; its own failure comes first."""
        problems = [problem for problem in self.problems if plugin.found in found_subjects(problem)]
        if plugin.failure is not None:
            problems.insert(0, plugin.failure)
        return list(dict.fromkeys(problems))

    def explain(self, plugin: Plugin) -> tuple[str, str]:
        """Returns whether a plugin takes part, as "active", "off" or "problem", and the reason."""
        if problems := self.problems_of(plugin):
            return "problem", problems[0].what
        return plugin.status, plugin.reason

    def raise_problems(self) -> None:
        """Raises all problems in one message, if there are any."""
        raise_all(self.problems)

    def without(self, reasons: Mapping[str, str]) -> Registry:
        """Returns the registry with some discovered plugins off.

        Args:
            reasons: the reason for each plugin to switch off, by folded name.

        Raises:
            PluginError: a plugin that stays active requires one of them.
        """
        records = [
            dataclasses.replace(plugin, stage="off", reason=reasons[fold(plugin.name)], kind="task")
            if fold(plugin.name) in reasons and plugin.stage == "active"
            else plugin
            for plugin in self.records
        ]
        smaller = arrange(records, self.rules)
        smaller.raise_problems()
        return smaller

    def owner(self, action: str) -> Plugin:
        """Returns the owner of an action.

        Raises:
            PluginError: the action has no implementation, or doesn't exist.
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
        plain = order_of_owners(impl for impl in ordered if not impl.wrapper)
        idxs = (idx for idx, impl in enumerate(plain) if not impl.conditional)
        return plain[: next(idxs, len(plain)) + 1]

    @property
    def exporting(self) -> list[str]:
        """The folded names of plugins that change the exported weights by wrapping `export`."""
        return [fold(impl.plugin.name) for impl in self.implementations["export"] if impl.wrapper]

    @property
    def evaluates(self) -> bool:
        """Whether a plugin or the task evaluates, even without eval data.

        True if a plugin or the task owns `evaluate`, or implements an event of evaluation without
        declaring `needs_eval_data`.
        """
        if self.owner("evaluate").role != "core":
            return True
        return any(
            not impl.plugin.facts.needs_eval_data
            for name, hook in self.hooks.items()
            if hook.kind == "event" and hook.per in ("eval", "eval batch")
            for impl in self.implementations[name]
            if impl.plugin.role != "core"
        )

    def idle(self, hook: str) -> set[str]:
        """Returns the folded names of plugins that implement neither a hook nor its closing event."""
        if hook not in self.hooks:
            return set()
        called = {fold(impl.plugin.name) for impl in self.implementations[hook]}
        for name, closing_hook in self.hooks.items():
            if closing_hook.closes == hook:
                called |= {fold(impl.plugin.name) for impl in self.implementations[name]}
        return {fold(plugin.name) for plugin in self.plugins} - called

    def decisions(self) -> Iterator[Decision]:
        """Yields a decision per action that a plugin takes from the task, or whose owner was chosen."""
        for name, hook in self.hooks.items():
            if hook.kind != "action":
                continue
            losers = [impl.plugin for impl in self.losers.get(name, ())]
            claims = [*losers]
            for impl in self.implementations[name].implementations:
                if impl.plugin.role != "core" and not impl.wrapper and not impl.conditional:
                    claims.append(impl.plugin)
            if not claims:
                continue
            owner = self.owner(name)
            if passed_over := [plugin for plugin in claims if plugin is not owner]:
                passed_over.sort(key=lambda plugin: (plugin.role == "task", fold(plugin.name)))
                yield Decision(name, owner, tuple(passed_over), bool(losers))


def arrange(records: Sequence[Plugin], rules: Rules | None = None) -> Registry:
    """Validates the active plugins and orders their implementations.

    Args:
        records: every plugin with its stage; plugins that aren't active are only kept in the registry.
        rules: the configuration's rules on order and owners.

    Returns:
        The registry, with the valid implementations and every problem.
    """
    registry = Registry(tuple(records), rules=rules or Rules())
    plugins = registry.plugins
    rules = registry.rules
    problems = [
        *clashing_names(plugins),
        *equal_plugins(plugins),
        *relation_problems(plugins, registry.off),
    ]
    hooks, clashes = hooks_of(plugins, registry.off)
    by_hook: dict[str, list[Implementation]] = {name: [] for name in hooks}
    for plugin in plugins:
        valid, misfits = implementations(plugin, hooks)
        problems += [*misfits, *unknown_names(valid, registry.names)]
        for impl in valid:
            by_hook[impl.hook.name].append(impl)
    losers, misfits = choose_owners(by_hook, rules, hooks)
    problems += [*clashes, *misfits, *several_owners(by_hook)]

    active = {fold(plugin.name) for plugin in plugins if plugin.role in ("algorithm", "callback")}
    ordered = {}
    for name, hook in hooks.items():
        if any(impl.before or impl.after for impl in by_hook[name]):
            closing_hooks = [
                closing_hook.name for closing_hook in hooks.values() if closing_hook.closes == name
            ]
            closers = [impl for closing_hook in closing_hooks for impl in by_hook[closing_hook]]
            problems += edges_that_cannot_hold(by_hook[name], closers, active)
        impls = by_hook[name]
        if len(impls) < 2:
            ordered[name] = order(impls)
            continue
        opener = by_hook.get(hook.closes or "", [])
        opener_edges = edges_of(rules, hook.closes) if hook.closes else ()
        edges = edges_of(rules, name, hook.closes)
        try:
            ordered[name] = order(impls, edges, opener, opener_edges)
        except PluginError as error:
            problems.append(error)
            # Without its edges the hook has an order, so that commands can still show the plugins.
            ordered[name] = order(
                [dataclasses.replace(impl, before=(), after=()) for impl in impls]
            )
    problems += undecided(ordered)
    registry = Registry(registry.records, hooks, ordered, rules, losers)
    return dataclasses.replace(registry, problems=(*problems, *order_problems(registry)))


def found_subjects(problem: EventloopError) -> list[Found]:
    """Returns the discovered plugins that a problem is about."""
    subjects = []
    for subject in problem.subjects:
        discovered = subject if isinstance(subject, Found) else getattr(subject, "found", None)
        if discovered is not None:
            subjects.append(discovered)
    return subjects


def refused_by_pluggy(registry: Registry) -> list[PluginError]:
    """Registers all plugins except the core's with pluggy, which checks them against every hook.

    Implementations of deprecated hooks cause their warnings here. Plugins that already have a
    problem are skipped, because pluggy would report it in its own words.

    Returns:
        A problem for each plugin that pluggy refuses.
    """
    faulty_subjects = [subject for problem in registry.problems for subject in problem.subjects]
    faulty_subjects += [
        discovered for problem in registry.problems for discovered in found_subjects(problem)
    ]
    refused = []
    manager = pluggy.PluginManager(PROJECT)
    specs = {name: staticmethod(hook.spec) for name, hook in registry.hooks.items() if hook.spec}
    manager.add_hookspecs(type("Hooks", (), specs))
    for plugin in registry.plugins:
        is_faulty = any(subject is plugin or subject is plugin.found for subject in faulty_subjects)
        if plugin.role == "core" or is_faulty:
            continue
        try:
            manager.register(plugin.target, plugin.name)
        except (pluggy.PluginValidationError, ValueError) as error:
            message = f"pluggy refuses {plugin.name!r}: {error}"
            refused.append(plugin.problem(message, "fix it"))
    return refused
