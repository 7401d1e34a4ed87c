"""Start-up: what 0, 1, 20 and 200 installed plugins add to a start, beside their own import.

Plugins are made in a temporary folder, each with one module that imports nothing but `eventloop`.
For each number of them the processor time of three things is taken in fresh interpreters,
interleaved and repeated, and the fastest counts. (All three are one thread that waits for nothing,
so that on an idle machine it is the time on the clock; on a busy one it is steadier.)

- list: `eventloop plugins`, the whole command;
- start: discovering, selecting, loading, building, validating and ordering all plugins;
- imports: importing the same modules, and nothing else.

What a plugin adds is (start - start of none - imports) / number.

    python benchmarks/start_up.py [--repeat 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

NUMBERS = (0, 1, 20, 200)
_SOURCE = Path(__file__).parents[1] / "src"
_MODULE = '''
from eventloop import hookimpl


class Plugin:
    """Does nothing.

    Args:
        alpha: how much of it.
    """

    def __init__(self, *, alpha: float = 1.0) -> None:
        self.alpha = alpha

    @hookimpl
    def batch_start(self, state): ...

    @hookimpl
    def batch_end(self, state): ...

    @hookimpl
    def epoch_end(self, state): ...
'''
_START = """
import time
from eventloop.config.configuration import Configuration
from eventloop.plugin.assemble import assemble
start = time.process_time()
configuration = Configuration.read()
registry = assemble(configuration)
print(time.process_time() - start)
registry.raise_problems()
"""
_IMPORTS = """
import importlib, sys, time
import eventloop
start = time.process_time()
for idx in range(int(sys.argv[1])):
    importlib.import_module(f"eventloop_made_{idx}")
print(time.process_time() - start)
"""


def install(folder: Path, number: int) -> None:
    """Writes plugins as pip leaves them: metadata and a module each."""
    for idx in range(number):
        (folder / f"eventloop_made_{idx}.py").write_text(_MODULE)
        info = folder / f"eventloop_made_{idx}-1.0.dist-info"
        info.mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: eventloop-made-{idx}\nVersion: 1.0\n"
        (info / "METADATA").write_text(metadata)
        (info / "REQUESTED").touch()
        point = f"[eventloop.algorithms]\nmade-{idx} = eventloop_made_{idx}:Plugin\n"
        (info / "entry_points.txt").write_text(point)


def run(folder: Path, *argv: str) -> tuple[float, str]:
    """Runs Python in the folder; gives the seconds that it took and what it wrote."""
    paths = os.pathsep.join([str(_SOURCE), str(folder)])
    start = _cpu_seconds()
    done = subprocess.run(
        [sys.executable, *argv],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return _cpu_seconds() - start, done.stdout


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(folders: dict[int, Path], repeat: int) -> dict[int, dict[str, float]]:
    """Returns the fastest seconds of each kind, by the number of plugins."""
    fastest: dict[int, dict[str, float]] = {number: {} for number in folders}
    for _ in range(repeat + 1):  # the first run compiles the modules
        for number, folder in folders.items():
            seen = {
                "list": run(folder, "-m", "eventloop", "plugins")[0],
                "start": float(run(folder, "-c", _START)[1]),
                "imports": float(run(folder, "-c", _IMPORTS, str(number))[1]),
            }
            known = fastest[number]
            fastest[number] = {kind: min(s, known.get(kind, s)) for kind, s in seen.items()}
    return fastest


def main() -> None:
    """Measures and writes a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folders = {number: Path(root) / str(number) for number in NUMBERS}
        for number, folder in folders.items():
            folder.mkdir()
            install(folder, number)
        seconds = measure(folders, arguments.repeat)
    for number, row in seconds.items():
        added = row["start"] - seconds[0]["start"] - row["imports"]
        row["added a plugin"] = added / number if number else 0.0
    if arguments.json:
        print(json.dumps(seconds, indent=2))
        return
    table = Table("plugins", *(f"{kind}, ms" for kind in seconds[0]))
    for number, row in seconds.items():
        table.add_row(str(number), *(f"{value * 1e3:.2f}" for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
