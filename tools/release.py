"""Builds every package of the repository, and tries what was built.

    python tools/release.py [FOLDER]

Wheels and source distributions of the core and of each plugin come into FOLDER, `dist` unless given.
`twine check` reads their metadata. Then two fresh environments, which see the running one's libraries,
take the wheels and the source distributions; in each every plugin is listed and checked, and a small
model is trained. `tox -e release` runs it.

`mkdocs.yml` has a placeholder, `@REPOSITORY@`, for the address of the repository, which the release fills in. While a
placeholder is left, everything is built and tried, but FOLDER is removed and the exit status is 1.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    "*.md",
    "*.cff",
    "mkdocs.yml",
    "pyproject.toml",
    "docs/**/*.md",
    "plugins/*.md",
    "plugins/*/*.md",
)
TASK = "from eventloop_testing import tiny_task as task\n"


def main() -> None:
    """Builds, checks and tries all packages."""
    dist = Path(sys.argv[1] if sys.argv[1:] else ROOT / "dist").absolute()
    shutil.rmtree(dist, ignore_errors=True)
    packages = [ROOT, *sorted(one.parent for one in ROOT.glob("plugins/*/pyproject.toml"))]
    with tempfile.TemporaryDirectory() as scratch:
        for package in packages:
            build(package, dist, Path(scratch))
        wheels, sources = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
        assert len(wheels) == len(sources) == len(packages), (wheels, sources)
        run(sys.executable, "-m", "twine", "check", "--strict", *wheels, *sources)
        found = [try_out(files, Path(scratch)) for files in (wheels, sources)]
    assert found[0] == found[1], found
    if left := placeholders(ROOT):
        shutil.rmtree(dist)
        sys.exit("\n".join(["what is built works, but pages are to be filled in first:", *left]))
    sys.stdout.write(
        f"{len(packages)} packages in {dist}; installed they list {len(found[0])} rows\n"
    )


def placeholders(root: Path) -> list[str]:
    """Returns what is still to be filled in, as `README.md:3: @REPOSITORY@`."""
    return [
        f"{path.relative_to(root).as_posix()}:{number}: {found}"
        for pattern in PAGES
        for path in sorted(root.glob(pattern))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for found in re.findall(r"@[A-Z_]+@", line)
    ]


def build(package: Path, dist: Path, scratch: Path) -> None:
    """Builds a copy of a package, so that no build leaves anything in the repository."""
    copy = scratch / package.name
    shutil.copytree(package / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (package / name).is_file():
            shutil.copy(package / name, copy)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, copy)


def try_out(files: list[Path], scratch: Path) -> list[str]:
    """Installs distributions in a fresh environment, and returns the names of what they bring."""
    home = scratch / f"try{files[0].suffix}"
    venv.create(home)
    (site,) = home.rglob("site-packages")
    running = [one for one in sys.path if Path(one).name in ("site-packages", "dist-packages")]
    (site / "running.pth").write_text("\n".join(running))
    python = home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--quiet", "--no-deps", "--no-build-isolation", *files)
    run(python, "-m", "eventloop", "plugins", "check", cwd=scratch)
    listed = run(python, "-m", "eventloop", "plugins", "--json", cwd=scratch)
    (scratch / "task.py").write_text(TASK)
    run(python, "-m", "eventloop", "fit", "task.py", "--max-duration", "4ba", cwd=scratch)
    return sorted(row["name"] for row in json.loads(listed))


def run(*argv: str | Path, cwd: Path = ROOT) -> str:
    """Runs a command and returns what it printed; a failure ends the script with all of it."""
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, argv))}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
