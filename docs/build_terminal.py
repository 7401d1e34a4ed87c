"""Draws `terminal.svg`, what a run of `examples/digits.py` prints: `python docs/build_terminal.py`.

It trains. The packages of the README's first command must be installed.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
COMMAND = ["fit", "examples/digits.py", "--no-plugins", "-p", "progress", "-p", "mixup"]


def output() -> str:
    """Trains, and returns what the command prints."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        done = subprocess.run(
            [sys.executable, "-m", "eventloop", *COMMAND],
            cwd=folder,
            env={**os.environ, "COLUMNS": "110"},
            capture_output=True,
            text=True,
            check=True,
        )
    return done.stdout


def picture(text: str) -> str:
    """Returns the picture as SVG."""
    console = Console(record=True, width=126, file=io.StringIO())
    console.print(Text(f"$ eventloop {' '.join(COMMAND)}", style="bold"))
    console.print(Text.from_ansi(text.strip()))
    return console.export_svg(title="eventloop", unique_id="terminal")


if __name__ == "__main__":
    PICTURE.write_text(picture(output()), encoding="utf-8")
