"""Which algorithms a project knows, and what is said when one takes part in it for the first time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from eventloop.config.config_files import find_pyproject
from eventloop.errors import Wording
from eventloop.files import disk
from eventloop.fixes import shell, switch_off
from eventloop.naming import fold
from eventloop.plugin.records import Plugin

_FOLDER, _FILE = ".eventloop", "algorithms.json"
# What has been said already where nothing can be written.
_SAID: set[tuple[Path | None, str]] = set()


def first_runs(unasked: Iterable[Plugin], installed: Iterable[str], here: Path | None) -> list[str]:
    """Returns a line for each new algorithm, and records it as known.

    The record is in `.eventloop`, next to the nearest `pyproject.toml`. Without one, a command
    writes it into the directory; in Python nothing is written, and a line is shown once per
    process.

    Args:
        unasked: the active algorithms that weren't requested by name.
        installed: the names of all plugins; one that is removed is new when it is installed again.
        here: the directory that a command writes into; None in Python.
    """
    project = find_pyproject(here or Path.cwd())
    folder = project[0].parent if project else here
    path = folder and folder / _FOLDER / _FILE
    active = {fold(one.name): one for one in unasked}
    known = _known_to(path) if path else set()
    now = (known & set(map(fold, installed))) | active.keys()
    if path and now != known:
        with suppress(OSError):  # read-only: the next process says it again
            _remember(path, now)
    new = [name for name in sorted(active.keys() - known) if (path, name) not in _SAID]
    _SAID.update((path, name) for name in new)
    return [_announcement(active[name]) for name in new]


def _known_to(path: Path) -> set[str]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        return set(map(str, held))
    except (OSError, ValueError, TypeError):  # absent, or not what was written
        return set()


def _remember(path: Path, names: Iterable[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    if not (ignore := path.parent / ".gitignore").exists():
        ignore.write_text("*\n", encoding="ascii")
    disk.replace_file(path, f"{json.dumps(sorted(names))}\n".encode("ascii"))


def _announcement(plugin: Plugin) -> str:
    what = f"new: {plugin.origin} is installed, and takes part here for the first time; "
    off = switch_off(plugin.name)
    for_good = f"{shell('eventloop', 'plugins', 'disable', plugin.name)} for good, with "
    return what + Wording("", f"{off.shell} leaves it out once, and ") + for_good + str(off)
