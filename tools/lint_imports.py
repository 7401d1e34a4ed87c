"""Runs import-linter over the core and every plugin package, installed or not.

    python tools/lint_imports.py

The contracts stand in `pyproject.toml`, with `eventloop_*` in place of the names of the packages: those are
read from the folders of `plugins/`, since import-linter takes no pattern for them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def contracts(root: Path = ROOT) -> str:
    """Returns the text of `pyproject.toml` with the name of each package for `eventloop_*`."""
    packages = sorted(folder.parent.name for folder in root.glob("plugins/*/src/*/__init__.py"))
    names = ", ".join(f'"{package}"' for package in packages)
    return (root / "pyproject.toml").read_text(encoding="utf-8").replace('"eventloop_*"', names)


def main() -> int:
    """Returns the exit status of import-linter."""
    from importlinter.cli import lint_imports  # tests read the contracts where it isn't installed

    sys.path[:0] = [str(ROOT / "src"), *map(str, sorted(ROOT.glob("plugins/*/src")))]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "pyproject.toml")
        config.write_text(contracts(), encoding="utf-8")
        return lint_imports(config_filename=str(config))


if __name__ == "__main__":
    sys.exit(main())
