"""Runs import-linter over the core and every plugin package, installed or not.

`python tools/lint_imports.py` takes the options of `lint-imports`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from importlinter.cli import lint_imports_command

ROOT = Path(__file__).parents[1]

if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), *map(str, sorted(ROOT.glob("plugins/*/src")))]
    lint_imports_command()
