"""The path of a project's lock, and its digests; `lock_file` writes and compares its text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop.config.config_files import find_pyproject
from eventloop.naming import fold

if TYPE_CHECKING:
    from eventloop.plugin.order import Ordered
    from eventloop.plugin.records import Found

NAME = "eventloop.lock"


def lock_path(directory: Path) -> Path:
    """Returns the path of the lock: next to the nearest `pyproject.toml`, or in the directory."""
    project = find_pyproject(directory)
    return (project[0].parent if project else directory) / NAME


def order_digest(implementations: Mapping[str, Ordered], *, passed: bool = True) -> str:
    """Returns a digest of the order of algorithms and callbacks in every hook.

    Two environments have the same digest if and only if the same plugins run in the same order.

    Args:
        implementations: the ordered implementations by hook.
        passed: whether to include plugins passed in Python or added by a command's flag.
    """
    orders: dict[str, list[str]] = {}
    for hook, ordered in implementations.items():
        for implementation in ordered.implementations:
            plugin = implementation.plugin
            is_counted = passed or plugin.found is not None
            if plugin.role in ("algorithm", "callback") and is_counted:
                orders.setdefault(hook, []).append(f"{plugin.role}:{fold(plugin.name)}")
    listed = json.dumps(orders, sort_keys=True)
    return f"sha256:{hashlib.sha256(listed.encode()).hexdigest()}"


def file_digests(plugin: Found) -> Iterator[tuple[str, str]]:
    """Yields the name of each file of a plugin, with its current digest.

    The digests in RECORD aren't used, because a file may have been edited since the installation.
    """
    for name, path in _files(plugin):
        # A file in a wheel or egg has the digest of the archive.
        archive = next((parent for parent in path.parents if parent.is_file()), path)
        try:
            with archive.open("rb") as file:
                yield name, f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        except OSError:  # the text differs from every digest, so the lock reports a change
            yield name, "can't be read"


def _files(plugin: Found) -> Iterator[tuple[str, Path]]:
    """Yields names and paths of the distribution's files.

    If the distribution lists none or is editable, these are the files of the plugin's module.
    """
    distribution = plugin.entry_point.dist
    if plugin.path is not None:
        yield plugin.path.name, plugin.path
    elif distribution is None or distribution.files is None or is_editable(plugin):
        yield from _files_of_module(plugin.entry_point.module)
    else:
        for file in distribution.files:
            is_code = ".." not in file.parts and "__pycache__" not in file.parts
            if is_code and not file.parts[0].endswith((".dist-info", ".egg-info")):
                yield file.as_posix(), Path(str(distribution.locate_file(file)))


def _files_of_module(module: str) -> Iterator[tuple[str, Path]]:
    """Yields the files of a module's top-level package, or the file of a module without a package.

    Namespace packages are skipped, because they contain packages of other distributions.
    """
    segments = module.split(".")
    for name in (".".join(segments[: idx + 1]) for idx in range(len(segments))):
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


def is_editable(plugin: Found) -> bool:
    """Returns whether a distribution is an editable install."""
    distribution = plugin.entry_point.dist
    try:
        origin = json.loads((distribution and distribution.read_text("direct_url.json")) or "{}")
        return bool(origin["dir_info"]["editable"])
    except (ValueError, KeyError, TypeError):  # no such file, or not in the expected form
        return False
