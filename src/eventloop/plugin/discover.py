"""Step 1, discover: finds plugins in the metadata of installed packages, without importing them."""

from __future__ import annotations

import functools
import os
import re
import site
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import importlib_metadata
from importlib_metadata import Distribution, EntryPoint

from eventloop.errors import EventloopError, PluginError, text_of
from eventloop.fixes import pip
from eventloop.naming import fold
from eventloop.plugin.records import EXTENSIONS, GROUPS, Found, Role, Unread

if TYPE_CHECKING:
    from eventloop.config.plugin_flags import Local
    from eventloop.plugin.records import Plugin

# Neither pattern backtracks on a long line: the text after the name is parsed without a pattern.
_NEEDS = re.compile(
    r"^Requires-Dist:[ \t]*torch[-_.]eventloop(?![-\w.])(.*)$", re.MULTILINE | re.IGNORECASE
)
_FIELD = re.compile(r"^(Name|Version|Summary):(.*)$", re.MULTILINE | re.IGNORECASE)
# pip renames what it uninstalls, ~ventloop_ema-0.1.0.dist-info, and may fail to delete it.
_LEFTOVER = "~"
# The readable entry points, and a problem for each distribution with unreadable ones.
Installed = tuple[list[EntryPoint], list[EventloopError]]


def installed_entry_points() -> Installed:
    """Returns the installed entry points in eventloop's groups.

    Returns:
        The readable entry points, and one problem per unreadable distribution.
    """
    points: list[EntryPoint] = []
    problems: list[EventloopError] = []
    seen_names: set[object] = set()
    for distribution in importlib_metadata.distributions():
        if Path(folder_of(distribution)).name.startswith(_LEFTOVER):
            continue
        key = getattr(distribution, "_normalized_name", None) or distribution
        if key in seen_names:  # hidden by a distribution of this name earlier on the path
            continue
        seen_names.add(key)
        try:
            if "eventloop." in (text := _text(distribution, "entry_points.txt") or ""):
                if text.startswith("\ufeff"):
                    raise ValueError("the file begins with a byte order mark")
                points += distribution.entry_points
        except Exception as error:  # noqa: BLE001 - a file may hold anything
            name, version = name_and_version(distribution)
            problems.append(_unreadable(distribution, name, version, error))
    return points, problems


def name_and_version(distribution: Distribution) -> tuple[str, str]:
    """Reads a distribution's name and version.

    Returns:
        Name and version; "" for a missing field, as after an interrupted installation.
    """
    fields = _fields(distribution)
    return fields.get("name", ""), fields.get("version", "")


def summary_of(distribution: Distribution) -> str:
    """Returns a distribution's summary, or "" if it has none."""
    return _fields(distribution).get("summary", "")


def _fields(distribution: Distribution) -> dict[str, str]:
    """Reads `name`, `version` and `summary`, and the required versions of eventloop as `needs`.

    Parsing all fields would import Python's email package, which takes 11 ms.
    """
    text = _read(distribution, "METADATA") or _read(distribution, "PKG-INFO")
    text = text or _read(distribution, "")  # the egg-info is a file instead of a folder
    header = (text or "").partition("\n\n")[0]
    pairs = [(match[1].lower(), match[2].strip()) for match in _FIELD.finditer(header)]
    # Reversed, so that the first value of a repeated field is used.
    fields = {name: value for name, value in reversed(pairs) if value}
    needs = (_versions(match[1]) for match in _NEEDS.finditer(header) if ";" not in match[1])
    return {**fields, "needs": next(needs, "")}


def _versions(text: str) -> str:
    """Returns the version range after a requirement's name: `>=0.1` in `[extra] (>=0.1)`."""
    text = text.partition("]")[2] if text.startswith("[") else text
    return text.strip().removeprefix("(").removesuffix(")").strip()


def canonical(name: str) -> str:
    """Returns a distribution's normalised name: eventloop-ema for `Eventloop_EMA`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def folder_of(distribution: Distribution) -> str:
    """Returns the folder of a distribution's metadata, or the parent folder if that isn't known."""
    return str(getattr(distribution, "_path", None) or distribution.locate_file(""))


def marks(distribution: Distribution) -> Iterator[str]:
    """Yields "dependency", "user site" or "PYTHONPATH" if a distribution was installed that way."""
    if _read(distribution, "REQUESTED") is None and _keeps_requests(distribution):
        yield "dependency"
    location = _real(str(distribution.locate_file("")))
    if site.ENABLE_USER_SITE and location == _real(site.getusersitepackages()):
        yield "user site"
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if location in map(_real, paths):
        yield "PYTHONPATH"


def _read(distribution: Distribution, name: str) -> str | None:
    """Returns a metadata file's text; None if it doesn't exist, and "" if it can't be read."""
    try:
        return _text(distribution, name)
    except (OSError, UnicodeDecodeError):
        return ""


def _text(distribution: Distribution, name: str) -> str | None:
    """Returns a metadata file's text, or None if it doesn't exist.

    Raises:
        OSError: the file can't be read, or is a pipe or a device, which reading could block on.
    """
    path = Path(folder_of(distribution), name)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(f"{name} is a pipe or a device, not a file")
    return distribution.read_text(name)


