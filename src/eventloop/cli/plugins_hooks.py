"""`eventloop plugins hooks`: lists the hooks, from their declarations."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from eventloop.cli.arguments import JSON, Arguments, Command
from eventloop.cli.inspection import read_registry, refuse_choice
from eventloop.cli.printing import write_json, write_table, write_text
from eventloop.errors import UsageError
from eventloop.hook_markers import warnings_of

if TYPE_CHECKING:
    from eventloop.hook_markers import Hook
    from eventloop.plugin.registry import Registry

COMMAND = Command(
    "plugins hooks",
    "Lists the hooks of the core and of plugins, and the plugins that implement them; with NAME, prints "
    "the contract of a hook.",
    (JSON,),
    argument="[NAME]",
)
_COLUMNS = ("name", "kind", "per", "closes", "declared by", "implemented by", "what it does")


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    _, registry = read_registry(arguments, COMMAND)
    name = arguments.task
    hooks = registry.hooks
    if name and name not in hooks:
        raise UsageError(
            f"no hook is named {name!r}{hooks.hint(name)}",
            fix="list them with `eventloop plugins hooks`",
        )
    shown_hooks = [hooks[name]] if name else hooks.values()
    contents = [_content(hook, registry) for hook in shown_hooks]
    if "json" in arguments.given:
        write_json(contents[0] if name else contents)
    elif name:
        write_text(_contract(hooks[name], contents[0]))
    else:
        write_table(_COLUMNS, [_cells(content) for content in contents])
    refuse_choice(registry)
    return 0


def declared_by(hook: Hook) -> str:
    """Returns the names of the plugins that declare a hook, or "core"."""
    return ", ".join(hook.declared_by) or "core"


def implemented_by(hook: Hook, registry: Registry) -> list[str]:
    """Returns the names of the plugins that implement a hook, in calling order."""
    plugins = [implementation.plugin for implementation in registry.implementations[hook.name]]
    names = (plugin.name for plugin in plugins if plugin.role not in ("task", "core"))
    return list(dict.fromkeys(names))


def _content(hook: Hook, registry: Registry) -> dict[str, Any]:
    assert hook.spec is not None
    return {
        "name": hook.name,
        "kind": hook.kind,
        "per": hook.per,
        "closes": hook.closes,
        "declared_by": declared_by(hook),
        "since": hook.since,
        "implemented_by": implemented_by(hook, registry),
        "signature": f"def {hook.name}{inspect.signature(hook.spec)}".replace("'", ""),
        "contract": hook.doc,
    }


def _cells(content: dict[str, Any]) -> tuple[str, ...]:
    texts = [content[key] or "" for key in ("name", "kind", "per", "closes", "declared_by")]
    first_line = content["contract"].partition("\n")[0]
    return *texts, ", ".join(content["implemented_by"]), first_line


def _contract(hook: Hook, content: dict[str, Any]) -> str:
    facts = [f"{hook.kind}, {'at any time' if hook.per == 'any' else f'per {hook.per}'}"]
    if hook.closes:
        facts.append(f"closes {hook.closes}: algorithms run it in the reverse order")
    if hook.since:
        facts.append(f"since {hook.since}")
    lines = [content["signature"], f"    {', '.join(facts)}"]
    if hook.declared_by:
        lines.append(f"    declared by {content['declared_by']}")
    if content["implemented_by"]:
        lines.append(f"    implemented by {', '.join(content['implemented_by'])}")
    lines += [f"    deprecated: {warning}" for warning in warnings_of(hook)]
    return "\n".join([*lines, "", hook.doc])
