"""`eventloop plugins show NAME`: shows all facts about one plugin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from eventloop.cli.arguments import JSON, Arguments, Command, configuration_of
from eventloop.cli.printing import write_json, write_lines, write_table, write_text
from eventloop.cli.registry import run_command
from eventloop.config.option_types import Value, flag
from eventloop.errors import UsageError, closest, in_shell, text_of
from eventloop.naming import fold
from eventloop.plugin.candidates import select_all
from eventloop.plugin.configure import plugin_options
from eventloop.plugin.metadata import extensions
from eventloop.plugin.records import Found
from eventloop.safe_text import plain
from eventloop.secret_values import shown
from eventloop_plugins.check import measure_imports
from eventloop_plugins.hooks import declared_by, implemented_by
from eventloop_plugins.reading import (
    Extension,
    dry_assembled,
    imported_extensions,
    refuse_choice,
)

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration
    from eventloop.plugin.owners import Assembly
    from eventloop.plugin.records import Candidate

COMMAND = Command(
    "plugins show",
    "Shows one plugin or command: where it comes from, its options with values and sources, the hooks that it "
    "implements and declares, its edges, and how long its import takes.",
    (JSON,),
    argument="NAME",
)


def main(argv: Sequence[str]) -> int:
    """Runs `eventloop plugins show`; returns the exit status."""
    return run_command(COMMAND, run, argv)


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    if not arguments.task:
        raise UsageError(
            "`eventloop plugins show` needs the NAME of a plugin",
            fix="list what is installed with `eventloop plugins`",
        )
    cost = _cost(arguments)
    configuration, found = dry_assembled(arguments, COMMAND)
    row = found.row(arguments.task)
    added = next(imported_extensions(arguments.task), None) if row is None else None
    if row is not None:
        content = _content(row, found.assembly, configuration, cost)
    elif added is not None:
        content = _extension_content(added, cost)
    else:
        names = [*(one.found.name for one in found.rows), *(one.name for one in extensions())]
        raise UsageError(
            f"no plugin is named {arguments.task!r}{closest(arguments.task, sorted(names))}",
            fix="list what is installed with `eventloop plugins`",
        )
    if "json" in arguments.given:
        write_json(content)
    else:
        _write(content)
    refuse_choice(found)
    return 0


def _cost(arguments: Arguments) -> dict[str, Any]:
    """Measures the import of the named plugin, before it is imported here."""
    selected, _ = select_all(configuration_of(arguments))
    active = (one.found for one in selected if one.status == "active")
    named = (one for one in [*active, *extensions()] if fold(one.name) == fold(arguments.task))
    for measured in measure_imports(named).values():
        return {"import_s": measured.seconds, "imports_torch": measured.with_torch}
    return {}


def _content(
    row: Candidate, assembly: Assembly, configuration: Configuration, cost: dict[str, Any]
) -> dict[str, Any]:
    found = row.found
    status = "problem" if row.problems else row.status
    content = _origin(found, status, row.reason)
    if row.target is not None:
        content |= cost
    content["options"] = list(_options(row, configuration.section(found.name)))
    content["hooks"] = list(_hooks(row, assembly))
    content["declares"] = list(_declares(row, assembly))
    content["edges"] = sorted(
        {
            str(edge)
            for ordered in assembly.implementations.values()
            for edge in ordered.edges
            if fold(found.name) in (edge.first, edge.then)
        }
    )
    content["problems"] = [*map(text_of, row.problems)]
    return content


def _extension_content(added: Extension, cost: dict[str, Any]) -> dict[str, Any]:
    content = _origin(added.found, added.status, added.reason)
    if added.problem is None:
        content |= cost
    problems = [] if added.problem is None else [str(added.problem)]
    return content | {"options": [], "hooks": [], "declares": [], "edges": [], "problems": problems}


def _origin(found: Found, status: str, reason: str) -> dict[str, Any]:
    return {
        "name": found.name,
        "role": found.role,
        "distribution": found.distribution,
        "version": found.version,
        "entry_point": found.entry_point.value,
        "marks": list(found.marks),
        "status": status,
        "reason": reason,
    }


def _options(row: Candidate, section: dict[str, Value]) -> Iterator[dict[str, Any]]:
    try:
        options = plugin_options(row.target)
    except Exception:  # noqa: BLE001 - is a problem of the row already
        return
    for key, option in options.items():
        unset = Value(None if option.required else option.default, "default")
        value = section.get(key, unset)
        yield {
            "option": flag(option.name, row.found.name),
            "type": option.type_name,
            "value": ""
            if option.required and key not in section
            else str(shown(option.name, value.value)),
            "source": "needed" if option.required and key not in section else value.source,
            "doc": option.doc,
        }


def _hooks(row: Candidate, assembly: Assembly) -> Iterator[dict[str, Any]]:
    for name, ordered in assembly.implementations.items():
        for idx, one in enumerate(ordered.implementations, 1):
            if one.plugin is row.plugin:
                yield {
                    "hook": name,
                    "kind": one.hook.kind,
                    "declared by": declared_by(one.hook),
                    "how": "wrapper" if one.wrapper else "plain",
                    "place": f"{idx} of {len(ordered.implementations)}",
                    "phase": ("tryfirst", "normal", "trylast")[one.phase],
                    "every": str(one.every or ""),
                    "before": list(one.before),
                    "after": list(one.after),
                }


def _declares(row: Candidate, assembly: Assembly) -> Iterator[dict[str, Any]]:
    for hook in assembly.hooks.values():
        if row.found.name in hook.declared_by:
            yield {
                "hook": hook.name,
                "kind": hook.kind,
                "per": hook.per,
                "implemented by": implemented_by(hook, assembly),
                "what it does": hook.doc.partition("\n")[0],
            }


def _write(content: dict[str, Any]) -> None:
    facts = [key for key, value in content.items() if not isinstance(value, list)]
    write_lines(f"{key.replace('_', ' '):<13} {_text(key, content[key])}" for key in facts)
    if content["marks"]:
        write_lines([f"{'marks':<13} {', '.join(content['marks'])}"])
    for key in ("options", "hooks", "declares"):
        if rows := content[key]:
            write_lines(["", f"{key}:"])
            write_table(
                tuple(rows[0]), [[_text(key, cell) for cell in row.values()] for row in rows]
            )
    if content["edges"]:
        write_lines(["", "edges:", *content["edges"]])
    if content["problems"]:
        write_text("\n".join(["", "problems:", *map(plain, map(in_shell, content["problems"]))]))


def _text(key: str, value: object) -> str:
    if key == "import_s" and isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return (
        {True: "yes", False: "no", None: "unknown"}[value]
        if value in (True, False, None)
        else str(value)
    )
