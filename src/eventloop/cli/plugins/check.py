"""`eventloop plugins check`: what would stop a run, and what imports cost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.cli.arguments import Command, command_help, read_arguments
from eventloop.cli.output import write_json, write_lines, write_table, write_text
from eventloop.cli.plugins.reading import JSON, Extension, imported_extensions, surveyed
from eventloop.errors import PluginError
from eventloop.plugin.lock import check_lock, lock_path
from eventloop.text import plain

if TYPE_CHECKING:
    from eventloop.plugin.assembly import Assembly
    from eventloop.plugin.candidates import DryAssembly
    from eventloop.plugin.records import Found

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
_PROGRAM = """
import json, sys, time
path, name, file = json.loads(sys.argv[1])
sys.path[:] = path
import importlib, importlib.util
import eventloop
start = time.perf_counter()
if file:
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
else:
    importlib.import_module(name)
seconds = time.perf_counter() - start
print(json.dumps([seconds, "torch" in sys.modules]), file=sys.__stderr__)
"""


def run(argv: Sequence[str]) -> int:
    """Runs the subcommand."""
    arguments = read_arguments(argv, COMMAND)
    if "help" in arguments.given:
        write_text(command_help(COMMAND))
        return 0
    _, found = surveyed(arguments, COMMAND)
    added = list(imported_extensions())
    rows = [*_rows(found), *_extension_rows(added)]
    of_extensions = (one.problem for one in added if one.problem is not None)
    assembly = found.assembly
    problems = [*found.problems, *dict.fromkeys(of_extensions), *_lock_problems(assembly)]
    remarks = [
        one for ordered in assembly.implementations.values() for one in assembly.remarks(ordered)
    ]
    if "json" in arguments.given:
        written = [str(problem) for problem in problems]
        write_json({"plugins": rows, "problems": written, "remarks": remarks})
    else:
        write_table(_COLUMNS, [_cells(row) for row in rows])
        for idx, problem in enumerate(problems, 1):
            write_text(plain(f"\n{idx}. {problem}"))
        write_lines(["", *(f"remark: {remark}" for remark in remarks)] if remarks else [])
        count = len(problems)
        write_lines(["", f"{count or 'no'} {'problem' if count == 1 else 'problems'}"])
    return 1 if problems else 0


def _lock_problems(assembly: Assembly) -> Iterator[PluginError]:
    try:
        check_lock(lock_path(Path.cwd()), assembly.plugins, assembly.implementations)
    except PluginError as error:
        yield error


def _rows(found: DryAssembly) -> Iterator[dict[str, Any]]:
    imported = [row for row in found.rows if row.target is not None]
    costs = dict(
        zip(
            (id(row) for row in imported),
            measure_imports(row.found for row in imported),
            strict=True,
        )
    )
    for row in found.rows:
        status = "problem" if row.problems else row.selected.status
        reason = row.problems[0].what if row.problems else row.selected.reason
        yield _row(row.found, status, reason, costs.get(id(row), Measured()))


def _extension_rows(added: Sequence[Extension]) -> Iterator[dict[str, Any]]:
    costs = measure_imports(one.found for one in added)
    for one, cost in zip(added, costs, strict=True):
        yield _row(one.found, one.status, one.reason, cost)


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
    """What an import costs.

    Args:
        seconds: wall-clock time; None where it failed.
        with_torch: whether torch came with it; its time is included.
    """

    seconds: float | None = None
    with_torch: bool | None = None


def measure_import(found: Found) -> Measured:
    """Imports a plugin's module in a fresh interpreter, in which only `eventloop` was imported."""
    name = f"plugin_{found.path.stem}" if found.path else found.entry_point.module
    given = json.dumps([sys.path, name, str(found.path or "")])
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, given],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=True,
        )
        seconds, with_torch = json.loads(done.stderr.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return Measured()
    return Measured(seconds, with_torch)


def measure_imports(found: Iterable[Found]) -> list[Measured]:
    """Measures several, a few side by side."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return list(pool.map(measure_import, found))
