"""Metadata: what installers leave beside a package, read as far as it can be."""

from __future__ import annotations

import functools
import os
import re
import site
from collections.abc import Iterator
from pathlib import Path

import importlib_metadata
from importlib_metadata import Distribution, EntryPoint

from eventloop.errors import EventloopError, PluginError
from eventloop.shell import pip

_FIELD = re.compile(r"^(Name|Version|Summary):[ \t]*(\S.*?)[ \t]*$", re.MULTILINE | re.IGNORECASE)
# Entry points that can be read, and a problem for each distribution whose can't.
Installed = tuple[list[EntryPoint], list[EventloopError]]


def installed_entry_points() -> Installed:
    """Gives the entry points of everything that is installed.

    Returns:
        Those that can be read, and a problem for each distribution whose can't.
    """
    try:
        return list(importlib_metadata.entry_points()), []
    except Exception:  # noqa: BLE001 - a file may hold anything; now each is read by itself
        points: dict[object, list[EntryPoint]] = {}
        problems: list[EventloopError] = []
        for distribution in importlib_metadata.distributions():
            name, version = name_and_version(distribution)
            key = canonical(name) or distribution
            if key in points:  # another of its name comes before it, and hides it
                continue
            points[key] = []
            try:
                points[key] = list(distribution.entry_points)
            except Exception as error:  # noqa: BLE001
                problems.append(_unreadable(distribution, name, version, error))
        return [point for own in points.values() for point in own], problems


def name_and_version(distribution: Distribution) -> tuple[str, str]:
    """Reads a distribution's name and version.

    Returns:
        Both; "" for what isn't there, as an interrupted installation leaves it.
    """
    fields = _fields(distribution)
    return fields.get("name", ""), fields.get("version", "")


def summary(distribution: Distribution) -> str:
    """Reads the one line that a distribution says of itself; "" where it has none."""
    return _fields(distribution).get("summary", "")


def _fields(distribution: Distribution) -> dict[str, str]:
    """Reads three fields; to have all of them parsed imports Python's email package, in 11 ms."""
    text = _read(distribution, "METADATA") or _read(distribution, "PKG-INFO")
    text = text or _read(distribution, "")  # an egg-info that is a file, no folder
    header = (text or "").partition("\n\n")[0]
    return {match[1].lower(): match[2] for match in reversed([*_FIELD.finditer(header)])}


def canonical(name: str) -> str:
    """Gives a distribution's name as it is compared: `Eventloop_EMA` is eventloop-ema."""
    return re.sub(r"[-_.]+", "-", name).lower()


def place_of(distribution: Distribution) -> str:
    """Gives the folder of a distribution's metadata, or where that stands if it can't be told."""
    return str(getattr(distribution, "_path", None) or distribution.locate_file(""))


def marks(distribution: Distribution) -> Iterator[str]:
    """Tells how a distribution came in, where that is worth a look."""
    if _read(distribution, "REQUESTED") is None and _keeps_requests(distribution):
        yield "dependency"
    location = _real(str(distribution.locate_file("")))
    if site.ENABLE_USER_SITE and location == _real(site.getusersitepackages()):
        yield "user site"
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if location in map(_real, paths):
        yield "PYTHONPATH"


def _read(distribution: Distribution, name: str) -> str | None:
    """Reads a file; gives None where there is none, and "" where it can't be read."""
    try:
        return distribution.read_text(name)
    except (OSError, UnicodeDecodeError):
        return ""


@functools.lru_cache(maxsize=256)
def _real(path: str) -> str:
    return os.path.realpath(path)  # Path.resolve does the same at thrice the time


def _keeps_requests(distribution: Distribution) -> bool:
    """Tells whether the installer notes in a file REQUESTED what it was asked for, as pip does."""
    if _read(distribution, "METADATA") is None:
        return False  # no dist-info; an egg-info knows no such file
    installer = (_read(distribution, "INSTALLER") or "pip").strip()
    return installer in ("pip", "uv")


def _unreadable(
    distribution: Distribution, name: str, version: str, error: Exception
) -> EventloopError:
    place = place_of(distribution)
    who = f"{name} {version}".strip() or Path(place).name
    return PluginError(
        f"{who} has entry points that can't be read: {type(error).__name__}: {error}",
        folder=place,
        fix=f"{pip('install --force-reinstall', name)}, or {pip('uninstall', name)}"
        if name
        else "delete what is left of it",
    )
