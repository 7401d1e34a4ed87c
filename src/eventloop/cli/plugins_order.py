"""`eventloop plugins order`: shows the calling order, the owners of actions, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from eventloop.cli.arguments import JSON, Arguments, Command
from eventloop.cli.inspection import read_registry, refuse_choice, remarks
from eventloop.cli.printing import write_json, write_lines, write_table
from eventloop.errors import UsageError
from eventloop.plugin.order import Implementation, Ordered, order_of_owners

if TYPE_CHECKING:
    from eventloop.hook_markers import Hook
    from eventloop.plugin.registry import Registry

COMMAND = Command(
    "plugins order",
    "Lists, hook by hook, the plugins in the order in which they are called. What is indented runs "
    "inside the wrapper above it. The task, which comes first, and the core, which comes last, are "
    "left out.",
    (JSON,),
    argument="[HOOK]",
)
_COLUMNS = ("hook", "plugin", "role", "how", "why here")
_DEFAULT_OWNER = "the task, else the core"
_NO_OWNER = "none: a call without an answer is an error"


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    _, registry = read_registry(arguments, COMMAND)
    name = arguments.task
    if name and name not in registry.hooks:
        raise UsageError(
            f"no hook is named {name!r}{registry.hooks.hint(name)}",
            fix="list them with `eventloop plugins hooks`",
        )
    hooks = [registry.hooks[name]] if name else list(_implemented(registry))
    plans = [_plan(registry, hook) for hook in hooks]
    if "json" in arguments.given:
        write_json(plans)
        refuse_choice(registry)
        return 0
    rows = [row for plan in plans for row in _cells(plan)]
    if rows:
        write_table(_COLUMNS, rows)
    else:
        write_lines([f"no plugin implements {name}" if name else "no plugin implements a hook"])
    write_lines(f"remark: {remark}" for plan in plans for remark in plan["remarks"])
    left_out = [plugin.name for plugin in registry.discovered if registry.problems_of(plugin)]
    if left_out:
        write_lines([f"with problems: {', '.join(left_out)}; see `eventloop plugins check`"])
    refuse_choice(registry)
    return 0


def _implemented(registry: Registry) -> Iterator[Hook]:
    """Yields the hooks that a plugin, or the task by `owners`, implements."""
    for name, hook in registry.hooks.items():
        if registry.implementations[name].implementations:
            yield hook


def _plan(registry: Registry, hook: Hook) -> dict[str, Any]:
    ordered = registry.implementations[hook.name]
    wrappers = [one for one in ordered.implementations if one.wrapper]
    plain = [one for one in ordered.implementations if not one.wrapper]
    asked = list(registry.asked(hook.name)) if hook.kind == "action" else plain
    if hook.kind == "action":
        plain = list(order_of_owners(plain))
    calls = [
        _call(hook, ordered, [*wrappers, *plain], idx, is_asked=one.wrapper or one in asked)
        for idx, one in enumerate([*wrappers, *plain])
    ]
    calls += [_loser(registry, one, len(wrappers)) for one in registry.losers.get(hook.name, ())]
    plan: dict[str, Any] = {"hook": hook.name, "kind": hook.kind, "calls": calls}
    plan["remarks"] = list(remarks(registry, ordered))
    if hook.kind == "action":
        is_owned = bool(asked) and not asked[-1].conditional
        without_owner = _NO_OWNER if hook.declared_by else _DEFAULT_OWNER
        plan["owner"] = asked[-1].plugin.name if is_owned else without_owner
        plan["is_owned"] = is_owned
    return plan


def _call(
    hook: Hook, ordered: Ordered, calls: Sequence[Implementation], idx: int, *, is_asked: bool
) -> dict[str, Any]:
    one = calls[idx]
    depth = sum(other.wrapper for other in calls[:idx])
    return {
        "plugin": one.plugin.name,
        "role": one.plugin.role,
        "depth": depth,
        "how": ", ".join(_how(hook, one, is_asked=is_asked)),
        "reason": _reason(hook, ordered, calls[idx - 1], one) if idx else "",
    }


def _loser(registry: Registry, one: Implementation, depth: int) -> dict[str, Any]:
    """Returns the row of the plugin that would own an action if the user hadn't chosen another."""
    chosen = registry.rules.owners[one.hook.name].value
    return {
        "plugin": one.plugin.name,
        "role": one.plugin.role,
        "depth": depth,
        "how": "not asked",
        "reason": f"owners assigns {one.hook.name} to {chosen}",
    }


def _how(hook: Hook, one: Implementation, *, is_asked: bool) -> Iterator[str]:
    if one.wrapper:
        yield "wrapper"
    elif hook.kind == "action":
        yield ("conditional" if one.conditional else "owner") if is_asked else "not asked"
    if one.phase != 1:
        yield "tryfirst" if one.phase == 0 else "trylast"
    if one.every is not None:
        yield f"every {one.every}"
    if one.rank_zero:
        yield "rank zero"


def _reason(hook: Hook, ordered: Ordered, previous: Implementation, one: Implementation) -> str:
    if previous.wrapper and not one.wrapper:
        return "wrapper: encloses all that are plain"
    roles = previous.plugin.role, one.plugin.role
    if hook.kind == "action" and not one.wrapper and roles[0] != roles[1]:
        return f"owners: {roles[0]} before {roles[1]}"
    by_name = "name, in reverse" if hook.name == "close" else "name"
    return ordered.reason(previous, one) or by_name


def _cells(plan: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for idx, call in enumerate(plan["calls"]):
        plugin = "  " * call["depth"] + call["plugin"]
        yield plan["hook"] if not idx else "", plugin, call["role"], call["how"], call["reason"]
    if not plan.get("is_owned", True):
        depth = sum(call["how"].startswith("wrapper") for call in plan["calls"])
        name = plan["hook"] if not plan["calls"] else ""
        yield name, "  " * depth + f"({plan['owner']})", "", "owner", ""
