"""First runs: which algorithms take part because they are installed, and did in no run before."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from eventloop.config.layers import find_pyproject
from eventloop.files import disk
from eventloop.naming import fold
from eventloop.plugin.records import Plugin
from eventloop.text import disable, is_command, shell, switch_off

FOLDER, FILE = ".eventloop", "algorithms.json"
# What has been said already where nothing can be written.
_SAID: set[tuple[Path | None, str]] = set()


def first_runs(unasked: Iterable[Plugin], installed: Collection[str], directory: Path) -> list[str]:
    """Returns a line for each algorithm that is new, and writes down that it isn't any more.

    What is known stands in `.eventloop`, beside the nearest `pyproject.toml`. Without one a command writes
    into the directory; in Python, which leaves nothing behind there, a line comes once a process.

    Args:
        unasked: those that take part, and that nothing asked for by name.
        installed: the names of all plugins; one that is gone is new when it comes back.
    """
    project = find_pyproject(directory)
    folder = project[0].parent if project else directory if is_command() else None
    path = folder and folder / FOLDER / FILE
    active = {fold(one.name): one for one in unasked}
    known = _read(path) if path else set()
    now = (known & set(map(fold, installed))) | active.keys()
    if path and now != known:
        with suppress(OSError):  # read-only: the next process says it again
            _write(path, now)
    new = [name for name in sorted(active.keys() - known) if (path, name) not in _SAID]
    _SAID.update((path, name) for name in new)
    return [_line(active[name]) for name in new]


def _read(path: Path) -> set[str]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        return set(map(str, held))
    except (OSError, ValueError, TypeError):  # absent, or not what was written
        return set()


def _write(path: Path, names: Iterable[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    ignore = path.parent / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n", encoding="ascii")
    disk.replace_file(path, f"{json.dumps(sorted(names))}\n".encode("ascii"))


def _line(plugin: Plugin) -> str:
    once = f"{switch_off(plugin.name)} leaves it out once, and " if is_command() else ""
    return (
        f"new: {plugin.origin} is installed, and takes part here for the first time; {once}"
        f"{shell('eventloop', 'plugins', 'disable', plugin.name)} for good, with {disable(plugin.name)}"
    )
