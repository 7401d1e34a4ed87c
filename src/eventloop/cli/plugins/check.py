"""`eventloop plugins check`: what would stop a run, and what imports cost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.cli.arguments import Arguments, Command
from eventloop.cli.output import write_json, write_lines, write_table, write_text
from eventloop.cli.plugins.reading import JSON, Extension, imported_extensions, surveyed
from eventloop.errors import PluginError
from eventloop.plugin.local import split_label
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
# Imports what every fit does, then each plugin in a fork of its own, where there are forks.
_PROGRAM = """
import builtins, importlib, importlib.util, json, os, select, signal, sys, time
path, longest_s, given = json.loads(sys.stdin.read())
sys.path[:] = path
import torch
from eventloop import Trainer

def measured(name, file):
    asked, real = set(), builtins.__import__
    def noting(name, *rest, **named):
        asked.add(name.partition(".")[0])
        return real(name, *rest, **named)
    builtins.__import__ = noting
    start = time.perf_counter()
    try:
        if file:
            spec = importlib.util.spec_from_file_location(name, file)
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            importlib.import_module(name)
        return [time.perf_counter() - start, "torch" in asked]
    except BaseException:
        return [None, None]
    finally:
        builtins.__import__ = real

def in_a_fork(name, file):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps(measured(name, file)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    is_done, _, _ = select.select([reading], [], [], longest_s)
    text = os.read(reading, 4096) if is_done else b""
    os.close(reading)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return json.loads(text or "[null, null]")

measure = in_a_fork if hasattr(os, "fork") else measured
for name, file in given:
    print(json.dumps(measure(name, file)), file=sys.__stderr__)
"""


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    _, found = surveyed(arguments, COMMAND)
    added = list(imported_extensions())
    rows = list(_rows(found, added))
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


def _rows(found: DryAssembly, added: Sequence[Extension]) -> Iterator[dict[str, Any]]:
    imported = [row.found for row in found.rows if row.target is not None]
    measured = iter(measure_imports([*imported, *(one.found for one in added)]))
    for row in found.rows:
        status = "problem" if row.problems else row.selected.status
        reason = row.problems[0].what if row.problems else row.selected.reason
        cost = Measured() if row.target is None else next(measured)
        yield _row(row.found, status, reason, cost)
    for one, cost in zip(added, measured, strict=True):
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
    """What an import costs beyond what every fit imports, torch included.

    Args:
        seconds: wall-clock time; None where it failed.
        with_torch: whether its module, or one that came with it, imports torch.
    """

    seconds: float | None = None
    with_torch: bool | None = None


def measure_imports(found: Iterable[Found]) -> list[Measured]:
    """Imports each plugin's module in a process in which nothing but torch and eventloop was."""
    given = list(map(_module, found))
    if not given:
        return []
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            input=json.dumps([sys.path, _LONGEST_S, given]),
            capture_output=True,
            text=True,
            timeout=_LONGEST_S * (1 + len(given)),
            check=True,
        )
        lines = done.stderr.splitlines()[-len(given) :]
        return [Measured(*json.loads(line)) for line in lines]
    except (subprocess.SubprocessError, OSError, ValueError, TypeError):
        return [Measured()] * len(given)


def _module(found: Found) -> tuple[str, str]:
    """Returns a module's name, and its file where that is what names it."""
    module, _ = split_label(found.entry_point.value)
    return (
        (f"plugin_{Path(module).stem}", str(found.path)) if module.endswith(".py") else (module, "")
    )