@functools.lru_cache(maxsize=256)
def _real(path: str) -> str:
    return os.path.realpath(path)  # Path.resolve takes three times as long


def _keeps_requests(distribution: Distribution) -> bool:
    """Returns whether the installer writes a file REQUESTED, as pip and uv do."""
    if _read(distribution, "METADATA") is None:
        return False  # an egg-info, which never has that file
    installer = (_read(distribution, "INSTALLER") or "pip").strip()
    return installer in ("pip", "uv")


def _unreadable(
    distribution: Distribution, name: str, version: str, error: Exception
) -> EventloopError:
    folder = folder_of(distribution)
    subject = f"{name} {version}".strip() or Path(folder).name
    return PluginError(
        f"{subject} has entry points that can't be read: {type(error).__name__}: {text_of(error)}",
        subjects=[Unread(name or Path(folder).name)],
        folder=folder,
        fix=f"{pip('install --force-reinstall', name)}, or {pip('uninstall', name)}"
        if name
        else "delete its folder",
    )


def discover(
    local: Iterable[Local] = (), installed: Installed | None = None
) -> tuple[tuple[Found, ...], list[EventloopError]]:
    """Finds installed and local plugins without importing them.

    Args:
        local: files and modules of plugins; their source is read but not run.
        installed: the result of `installed_entry_points`, if it was called already.

    Returns:
        The plugins, sorted so that the order of the file system doesn't matter; and a problem for
        each unreadable file and distribution.
    """
    points, unreadable = installed or installed_entry_points()
    problems = [*unreadable]
    plugins = [_found(point, GROUPS[point.group]) for point in points if point.group in GROUPS]
    for local_plugin in local:
        from eventloop.plugin.local_plugins import found_local  # reads sources: most runs needn't

        try:
            plugins.append(found_local(local_plugin))
        except EventloopError as error:
            problems.append(error)
    return tuple(sorted(plugins, key=_key)), problems


def extensions(*groups: str, installed: Installed | None = None) -> tuple[Found, ...]:
    """Returns the extensions of packages, from metadata, sorted by name.

    Args:
        groups: entry-point groups such as `eventloop.commands`; by default all of `EXTENSIONS`.
        installed: the result of `installed_entry_points`, if it was called already.
    """
    points, _ = installed or installed_entry_points()
    wanted_groups = groups or tuple(EXTENSIONS)
    plugins = [
        _found(point, EXTENSIONS[point.group]) for point in points if point.group in wanted_groups
    ]
    return tuple(sorted(plugins, key=_key))


def _found(point: EntryPoint, role: Role) -> Found:
    if point.dist is None:
        return Found(point.name, role, point, "", "")
    fields = _fields(point.dist)
    name = fields.get("name", "")
    version = fields.get("version", "")
    if not (name and version):  # name_problems reports it
        return Found(point.name, role, point, "", "")
    needs = fields.get("needs", "")
    return Found(point.name, role, point, name, version, tuple(marks(point.dist)), needs=needs)


def _key(plugin: Found) -> tuple[str, ...]:
    return (
        fold(plugin.name),
        plugin.name,
        plugin.role,
        plugin.distribution,
        plugin.version,
        plugin.entry_point.value,
    )


def shadowed(plugins: Iterable[Plugin]) -> Iterator[PluginError]:
    """Finds active plugins whose distribution is installed in more than one version.

    The metadata of one version and the code of another could be used then. It happens after an
    incomplete removal, or with a folder on PYTHONPATH.
    """
    active: dict[str, list[Plugin]] = {}
    for plugin in plugins:
        if plugin.stage != "off" and plugin.distribution:
            active.setdefault(plugin.distribution, []).append(plugin)
    repeated = _repeated() if active else ()
    for distribution, group in active.items():
        if canonical(distribution) not in repeated:
            continue
        distributions = importlib_metadata.distributions(name=distribution)
        folders = {
            name_and_version(installed_version)[1] or "none": str(installed_version.locate_file(""))
            for installed_version in reversed([*distributions])
        }
        if len(folders) > 1:
            listed = [f"{version} in {folder}" for version, folder in reversed(folders.items())]
            yield PluginError(
                f"{distribution} is installed in {len(folders)} versions, of which one hides the "
                f"others: {', '.join(listed)}",
                subjects=group,
                plugin=", ".join(plugin.origin for plugin in group),
                fix=f"{pip('uninstall', distribution)} until none is left, and install it once",
            )


def _repeated() -> set[str]:
    """Returns the distributions that are installed more than once; reads no metadata."""
    names: list[str] = []
    for folder in dict.fromkeys(os.path.realpath(path) for path in sys.path):
        try:
            entry_names = [path.name for path in Path(folder).iterdir()]
        except OSError:  # it doesn't exist, or is a zip file
            continue
        infos = (name for name in entry_names if name.endswith((".dist-info", ".egg-info")))
        names += [canonical(info.rpartition(".")[0].partition("-")[0]) for info in infos]
    return {name for name, count in Counter(names).items() if count > 1}
