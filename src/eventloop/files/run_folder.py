"""A run's folder: its name, and its files, which are opened safely even if it isn't trusted.

A folder that comes from an archive, or that other users can write to, can contain a link where a run
expects a file: writing through it would change a file elsewhere, and opening a pipe would block
forever. The core and plugins open all files in a run's folder through this module.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shlex
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eventloop.errors import RunFolderError
from eventloop.files import disk
from eventloop.files.disk import CorruptFileError
from eventloop.fixes import as_set

if TYPE_CHECKING:
    from eventloop.urls import Url

# Without `dir_fd`, as on Windows, files are opened by path after their folder was checked: a folder
# that is swapped for a link in between isn't noticed.
_HAS_DIR_FD = {os.open, os.stat, os.mkdir, os.unlink, os.rename} <= os.supports_dir_fd
_UNSAFE_CHARS = re.compile(r"[^A-Za-z0-9_.-]+")
_JUNCTION = 0xA0000003  # `stat.IO_REPARSE_TAG_MOUNT_POINT`, which only Windows has
_SPECIAL_FILES = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}


def append_whole(descriptor: int, data: bytes) -> None:
    """Appends all of the data to a file; if writing fails, restores the file's previous size.

    Args:
        descriptor: of a file opened by `RunFolder.append_to`.

    Raises:
        OSError: the disk is full or fails, or the file was deleted after it was opened.
    """
    status = os.fstat(descriptor)
    # Without links the file has no name any more: the data would be lost when it is closed.
    if not status.st_nlink and stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "it was deleted while the run wrote into it")
    try:
        disk.write(descriptor, memoryview(data))
    except OSError:
        if status.st_size < os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, status.st_size)
        raise


class RunFolder:
    """Opens the files of a run's folder by name: only regular files, following no links.

    A name is relative to the run's folder and can contain folders: `plots/loss.png`. The run's folder
    and its parents are chosen by the user and may be links; nothing below the run's folder may be.

    The type of a file is checked before and after opening it. A file that is changed in place must
    have a single name: with hard links, the file would change under its other names, too.

    Args:
        path: the run's folder, `state.run_dir`; created with the first file.

    Raises:
        RunFolderError: by every method, if a name refers to a link or anything but a regular file.
        OSError: by every method, if the disk fails or permissions are missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self, name: str, max_bytes: int) -> bytes:
        """Returns the first `max_bytes` bytes of a file, or all of a shorter file."""
        with self._parent_of(name) as (parent, base_name):
            descriptor = parent.open(base_name, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(max_bytes)

    def write(self, name: str, data: bytes) -> None:
        """Writes a file atomically."""
        with self._parent_of(name, make=True) as (parent, base_name):
            parent.check(base_name)
            parent.check(disk.name_under_way(base_name))
            disk.replace_file(parent.named(base_name), data, parent.descriptor)

    def append_to(self, name: str) -> int:
        """Opens a file to read and append, created if missing; the caller closes the descriptor."""
        with self._parent_of(name, make=True) as (parent, base_name):
            return parent.open(base_name, os.O_RDWR | os.O_APPEND | os.O_CREAT, in_place=True)

    def create(self, name: str) -> int:
        """Creates a file for writing, or raises FileExistsError; the caller closes the descriptor."""
        with self._parent_of(name, make=True) as (parent, base_name):
            return disk.create(parent.named(base_name), parent.descriptor)

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """Yields a temporary path for a library that opens files itself, and renames the file afterwards.

        The path is in a folder that was checked, and its name can't be guessed: no other user can
        place a link there before the library opens it.
        """
        with self._parent_of(name, make=True) as (parent, base_name):
            parent.check(base_name)
            temporary = f".{os.urandom(8).hex()}-{base_name}"
            try:
                yield parent.path / temporary
                # Opening checks that the library has left a regular file there.
                os.close(parent.open(temporary, os.O_RDONLY))
                disk.replace(parent.named(temporary), parent.named(base_name), parent.descriptor)
            finally:
                with suppress(FileNotFoundError):
                    disk.remove_file(parent.named(temporary), parent.descriptor)

    def remove(self, name: str) -> None:
        """Removes a file or a link, not the link's target; does nothing if it doesn't exist."""
        with suppress(FileNotFoundError), self._parent_of(name) as (parent, base_name):
            disk.remove_file(parent.named(base_name), parent.descriptor)

    def names(self, folder: str = "") -> list[str]:
        """Returns the sorted names in the run's folder, or in a folder below it; [] if it doesn't exist."""
        folders = folder.split("/") if folder else []
        with suppress(FileNotFoundError), self._opened(folders) as opened:
            # By its descriptor, as the path could by now lead to another folder.
            listed = opened.path if opened.descriptor is None else opened.descriptor
            with os.scandir(listed) as entries:
                return sorted(entry.name for entry in entries)
        return []

    def check(self, name: str, *, in_place: bool = False) -> None:
        """Makes the checks of the other methods early, before there is data to write.

        Args:
            in_place: whether the file will be changed, rather than read or replaced.
        """
        with suppress(FileNotFoundError), self._parent_of(name) as (parent, base_name):
            parent.check(base_name, in_place=in_place)

    @contextmanager
    def _parent_of(self, name: str, *, make: bool = False) -> Iterator[tuple[_OpenFolder, str]]:
        """Opens the folder that contains a file; yields the folder and the file's base name."""
        *folders, base_name = name.split("/")
        with self._opened(folders, make=make) as parent:
            yield parent, _checked_name(base_name)

    @contextmanager
    def _opened(self, folders: Sequence[str], *, make: bool = False) -> Iterator[_OpenFolder]:
        """Opens the run's folder, then each folder of a path below it; yields the innermost."""
        if make:
            disk.make_folders(self.path)
        opened = _OpenFolder(self.path, disk.open_folder(self.path) if _HAS_DIR_FD else None)
        try:
            for folder in folders:
                opened = opened.enter(_checked_name(folder), make=make)
            yield opened
        finally:
            opened.close()


class _OpenFolder(NamedTuple):
    """A folder, with its open descriptor; None where the system can't open files relative to one."""

    path: Path
    descriptor: int | None

    def named(self, name: str) -> str:
        """Returns the name to pass to functions of `os` together with `dir_fd`."""
        return str(self.path / name) if self.descriptor is None else name

    def enter(self, name: str, *, make: bool) -> _OpenFolder:
        """Opens a subfolder and closes this folder; if that raises, this folder stays open."""
        if make:
            with suppress(FileExistsError):
                disk.make_folder(self.named(name), self.descriptor)
        status = os.stat(self.named(name), dir_fd=self.descriptor, follow_symlinks=False)
        if _is_link(status) or not stat.S_ISDIR(status.st_mode):
            raise self._refused(name, status, "folder")
        descriptor = None
        if self.descriptor is not None:
            descriptor = disk.open_folder(name, self.descriptor)
        self.close()
        return _OpenFolder(self.path / name, descriptor)

    def open(self, name: str, flags: int, *, in_place: bool = False) -> int:
        """Opens a regular file in this folder."""
        checked_status = self.check(name, in_place=in_place)
        descriptor = os.open(self.named(name), flags | disk.CAREFUL, 0o666, dir_fd=self.descriptor)
        try:
            status = os.fstat(descriptor)
            self._require_file(name, status, in_place)
            # Without O_NOFOLLOW the file may have been swapped for a link since it was checked.
            if (
                checked_status is not None
                and not disk.NO_FOLLOW
                and not os.path.samestat(checked_status, status)
            ):
                raise self._refused(name, checked_status, "file")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def check(self, name: str, *, in_place: bool = False) -> os.stat_result | None:
        """Returns the status of a file, None if it doesn't exist; raises RunFolderError if it isn't regular.

        It doesn't open the file, as opening a device can have side effects.
        """
        try:
            status = os.stat(self.named(name), dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        self._require_file(name, status, in_place)
        return status

    def close(self) -> None:
        """Closes the folder."""
        if self.descriptor is not None:
            os.close(self.descriptor)

    def _require_file(self, name: str, status: os.stat_result, in_place: bool) -> None:
        if _is_link(status) or not stat.S_ISREG(status.st_mode):
            raise self._refused(name, status, "file")
        if in_place and status.st_nlink > 1:
            path = shlex.quote(str(self.path / name))
            raise RunFolderError(
                f"{str(self.path / name)!r} has {status.st_nlink} names (hard links), and appending "
                "would change the file under all of them",
                fix=f"replace it by a copy, `cp {path} {path}.copy && mv {path}.copy {path}`, "
                "or use another folder, " + as_set(run_dir="FOLDER"),
            )

    def _refused(self, name: str, status: os.stat_result, expected: str) -> RunFolderError:
        actual = _SPECIAL_FILES.get(stat.S_IFMT(status.st_mode), "a device")
        if _is_link(status):
            actual = "a link to somewhere else"
        elif stat.S_ISREG(status.st_mode):
            actual = "a file"
        path = self.path / name
        return RunFolderError(
            f"{str(path)!r} is {actual}, but the run needs a {expected} of its own there",
            fix=f"move it away, `mv {shlex.quote(str(path))} {shlex.quote(f'{path}.old')}`, or use "
            "another folder, " + as_set(run_dir="FOLDER"),
        )


def read_json(run_dir: Path, name: str) -> dict[str, Any]:
    """Reads a JSON object from a file in a run's folder; {} if it can't be read or isn't an object."""
    try:
        content = disk.from_json(RunFolder(run_dir).read(name, disk.MAX_JSON_BYTES + 1))
        # Writing indented JSON takes more stack than reading it: what can't be written later, within
        # another object, isn't accepted now.
        json.dumps([[[content]]], indent=2)
    except (OSError, CorruptFileError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def check_folder(path: Path) -> None:
    """Raises RunFolderError if a path below a run's folder is a link, or not a folder."""
    with suppress(FileNotFoundError):
        _OpenFolder(path.parent, None).enter(path.name, make=False)


def _checked_name(name: str) -> str:
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"{name!r} can't be part of a file name in a run's folder")
    return name


def _is_link(status: os.stat_result) -> bool:
    """Whether this is the status of a symbolic link, or of a junction on Windows."""
    return stat.S_ISLNK(status.st_mode) or getattr(status, "st_reparse_tag", 0) == _JUNCTION


def why_no_folder(path: Path) -> str:
    """Returns why files can't be written into a folder, which needn't exist; "" if they can.

    It creates nothing.
    """
    path = path.absolute()
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # a path that is too long, or has a null byte
        return getattr(error, "strerror", None) or str(error)
    existing_path = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not existing_path.is_dir():
        return f"{existing_path} is not a folder"
    if not os.access(existing_path, os.W_OK | os.X_OK):
        return f"no permission to write in {existing_path}"
    return ""


def why_no_file(path: str | Path) -> str:
    """Returns why a file can't be written at a path; "" if it can. It creates nothing."""
    path = Path(path)
    if path.is_dir():
        return "it is a folder"
    if path.exists() and not os.access(path, os.W_OK):
        return "no permission to overwrite it"
    return why_no_folder(path.parent)


def new_run_dir(task_name: str) -> Path:
    """Returns the unique path of a new run folder: `runs/digits/20260131-120000-3fa9`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs", task_name, f"{stamp}-{os.urandom(2).hex()}")


def local_folder(url: Url) -> Path:
    """Returns the local folder for a run at a URL, such as `runs/s3/charlm-3fa9c2d1`.

    It depends only on the URL, so that a resumed run finds its local files again.
    """
    digest = hashlib.sha256(str(url).encode()).hexdigest()[:8]
    name = _UNSAFE_CHARS.sub("-", url.name).strip("-.")[:60] or "run"
    return Path("runs", url.protocol, f"{name}-{digest}")
