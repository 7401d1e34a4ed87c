"""`eventloop plugins show NAME`: shows all facts about a plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from eventloop.cli.arguments import JSON, Arguments, Command
from eventloop.cli.import_costs import measure_imports
from eventloop.cli.inspection import (
    Extension,
    chosen_plugins,
    imported_extensions,
    read_registry,
    refuse_choice,
)
from eventloop.cli.plugins_hooks import declared_by, implemented_by
from eventloop.cli.printing import write_json, write_lines, write_table, write_text
from eventloop.config.option_types import Value, flag
from eventloop.errors import UsageError, closest, text_of
from eventloop.naming import fold
from eventloop.plugin.build import plugin_options
from eventloop.plugin.discover import extensions
from eventloop.plugin.records import Found
from eventloop.safe_text import plain
from eventloop.secret_values import shown

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration
    from eventloop.plugin.records import Plugin
    from eventloop.plugin.registry import Registry

COMMAND = Command(
    "plugins show",
    "Shows a plugin or command: its origin, its options with values and sources, the hooks that it "
    "implements and declares, its edges, and the time of its import.",
    (JSON,),
    argument="NAME",
)


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    if not arguments.task:
        raise UsageError(
            "`eventloop plugins show` needs the NAME of a plugin",
            fix="list what is installed with `eventloop plugins`",
        )
    cost = _cost(arguments)
    configuration, registry = read_registry(arguments, COMMAND)
    plugin = registry.find(arguments.task)
    added = next(imported_extensions(arguments.task), None) if plugin is None else None
    if plugin is not None:
        content = _content(plugin, registry, configuration, cost)
    elif added is not None:
        content = _extension_content(added, cost)
    else:
        names = [*registry.names, *(extension.name for extension in extensions())]
        raise UsageError(
            f"no plugin is named {arguments.task!r}{closest(arguments.task, sorted(names))}",
            fix="list what is installed with `eventloop plugins`",
        )
    if "json" in arguments.given:
        write_json(content)
    else:
        _write(content)
    refuse_choice(registry)
    return 0


def _cost(arguments: Arguments) -> dict[str, Any]:
    """Measures the import of the named plugin, before it is imported here."""
    plugins = [*chosen_plugins(arguments), *extensions()]
    matching = [plugin for plugin in plugins if fold(plugin.name) == fold(arguments.task)]
    for cost in measure_imports(matching).values():
        return {"import_s": cost.seconds, "imports_torch": cost.with_torch}
    return {}


def _content(
    plugin: Plugin, registry: Registry, configuration: Configuration, cost: dict[str, Any]
) -> dict[str, Any]:
    assert plugin.found is not None
    problems = registry.problems_of(plugin)
    status = "problem" if problems else plugin.status
    content = _origin(plugin.found, status, plugin.reason)
    if plugin.imported is not None:
        content |= cost
    content["options"] = list(_options(plugin, configuration.section(plugin.name)))
    content["hooks"] = list(_hooks(plugin, registry))
    content["declares"] = list(_declares(plugin, registry))
    content["edges"] = sorted(
        {
            str(edge)
            for ordered in registry.implementations.values()
            for edge in ordered.edges
            if fold(plugin.name) in (edge.first, edge.then)
        }
    )
    content["problems"] = [*map(text_of, problems)]
    return content


def _extension_content(added: Extension, cost: dict[str, Any]) -> dict[str, Any]:
    content = _origin(added.found, added.status, added.reason)
    if added.problem is None:
        content |= cost
    problems = [] if added.problem is None else [str(added.problem)]
    return content | {"options": [], "hooks": [], "declares": [], "edges": [], "problems": problems}


def _origin(discovered: Found, status: str, reason: str) -> dict[str, Any]:
    return {
        "name": discovered.name,
        "role": discovered.role,
        "distribution": discovered.distribution,
        "version": discovered.version,
        "entry_point": discovered.entry_point.value,
        "marks": list(discovered.marks),
        "status": status,
        "reason": reason,
    }


def _options(plugin: Plugin, section: dict[str, Value]) -> Iterator[dict[str, Any]]:
    try:
        options = plugin_options(plugin.imported)
    except Exception:  # noqa: BLE001 - reported as a problem of the plugin already
        return
    for key, option in options.items():
        unset = Value(None if option.required else option.default, "default")
        value = section.get(key, unset)
        text = str(shown(option.name, value.value))
        source = value.source
        if option.required and key not in section:
            text = ""
            source = "needed"
        yield {
            "option": flag(option.name, plugin.name),
            "type": option.type_name,
            "value": text,
            "source": source,
            "doc": option.doc,
        }


def _hooks(plugin: Plugin, registry: Registry) -> Iterator[dict[str, Any]]:
    for name, ordered in registry.implementations.items():
        for idx, implementation in enumerate(ordered.implementations, 1):
            if implementation.plugin is plugin:
                yield {
                    "hook": name,
                    "kind": implementation.hook.kind,
                    "declared by": declared_by(implementation.hook),
                    "how": "wrapper" if implementation.wrapper else "plain",
                    "place": f"{idx} of {len(ordered.implementations)}",
                    "phase": ("tryfirst", "normal", "trylast")[implementation.phase],
                    "every": str(implementation.every or ""),
                    "before": list(implementation.before),
                    "after": list(implementation.after),
                }


def _declares(plugin: Plugin, registry: Registry) -> Iterator[dict[str, Any]]:
    for hook in registry.hooks.values():
        if plugin.name in hook.declared_by:
            yield {
                "hook": hook.name,
                "kind": hook.kind,
                "per": hook.per,
                "implemented by": implemented_by(hook, registry),
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
        write_text("\n".join(["", "problems:", *map(plain, content["problems"])]))


def _text(key: str, value: object) -> str:
    if key == "import_s" and isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if value in (True, False, None):
        return {True: "yes", False: "no", None: "unknown"}[value]
    return str(value)
