"""`eventloop plugins hooks`: the catalogue of hooks, from their declarations."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eventloop.actions import HOOKS as ACTIONS
from eventloop.actions import Actions
from eventloop.cli.arguments import Command, command_help, read_arguments, refuse_flags
from eventloop.cli.output import write_json, write_table, write_text
from eventloop.cli.plugins.reading import JSON
from eventloop.errors import UsageError, closest
from eventloop.events import HOOKS as EVENTS
from eventloop.events import Events

if TYPE_CHECKING:
    from eventloop.hooks import Hook

COMMAND = Command(
    "plugins hooks",
    "Lists the hooks; with NAME, writes the contract of one.",
    (JSON,),
    argument="[NAME]",
)
_COLUMNS = ("name", "kind", "per", "closes", "what it does")


def run(argv: Sequence[str]) -> int:
    """Runs the subcommand."""
    arguments = read_arguments(argv, COMMAND)
    if "help" in arguments.given:
        write_text(command_help(COMMAND))
        return 0
    refuse_flags(arguments, COMMAND)
    hooks = {**EVENTS, **ACTIONS}
    name = arguments.task
    if name and name not in hooks:
        raise UsageError(
            f"no hook is named {name!r}{closest(name, hooks)}",
            fix="list them with `eventloop plugins hooks`",
        )
    chosen = [hooks[name]] if name else list(hooks.values())
    if "json" in arguments.given:
        content = [_content(hook) for hook in chosen]
        write_json(content[0] if name else content)
    elif name:
        write_text(_contract(hooks[name]))
    else:
        write_table(_COLUMNS, [_cells(hook) for hook in chosen])
    return 0


def _cells(hook: Hook) -> tuple[str, ...]:
    return hook.name, hook.kind, hook.per, hook.closes or "", hook.doc.partition("\n")[0]


def _content(hook: Hook) -> dict[str, str | None]:
    return {
        "name": hook.name,
        "kind": hook.kind,
        "per": hook.per,
        "closes": hook.closes,
        "signature": _signature(hook),
        "contract": hook.doc,
    }


def _contract(hook: Hook) -> str:
    facts = [f"{hook.kind}, {'at any time' if hook.per == 'any' else f'per {hook.per}'}"]
    if hook.closes:
        facts.append(f"closes {hook.closes}: algorithms run it in the reverse order")
    return f"{_signature(hook)}\n    {', '.join(facts)}\n\n{hook.doc}"


def _signature(hook: Hook) -> str:
    function = getattr(Events if hook.name in EVENTS else Actions, hook.name)
    return f"def {hook.name}{inspect.signature(function)}".replace("'", "")
