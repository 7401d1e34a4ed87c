"""`eventloop plugins check`: finds problems that would stop a run, and measures imports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.cli.arguments import JSON, Arguments, Command
from eventloop.cli.import_costs import ImportCost, measure_imports
from eventloop.cli.inspection import (
    Extension,
    chosen_plugins,
    imported_extensions,
    read_registry,
    remarks,
)
from eventloop.cli.printing import write_json, write_lines, write_table, write_text
from eventloop.errors import EventloopError, PluginError, counted, text_of
from eventloop.plugin.discover import extensions
from eventloop.plugin.lock_digests import lock_path
from eventloop.plugin.lock_file import check_lock
from eventloop.safe_text import plain

if TYPE_CHECKING:
    from eventloop.plugin.records import Found
    from eventloop.plugin.registry import Registry

COMMAND = Command(
    "plugins check",
    "Imports, builds, validates and orders all plugins that would take part, and prints every problem "
    "that would stop a run; exit status 1 if there is any. Also imports commands, storages and options "
    "of packages, and measures the time of all imports.",
    (JSON,),
    argument="",
)
_COLUMNS = ("name", "status", "import s", "torch", "reason")


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    costs = measure_imports([*chosen_plugins(arguments), *extensions()])
    _, registry = read_registry(arguments, COMMAND)
    added = list(imported_extensions())
    rows = list(_rows(registry, added, costs))
    problems = _problems(registry, added)
    all_remarks: list[str] = []
    for ordered in registry.implementations.values():
        all_remarks += remarks(registry, ordered)
    if "json" in arguments.given:
        texts = [text_of(problem) for problem in problems]
        write_json({"plugins": rows, "problems": texts, "remarks": all_remarks})
    else:
        _write(rows, problems, all_remarks)
    return 1 if problems else 0


def _problems(registry: Registry, added: Sequence[Extension]) -> list[EventloopError]:
    problems = [*registry.problems]
    for extension in added:
        # Packages that add the same command share one problem.
        if extension.problem is not None and extension.problem not in problems:
            problems.append(extension.problem)
    problems += _lock_problems(registry)
    return problems


def _write(
    rows: Sequence[dict[str, Any]], problems: Sequence[EventloopError], all_remarks: Sequence[str]
) -> None:
    write_table(_COLUMNS, [_cells(row) for row in rows])
    for idx, problem in enumerate(problems, 1):
        write_text(plain(f"\n{idx}. {text_of(problem)}"))
    if all_remarks:
        write_lines(["", *(f"remark: {remark}" for remark in all_remarks)])
    count = counted(len(problems), "problem") if problems else "no problems"
    write_lines(["", count])


def _lock_problems(registry: Registry) -> Iterator[PluginError]:
    try:
        check_lock(lock_path(Path.cwd()), registry)
    except PluginError as error:
        yield error


def _rows(
    registry: Registry, added: Sequence[Extension], costs: Mapping[Found, ImportCost]
) -> Iterator[dict[str, Any]]:
    for plugin in registry.discovered:
        assert plugin.found is not None
        status, reason = registry.explain(plugin)
        yield _row(plugin.found, status, reason, costs.get(plugin.found, ImportCost()))
    for extension in added:
        cost = costs.get(extension.found, ImportCost())
        yield _row(extension.found, extension.status, extension.reason, cost)


def _row(discovered: Found, status: str, reason: str, cost: ImportCost) -> dict[str, Any]:
    return {
        "name": discovered.name,
        "plugin": discovered.origin,
        "status": status,
        "reason": reason,
        "import_s": cost.seconds,
        "imports_torch": cost.with_torch,
        "marks": list(discovered.marks),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    seconds = "" if row["import_s"] is None else f"{row['import_s']:.3f}"
    torch = {True: "yes", False: "no", None: ""}[row["imports_torch"]]
    return [row["name"], row["status"], seconds, torch, row["reason"].partition("\n")[0]]
