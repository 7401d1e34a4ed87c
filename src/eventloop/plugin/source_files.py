"""Modules made of a file as it stands: what Python compiled a moment ago isn't taken for it."""

from __future__ import annotations

from importlib.abc import SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path


def spec_of_file(name: str, path: Path) -> ModuleSpec:
    """Gives the spec of a module that is compiled from the source each time.

    Python knows a file by its size and its time in seconds, so that an edit of one digit within a
    second would leave the compiled file of before in its place.

    Args:
        name: of the module.
        path: its file, whatever its suffix.
    """
    spec = spec_from_file_location(name, path, loader=_AsItStands(path))
    assert spec is not None
    return spec


class _AsItStands(SourceLoader):
    """Reads a file, and nothing beside it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        return self._path.read_bytes()
