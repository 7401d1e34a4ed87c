"""What a project keeps of its plugins: the lock, and which algorithms have run in it before."""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import importlib_metadata

from eventloop.config.layers import find_pyproject
from eventloop.errors import PluginError, Wording
from eventloop.files import disk
from eventloop.naming import fold
from eventloop.plugin.candidates import dry_assemble
from eventloop.plugin.records import Plugin
from eventloop.text import shell, switch_off

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration
    from eventloop.plugin.candidates import Candidates
    from eventloop.plugin.order import Ordered
    from eventloop.plugin.records import Found

NAME = "eventloop.lock"
_HEAD = "# Written by `eventloop plugins lock`; `eventloop fit` refuses any difference.\n"
FOLDER, FILE = ".eventloop", "algorithms.json"
# What has been said already where nothing can be written.
_SAID: set[tuple[Path | None, str]] = set()


def lock_path(directory: Path) -> Path:
    """Returns the path of the lock: next to the nearest `pyproject.toml`, or in the directory."""
    found = find_pyproject(directory)
    return (found[0].parent if found else directory) / NAME


def lock_text(plugins: Iterable[Plugin], implementations: Mapping[str, Ordered]) -> str:
    """Returns the active plugins, their files, and a digest of their order, as TOML.

    Args:
        plugins: the active ones; those passed in Python are left out.
        implementations: by hook.
    """
    core = importlib_metadata.version("torch-eventloop")
    head = f'{_HEAD}eventloop = "{core}"\norder = "{order_digest(implementations)}"\n'
    locked = [(one, one.found) for one in plugins if one.found is not None]
    locked.sort(key=lambda one: fold(one[0].name))
    return "\n".join([head, *(_table(plugin, found) for plugin, found in locked)])


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


def check_lock(
    path: Path, plugins: Iterable[Plugin], implementations: Mapping[str, Ordered]
) -> None:
    """Compares the active plugins with the lock; does nothing without one.

    Raises:
        PluginError: they differ; the message has a diff from the lock to the environment.
    """
    if not path.is_file():
        return
    locked = _read(path)
    actual = lock_text(plugins, implementations)
    if _content(locked) != _content(actual):
        diff = difflib.unified_diff(
            _content(locked), _content(actual), "locked", "installed", n=2, lineterm=""
        )
        files = ", ".join(_changes(tomllib.loads(locked), tomllib.loads(actual)))
        changed: dict[str, Any] = {"changed": files} if files else {}
        raise PluginError(
            f"the plugins differ from what {path.name} says",
            lock=path,
            **changed,
            diff="\n    ".join(["", *diff]),
            fix="install what is locked, or write a new lock with `eventloop plugins lock`, or go "
            "without this time with `--unlocked`",
        )


def require_lock(configuration: Configuration, candidates: Candidates) -> None:
    """Compares the installed plugins, independent of the task, with the lock of the working directory.

    Raises:
        PluginError: they differ; the message has a diff.
    """
    path = lock_path(Path.cwd())
    if path.is_file():
        assembly = dry_assemble(configuration, candidates=candidates).assembly
        check_lock(path, assembly.plugins, assembly.implementations)


def _changes(locked: Mapping[str, Any], actual: Mapping[str, Any]) -> Iterator[str]:
    """Yields the changed files of plugins that are in both."""
    before, now = (
        {one.get("name"): one.get("files", {}) for one in each.get("plugins", ())}
        for each in (locked, actual)
    )
    for name in before.keys() & now.keys():
        files = before[name].items() ^ now[name].items()
        yield from (f"{file} of {name}" for file in sorted({file for file, _ in files}))


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        tomllib.loads(text)
    except (OSError, ValueError) as error:  # what is not a text or no TOML
        raise PluginError(
            f"{path.name} can't be read: {' '.join(str(error).split())}",
            lock=path,
            fix="write a new one with `eventloop plugins lock`, or ignore it once with "
            "`--unlocked`",
        ) from error
    return text


def _table(plugin: Plugin, found: Found) -> str:
    lines = [
        "[[plugins]]",
        f"name = {_toml(plugin.name)}",
        f"role = {_toml(plugin.role)}",
        f"distribution = {_toml(plugin.distribution or plugin.source)}",
        f"version = {_toml(plugin.version)}",
    ]
    if _is_editable(found):
        lines.append("editable = true")
    options = [f"{name} = {_toml(plugin.options[name])}" for name in sorted(plugin.options)]
    files = [f"{_toml(name)} = {_toml(digest)}" for name, digest in sorted(file_digests(found))]
    for title, entries in (("options", options), ("files", files)):
        lines += [f"[plugins.{title}]", *entries] if entries else []
    return "\n".join(lines) + "\n"


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
    elif distribution is None or distribution.files is None or _is_editable(found):
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


def _is_editable(found: Found) -> bool:
    """Returns whether a distribution is an editable install."""
    distribution = found.entry_point.dist
    try:
        origin = json.loads((distribution and distribution.read_text("direct_url.json")) or "{}")
        return bool(origin["dir_info"]["editable"])
    except (ValueError, KeyError, TypeError):  # it has none, or holds anything
        return False


def _toml(value: object) -> str:
    """Formats a value as TOML; values that TOML doesn't support, as text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value), ensure_ascii=False)


def _content(text: str) -> list[str]:
    """Returns the lines without comments and empty ones."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


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
    ignore = path.parent / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n", encoding="ascii")
    disk.replace_file(path, f"{json.dumps(sorted(names))}\n".encode("ascii"))


def _announcement(plugin: Plugin) -> str:
    what = f"new: {plugin.origin} is installed, and takes part here for the first time; "
    off = switch_off(plugin.name)
    for_good = f"{shell('eventloop', 'plugins', 'disable', plugin.name)} for good, with "
    return what + Wording("", f"{off.shell} leaves it out once, and ") + for_good + str(off)
