"""Permissions of written files: some libraries create files that only their owner can read."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from eventloop.files import disk


def apply_umask(path: str | Path) -> None:
    """Sets the permissions of a file, or of all files in a folder, to those a new file there would get.

    Executable files stay executable. Links, anything that isn't a regular file, and files that the
    user can't change are left as they are.
    """
    path = Path(path)
    if path.is_symlink():
        return
    if not path.is_dir():
        _apply(path, _new_file_mode(path.parent))
        return
    mode = _new_file_mode(path)
    for folder, _, names in os.walk(path):
        for name in names:
            _apply(Path(folder, name), mode)


def _apply(path: Path, mode: int | None) -> None:
    with suppress(OSError):
        status = path.lstat()
        if mode is not None and stat.S_ISREG(status.st_mode):
            executable_bits = status.st_mode & 0o111
            path.chmod(mode | executable_bits)


def _new_file_mode(folder: Path) -> int | None:
    """Returns the permissions of a new file in a folder; None if no file can be created there.

    It creates a file and looks: reading the umask means setting it, `os.umask`, which would change
    the permissions of files that other threads create at that moment.
    """
    probe = folder / f".{os.urandom(8).hex()}.new"
    try:
        descriptor = disk.create(probe)
    except OSError:
        return None
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)
        disk.remove_file(probe)
