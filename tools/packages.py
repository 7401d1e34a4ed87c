"""Writes the lists of packages that files of the repository hold.

    python tools/packages.py

The folders of `plugins/` decide which packages there are, and `plugins/standard.txt` which of them most users
want. From these follow `src/eventloop/published.txt`, by which the core knows which distribution has a plugin,
command or option that isn't installed, and the extra `standard` of `pyproject.toml`. A test runs this script: run it after adding, renaming
or removing a package.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ">=0.1,<0.2"
# Of entry points whose names messages know.
GROUPS = ("eventloop.algorithms", "eventloop.callbacks", "eventloop.commands", "eventloop.options")


def lists(root: Path = ROOT) -> dict[Path, str]:
    """Returns the text of each file that holds a list, with the list as the folders have it."""
    names: dict[str, str] = {}
    for path in root.glob("plugins/*/pyproject.toml"):
        names |= names_of(path)
    published = "".join(f"{name} {names[name]}\n" for name in sorted(names))

    lines = (root / "plugins" / "standard.txt").read_text(encoding="utf-8").splitlines()
    packages = [line.rpartition("/")[2] for line in lines if not line.startswith("#")]
    extra = "".join(f'    "{package}{VERSIONS}",\n' for package in packages)
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    project = re.sub(r"(?<=^standard = \[\n).*?(?=^\]$)", extra, project, flags=re.M | re.S)

    return {
        root / "src" / "eventloop" / "published.txt": published,
        root / "pyproject.toml": project,
    }


def names_of(path: Path) -> dict[str, str]:
    """Returns the distribution of a `pyproject.toml` by its own name and those of its entry points."""
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    distribution = project["name"]
    names = {distribution.removeprefix("eventloop-"): distribution}
    for group, points in project.get("entry-points", {}).items():
        # Storage is found by protocol, and pytest's plugins by module.
        if group in GROUPS:
            names |= dict.fromkeys(points, distribution)
    return names


if __name__ == "__main__":
    for path, text in lists().items():
        path.write_text(text, encoding="utf-8")
