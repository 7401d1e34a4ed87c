"""Step 1, discover: reads the metadata of installed packages, as far as possible."""

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

# Neither goes back and forth in a long line: what follows is taken apart without a pattern.
_NEEDS = re.compile(
    r"^Requires-Dist:[ \t]*torch[-_.]eventloop(?![-\w.])(.*)$", re.MULTILINE | re.IGNORECASE
)
_FIELD = re.compile(r"^(Name|Version|Summary):(.*)$", re.MULTILINE | re.IGNORECASE)
# pip renames what it uninstalls, ~ventloop_ema-0.1.0.dist-info, and may fail to delete it.
_LEFTOVER = "~"
# Entry points that can be read, and a problem for each distribution whose can't.
Installed = tuple[list[EntryPoint], list[EventloopError]]


def installed_entry_points() -> Installed:
    """Returns the installed entry points in eventloop's groups.

    Returns:
        The readable entry points, and one problem per unreadable distribution.
    """
    points: list[EntryPoint] = []
    problems: list[EventloopError] = []
    seen: set[object] = set()
    for distribution in importlib_metadata.distributions():
        if Path(folder_of(distribution)).name.startswith(_LEFTOVER):
            continue
        key = getattr(distribution, "_normalized_name", None) or distribution
        if key in seen:  # another of its name comes before it, and hides it
            continue
        seen.add(key)
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
        Both; "" for a missing field, as after an interrupted installation.
    """
    fields = _fields(distribution)
    return fields.get("name", ""), fields.get("version", "")


def summary_of(distribution: Distribution) -> str:
    """Reads a distribution's summary; "" without one."""
    return _fields(distribution).get("summary", "")


def _fields(distribution: Distribution) -> dict[str, str]:
    """Reads three fields, and the required versions of eventloop as `needs`.

    Parsing all fields would import Python's email package, which takes 11 ms.
    """
    text = _read(distribution, "METADATA") or _read(distribution, "PKG-INFO")
    text = text or _read(distribution, "")  # an egg-info that is a file, no folder
    header = (text or "").partition("\n\n")[0]
    found = [(match[1].lower(), match[2].strip()) for match in _FIELD.finditer(header)]
    fields = {name: value for name, value in reversed(found) if value}
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
    """Returns the folder of a distribution's metadata, or its parent if that isn't known."""
    return str(getattr(distribution, "_path", None) or distribution.locate_file(""))


def marks(distribution: Distribution) -> Iterator[str]:
    """Returns how a distribution was installed, if that is unusual."""
    if _read(distribution, "REQUESTED") is None and _keeps_requests(distribution):
        yield "dependency"
    location = _real(str(distribution.locate_file("")))
    if site.ENABLE_USER_SITE and location == _real(site.getusersitepackages()):
        yield "user site"
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if location in map(_real, paths):
        yield "PYTHONPATH"


def _read(distribution: Distribution, name: str) -> str | None:
    """Reads a file; returns None if it doesn't exist, and "" if it can't be read."""
    try:
        return _text(distribution, name)
    except (OSError, UnicodeDecodeError):
        return ""


def _text(distribution: Distribution, name: str) -> str | None:
    """Returns a file's text, None if there is no file; raises OSError where reading might block."""
    path = Path(folder_of(distribution), name)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(f"{name} is a pipe or a device, not a file")
    return distribution.read_text(name)


@functools.lru_cache(maxsize=256)
def _real(path: str) -> str:
    return os.path.realpath(path)  # Path.resolve does the same at thrice the time


def _keeps_requests(distribution: Distribution) -> bool:
    """Returns whether the installer writes a file REQUESTED, as pip does."""
    if _read(distribution, "METADATA") is None:
        return False  # no dist-info; an egg-info knows no such file
    installer = (_read(distribution, "INSTALLER") or "pip").strip()
    return installer in ("pip", "uv")


def _unreadable(
    distribution: Distribution, name: str, version: str, error: Exception
) -> EventloopError:
    folder = folder_of(distribution)
    who = f"{name} {version}".strip() or Path(folder).name
    return PluginError(
        f"{who} has entry points that can't be read: {type(error).__name__}: {text_of(error)}",
        subjects=[Unread(name or Path(folder).name)],
        folder=folder,
        fix=f"{pip('install --force-reinstall', name)}, or {pip('uninstall', name)}"
        if name
        else "delete what is left of it",
    )


def discover(
    local: Iterable[Local] = (), installed: Installed | None = None
) -> tuple[tuple[Found, ...], list[EventloopError]]:
    """Finds installed and local plugins, as far as they can be read; imports none of them.

    Args:
        local: files and modules; read, not run.
        installed: the result of `installed_entry_points`, if it was called already.

    Returns:
        The plugins, sorted, so that the order of the file system doesn't matter; and a problem for
        each unreadable file and distribution.
    """
    points, unreadable = installed or installed_entry_points()
    problems = [*unreadable]
    found = [_found(point, GROUPS[point.group]) for point in points if point.group in GROUPS]
    for named in local:
        from eventloop.plugin.local_plugins import found_local  # reads sources: most runs needn't

        try:
            found.append(found_local(named))
        except EventloopError as error:
            problems.append(error)
    return tuple(sorted(found, key=_key)), problems


def extensions(*groups: str, installed: Installed | None = None) -> tuple[Found, ...]:
    """Returns the extensions of packages, from metadata, sorted by name.

    Args:
        groups: entry-point groups such as `eventloop.commands`; by default all of `EXTENSIONS`.
        installed: the result of `installed_entry_points`, if it was called already.
    """
    points, _ = installed or installed_entry_points()
    wanted = groups or tuple(EXTENSIONS)
    found = [_found(point, EXTENSIONS[point.group]) for point in points if point.group in wanted]
    return tuple(sorted(found, key=_key))


def _found(point: EntryPoint, role: Role) -> Found:
    if point.dist is None:
        return Found(point.name, role, point, "", "")
    fields = _fields(point.dist)
    name = fields.get("name", "")
    version = fields.get("version", "")
    if not (name and version):  # is told of by name_problems
        return Found(point.name, role, point, "", "")
    needs = fields.get("needs", "")
    return Found(point.name, role, point, name, version, tuple(marks(point.dist)), needs=needs)


def _key(found: Found) -> tuple[str, ...]:
    return (
        fold(found.name),
        found.name,
        found.role,
        found.distribution,
        found.version,
        found.entry_point.value,
    )


def shadowed(plugins: Iterable[Plugin]) -> Iterator[PluginError]:
    """Finds active plugins whose distribution is installed in more than one version.

    The metadata of one and the code of another may be used: after an incomplete removal, or with a
    folder on PYTHONPATH.
    """
    active: dict[str, list[Plugin]] = {}
    for plugin in plugins:
        if plugin.stage != "off" and plugin.distribution:
            active.setdefault(plugin.distribution, []).append(plugin)
    repeated = _repeated() if active else ()
    for distribution, group in active.items():
        if canonical(distribution) not in repeated:
            continue
        there = importlib_metadata.distributions(name=distribution)
        folders = {
            name_and_version(one)[1] or "none": str(one.locate_file(""))
            for one in reversed([*there])
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
    for folder in dict.fromkeys(os.path.realpath(one) for one in sys.path):
        try:
            entries = [one.name for one in Path(folder).iterdir()]
        except OSError:  # no folder
            continue
        infos = (one for one in entries if one.endswith((".dist-info", ".egg-info")))
        names += [canonical(one.rpartition(".")[0].partition("-")[0]) for one in infos]
    return {name for name, count in Counter(names).items() if count > 1}
