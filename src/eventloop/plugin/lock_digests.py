"""Where a project's lock is, its digests, and which algorithms have run; its text is eventloop-plugins'."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop.config.config_files import find_pyproject
from eventloop.errors import Wording
from eventloop.files import disk
from eventloop.fixes import shell, switch_off
from eventloop.naming import fold
from eventloop.plugin.records import Plugin

if TYPE_CHECKING:
    from eventloop.plugin.order import Ordered
    from eventloop.plugin.records import Found

NAME = "eventloop.lock"
FOLDER, FILE = ".eventloop", "algorithms.json"
# What has been said already where nothing can be written.
_SAID: set[tuple[Path | None, str]] = set()


def lock_path(directory: Path) -> Path:
    """Returns the path of the lock: next to the nearest `pyproject.toml`, or in the directory."""
    found = find_pyproject(directory)
    return (found[0].parent if found else directory) / NAME


def order_digest(implementations: Mapping[str, Ordered]) -> str:
    """Returns a digest of the order of algorithms and callbacks in every hook.

    Two environments have the same digest if and only if the same plugins run in the same order.
    """
    orders: dict[str, list[str]] = {}
    for hook, ordered in implementations.items():
        for one in ordered.implementations:
            if one.plugin.role in ("algorithm", "callback"):
                called = f"{one.plugin.role}:{fold(one.plugin.name)}"
                orders.setdefault(hook, []).append(called)
    listed = json.dumps(orders, sort_keys=True)
    return f"sha256:{hashlib.sha256(listed.encode()).hexdigest()}"


def file_digests(found: Found) -> Iterator[tuple[str, str]]:
    """Yields the files of a plugin, each with its current digest.

    The digests in RECORD aren't used, as a file may have been edited since.
    """
    for name, path in _files(found):
        # What lies in a wheel or egg has the digest of that.
        archive = next((one for one in path.parents if one.is_file()), path)
        try:
            with archive.open("rb") as file:
                yield name, f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        except OSError:  # differs from what any file has
            yield name, "can't be read"


def _files(found: Found) -> Iterator[tuple[str, Path]]:
    """Yields names and paths of the distribution's files, or the module's if it lists none."""
    distribution = found.entry_point.dist
    if found.path is not None:
        yield found.path.name, found.path
    elif distribution is None or distribution.files is None or is_editable(found):
        yield from _files_of_module(found.entry_point.module)
    else:
        for file in distribution.files:
            is_code = ".." not in file.parts and "__pycache__" not in file.parts
            if is_code and not file.parts[0].endswith((".dist-info", ".egg-info")):
                yield file.as_posix(), Path(str(distribution.locate_file(file)))


def _files_of_module(module: str) -> Iterator[tuple[str, Path]]:
    """Yields the files of a module's package, or of the module itself.

    A namespace package isn't used, as its other packages belong to other distributions.
    """
    parts = module.split(".")
    for name in (".".join(parts[: idx + 1]) for idx in range(len(parts))):
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):
            return
        if spec is None or spec.origin is None:
            continue
        if spec.submodule_search_locations is None:
            yield Path(spec.origin).name, Path(spec.origin)
        for folder in map(Path, spec.submodule_search_locations or ()):
            for path in folder.rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts:
                    yield f"{name}/{path.relative_to(folder).as_posix()}", path
        return


def is_editable(found: Found) -> bool:
    """Returns whether a distribution is an editable install."""
    distribution = found.entry_point.dist
    try:
        origin = json.loads((distribution and distribution.read_text("direct_url.json")) or "{}")
        return bool(origin["dir_info"]["editable"])
    except (ValueError, KeyError, TypeError):  # it has none, or holds anything
        return False


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
    path = folder and folder / FOLDER / FILE
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
