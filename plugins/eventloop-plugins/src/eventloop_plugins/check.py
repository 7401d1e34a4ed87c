"""`eventloop plugins check`: what would stop a run, and what imports cost."""

from __future__ import annotations

import builtins
import importlib
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.cli.arguments import JSON, Arguments, Command, configuration_of
from eventloop.cli.command_registry import run_command
from eventloop.cli.printing import write_json, write_lines, write_table, write_text
from eventloop.errors import PluginError, text_of
from eventloop.plugin.assemble import Discovery
from eventloop.plugin.discover import extensions
from eventloop.plugin.load import imported
from eventloop.plugin.lock_digests import lock_path
from eventloop.safe_text import plain
from eventloop_plugins.lock_text import check_lock
from eventloop_plugins.reading import Extension, imported_extensions, read_registry, remarks

if TYPE_CHECKING:
    from eventloop.plugin.records import Found
    from eventloop.plugin.registry import Registry

COMMAND = Command(
    "plugins check",
    "Imports, builds, validates and orders all plugins that would take part, and tells everything "
    "that would stop a run; exit status 1 if anything would. Also imports what packages add beside "
    "plugins, and measures what the imports cost.",
    (JSON,),
    argument="",
)
_COLUMNS = ("name", "status", "import s", "torch", "reason")
_LONGEST_S = 120


def main(argv: Sequence[str]) -> int:
    """Runs `eventloop plugins check`; returns the exit status."""
    return run_command(COMMAND, run, argv)


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    costs = measure_imports([*chosen_entries(arguments), *extensions()])
    _, registry = read_registry(arguments, COMMAND)
    added = list(imported_extensions())
    rows = list(_rows(registry, added, costs))
    of_extensions = (one.problem for one in added if one.problem is not None)
    problems = [*registry.problems, *dict.fromkeys(of_extensions), *_lock_problems(registry)]
    found_remarks = [
        one for ordered in registry.implementations.values() for one in remarks(registry, ordered)
    ]
    if "json" in arguments.given:
        written = [*map(text_of, problems)]
        write_json({"plugins": rows, "problems": written, "remarks": found_remarks})
    else:
        write_table(_COLUMNS, [_cells(row) for row in rows])
        for idx, problem in enumerate(problems, 1):
            write_text(plain(f"\n{idx}. {text_of(problem)}"))
        write_lines(
            ["", *(f"remark: {remark}" for remark in found_remarks)] if found_remarks else []
        )
        count = len(problems)
        write_lines(["", f"{count or 'no'} {'problem' if count == 1 else 'problems'}"])
    return 1 if problems else 0


def chosen_entries(arguments: Arguments) -> list[Found]:
    """Returns the plugins that take part, as far as is known without importing them."""
    configuration = configuration_of(arguments)
    plugins = Discovery(configuration).chosen(configuration)
    return [plugin.found for plugin in plugins if plugin.found and plugin.stage == "chosen"]


def _lock_problems(registry: Registry) -> Iterator[PluginError]:
    try:
        check_lock(lock_path(Path.cwd()), registry)
    except PluginError as error:
        yield error


def _rows(
    registry: Registry, added: Sequence[Extension], costs: Mapping[Found, Measured]
) -> Iterator[dict[str, Any]]:
    for plugin in registry.discovered:
        assert plugin.found is not None
        status, reason = registry.explain(plugin)
        yield _row(plugin.found, status, reason, costs.get(plugin.found, Measured()))
    for one in added:
        yield _row(one.found, one.status, one.reason, costs.get(one.found, Measured()))


def _row(found: Found, status: str, reason: str, cost: Measured) -> dict[str, Any]:
    return {
        "name": found.name,
        "plugin": found.origin,
        "status": status,
        "reason": reason,
        "import_s": cost.seconds,
        "imports_torch": cost.with_torch,
        "marks": list(found.marks),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    seconds = "" if row["import_s"] is None else f"{row['import_s']:.3f}"
    torch = {True: "yes", False: "no", None: ""}[row["imports_torch"]]
    return [row["name"], row["status"], seconds, torch, row["reason"].partition("\n")[0]]


@dataclass(frozen=True)
class Measured:
    """The cost of an import, without what every fit imports.

    Args:
        seconds: wall-clock time; None if it failed, or can't be measured.
        with_torch: whether its module, or one imported by it, imports torch.
    """

    seconds: float | None = None
    with_torch: bool | None = None


def measure_imports(found: Iterable[Found]) -> dict[Found, Measured]:
    """Imports each plugin in a separate fork, after only torch and eventloop.

    Must be called before plugins are imported. Without `os.fork`, nothing is measured.

    Returns:
        The cost of each plugin.
    """
    if not hasattr(os, "fork"):
        return {}
    importlib.import_module("eventloop.trainer")
    return {one: _in_a_fork(one) for one in found}


def _in_a_fork(found: Found) -> Measured:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which imports don't need
        child = os.fork()
    if not child:
        try:
            silent = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(silent, descriptor)
            sys.stdout = sys.stderr = os.fdopen(silent, "w")  # they may lead elsewhere
            os.write(writing, json.dumps(_cost(found)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    is_done, _, _ = select.select([reading], [], [], _LONGEST_S)
    text = os.read(reading, 4096) if is_done else b""
    os.close(reading)
    os.kill(child, signal.SIGKILL)  # it may have threads that stay
    os.waitpid(child, 0)
    return Measured(*json.loads(text)) if text else Measured()


def _cost(found: Found) -> tuple[float, bool]:
    asked: set[str] = set()
    real = builtins.__import__

    def noting(name: str, *rest: Any, **named: Any) -> Any:
        asked.add(name.partition(".")[0])
        return real(name, *rest, **named)

    builtins.__import__ = noting
    start = time.perf_counter()
    imported(found)
    return time.perf_counter() - start, "torch" in asked
