"""What a step costs under a framework's trainer and under ours, for each bridge: one table.

Runs the benchmark of each bridge in a process of its own, one after the other; in each a plain loop, the
framework's trainer and ours take turns, round by round, in the processor time of one thread. The table has what
each trainer adds to a step of the plain loop. A bridge whose framework isn't installed is left out, with a line.

    python benchmarks/bridges.py [--rounds 9] [--only lightning composer transformers]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BRIDGES = {
    "lightning": ROOT / "benchmarks" / "bridge_lightning.py",
    "composer": ROOT / "plugins" / "eventloop-composer" / "tools" / "overhead.py",
    "transformers": ROOT / "plugins" / "eventloop-transformers" / "tools" / "overhead.py",
}
# What a torchvision for CUDA lacks beside a torch for the CPU; Lightning and transformers import it, too.
_OPERATORS = "from eventloop_composer.importing import declare_operators\ndeclare_operators()\n"


def lines_of(name: str, rounds: int) -> list[dict[str, Any]]:
    """Returns what the benchmark of a bridge has measured, a set-up a line."""
    with tempfile.TemporaryDirectory() as folder:
        if importlib.util.find_spec("torchvision") is not None:
            Path(folder, "sitecustomize.py").write_text(_OPERATORS)
        sources = [str(one) for one in (ROOT / "plugins").glob("*/src")]
        path = os.pathsep.join([folder, *sources, os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, str(BRIDGES[name]), "--rounds", str(rounds), "--json"],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{BRIDGES[name]}: {done.stderr[-2000:]}")
    # Frameworks may write lines of their own before.
    found: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("[\n") :])
    return found


def row(bridge: str, line: dict[str, Any]) -> str:
    """Returns a line of the table."""
    ratio = line["ours_us"] / line["theirs_us"]
    more = " and ".join(
        f"{line[key]:,.0f} {unit}"
        for unit in ("calls", "reads")
        for key in (f"theirs_{unit}", f"ours_{unit}")
        if key in line
    )
    cells = (
        bridge, line["name"], f"{line['plain_us']:,.0f} us", f"{line['theirs_us']:,.0f} us",
        f"{line['ours_us']:,.0f} us", f"{ratio:.2f}", more,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=BRIDGES, default=list(BRIDGES))
    given = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, load {os.getloadavg()[0]:.1f}\n")
    print("| bridge | set-up | plain loop | the framework adds | ours adds | ratio | a step |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for bridge in given.only:
        if importlib.util.find_spec(bridge) is None:
            print(f"{bridge} is not installed")
            continue
        for line in lines_of(bridge, given.rounds):
            print(row(bridge, line), flush=True)


if __name__ == "__main__":
    main()
