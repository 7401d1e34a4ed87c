"""File system operations for checkpoints: the few that change files, and safe reads, including JSON.

Checkpoints change the disk only through `make_folder`, `create`, `write`, `sync`, `sync_folder`,
`rename`, `replace`, `remove_file` and `remove_empty`: a test that kills a save between any two
operations replaces only these functions.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any, NoReturn, Self

CHUNK_BYTES = 4 * 2**20  # digested while it is still in the processor's cache
MAX_JSON_BYTES = 32 * 2**20
# An item takes up to about 200 bytes as a Python object: MAX_JSON_BYTES alone would allow a gigabyte.
MAX_JSON_ITEMS = 300_000
# O_NONBLOCK keeps `open` from waiting for the other end of a pipe. Windows has neither flag, and no
# files whose opening blocks.
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
CAREFUL: int = NO_FOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)

# Operations that change the file system. They don't handle OSError. With `dir_fd`, the descriptor of
# an open folder, paths are relative to that folder.


def make_folder(path: Path | str, dir_fd: int | None = None) -> None:
    """Creates a folder; raises FileExistsError if it exists."""
    os.mkdir(path, dir_fd=dir_fd)


def create(path: Path | str, dir_fd: int | None = None) -> int:
    """Creates a file and returns its descriptor; raises FileExistsError if it exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | CAREFUL
    return os.open(path, flags, 0o666, dir_fd=dir_fd)


def write(descriptor: int, data: memoryview) -> None:
    """Writes all of the data."""
    while data:  # `os.write` may write only the beginning, such as when the disk is almost full
        num_written = os.write(descriptor, data)
        data = data[num_written:]


def sync(descriptor: int) -> None:
    """Syncs a file to disk."""
    os.fsync(descriptor)


def sync_folder(path: Path | str, dir_fd: int | None = None) -> None:
    """Syncs a folder's entries to disk, if the system supports it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Renames a folder atomically to an unused name."""
    source.rename(target)


def replace(source: Path | str, target: Path | str, dir_fd: int | None = None) -> None:
    """Renames a file atomically, replacing an existing file of the new name."""
    os.replace(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def remove_file(path: Path | str, dir_fd: int | None = None) -> None:
    """Removes a file or a link, not the link's target."""
    os.unlink(path, dir_fd=dir_fd)


def remove_empty(path: Path) -> None:
    """Removes an empty folder."""
    path.rmdir()


# Operations built from the ones above, and reads


def open_folder(path: Path | str, dir_fd: int | None = None) -> int:
    """Opens a folder and returns its descriptor; with `dir_fd`, follows no link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if dir_fd is not None:
        flags |= NO_FOLLOW
    return os.open(path, flags, dir_fd=dir_fd)


def name_under_way(name: str) -> str:
    """Returns the temporary name under which `replace_file` writes a file."""
    return f".{name}.new"


def replace_file(path: Path | str, data: bytes, dir_fd: int | None = None) -> None:
    """Writes a file, atomically replacing an existing file; follows no link."""
    path = Path(path)
    temporary = path.with_name(name_under_way(path.name))
    with contextlib.suppress(FileNotFoundError):
        remove_file(temporary, dir_fd)  # left behind by a process that was killed
    with NewFile(temporary, dir_fd) as file:
        file.write(data)
    replace(temporary, path, dir_fd)
    sync_folder(path.parent, dir_fd)


def make_folders(path: Path) -> None:
    """Creates a folder and its missing parents, and syncs them to disk."""
    if path.is_dir():
        return
    make_folders(path.parent)
    with contextlib.suppress(FileExistsError):  # another process created it first
        make_folder(path)
    sync_folder(path.parent)


def remove_tree(path: Path) -> None:
    """Removes a folder and its contents; follows no links."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        remove_file(path)
        return
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):  # not ours: a checkpoint has no subfolders
            shutil.rmtree(entry.path)
        else:
            remove_file(Path(entry.path))
    remove_empty(path)


class NewFile:
    """A new file, whose bytes are counted and digested; synced when its `with` block ends normally."""

    def __init__(self, path: Path, dir_fd: int | None = None) -> None:
        self.num_bytes = 0
        self._sha256 = hashlib.sha256()
        self._descriptor = create(path, dir_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            if error is None:
                sync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        view = memoryview(data)
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            write(self._descriptor, chunk)
            self._sha256.update(chunk)
            self.num_bytes += len(chunk)

    def digest(self) -> str:
        """Returns the SHA-256 of the bytes written so far, in hexadecimal digits."""
        return self._sha256.hexdigest()


class OldFile:
    """A file that is read once, from beginning to end, and digested while reading.

    It never follows a link, waits for a pipe, or reads beyond the initial size.

    Raises:
        CorruptFileError: the path isn't a readable regular file, or the file ends early.
    """

    def __init__(self, path: Path) -> None:
        self._sha256 = hashlib.sha256()
        try:
            # Checked before opening, too: opening a device can have side effects.
            _check_regular(path.lstat())
            self._descriptor = os.open(path, os.O_RDONLY | CAREFUL)
        except OSError as error:
            raise CorruptFileError(f"it can't be read: {error.strerror}") from error
        try:
            status = os.fstat(self._descriptor)
            _check_regular(status)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.num_bytes = self.num_left = status.st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def fill(self, buffer: memoryview) -> None:
        """Reads bytes to fill the buffer."""
        for start in range(0, len(buffer), CHUNK_BYTES):
            chunk = buffer[start : start + CHUNK_BYTES]
            self._fill(chunk)
            self._sha256.update(chunk)

    def fill_at(self, buffer: memoryview, position: int) -> None:
        """Reads bytes at a position, without adding them to the digest."""
        while buffer:
            try:
                num_read = os.preadv(self._descriptor, [buffer], position)
            except OSError as error:
                raise CorruptFileError(f"it can't be read: {error.strerror}") from error
            if not num_read:
                raise CorruptFileError(f"it ends early, before byte {position:,}")
            position += num_read
            buffer = buffer[num_read:]

    def read(self, num_bytes: int) -> bytes:
        """Reads exactly `num_bytes` bytes; raises CorruptFileError if fewer are left."""
        if num_bytes > self.num_left:
            raise CorruptFileError(
                f"it ends after {self.num_bytes:,} bytes, in the middle of its content"
            )
        buffer = bytearray(num_bytes)
        self.fill(memoryview(buffer))
        return bytes(buffer)

    def read_json(self) -> bytes:
        """Reads the rest of a JSON file; raises CorruptFileError if it exceeds MAX_JSON_BYTES."""
        if self.num_bytes > MAX_JSON_BYTES:
            raise CorruptFileError(f"it has {self.num_bytes:,} bytes")
        return self.read(self.num_left)

    def skip(self) -> None:
        """Reads the rest of the file into the digest, without keeping it."""
        buffer = memoryview(bytearray(min(CHUNK_BYTES, self.num_left)))
        while self.num_left:
            self.fill(buffer[: self.num_left])

    def digest(self) -> str:
        """Returns the SHA-256 of the bytes read so far, in hexadecimal digits."""
        return self._sha256.hexdigest()

    def _fill(self, buffer: memoryview) -> None:
        while buffer:
            try:
                num_read = os.readv(self._descriptor, [buffer])
            except OSError as error:
                raise CorruptFileError(f"it can't be read: {error.strerror}") from error
            if not num_read:
                raise CorruptFileError(f"it ends early, {self.num_left:,} bytes before its end")
            self.num_left -= num_read
            buffer = buffer[num_read:]


def num_bytes_of(path: Path) -> int:
    """Returns the size of a regular file; raises CorruptFileError if the path isn't one."""
    try:
        status = path.lstat()
    except OSError as error:
        raise CorruptFileError(f"it can't be read: {error.strerror}") from error
    _check_regular(status)
    return status.st_size


def num_free_bytes(path: Path) -> int:
    """Returns how many bytes are free for this user on the disk where a folder is, or will be."""
    existing_folder = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    return shutil.disk_usage(existing_folder).free


def require_space(path: Path, num_bytes: int) -> None:
    """Raises OSError (ENOSPC) if fewer than `num_bytes` are free where a folder is, or will be."""
    if num_free_bytes(path) < num_bytes:
        raise OSError(errno.ENOSPC, "there isn't enough space")


def _check_regular(status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise CorruptFileError("it is a link to somewhere else")
    if not stat.S_ISREG(status.st_mode):
        raise CorruptFileError("it is not a regular file")
    # Digesting a sparse file of a terabyte would take an hour. A file system that reports no blocks
    # (0) proves nothing.
    stored = 512 * getattr(status, "st_blocks", 0)
    has_holes = 0 < stored < status.st_size // 1000
    if has_holes and status.st_size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise CorruptFileError(
            f"of its {status.st_size:,} bytes only {stored:,} are stored, the rest are holes"
        )


class CorruptFileError(Exception):
    """A file doesn't match its manifest, or isn't in eventloop's format; the text is the reason.

    `checkpoint_files` turns it into a `CheckpointError`; `store` continues with the next checkpoint.

    Args:
        reason: the fault, without the name of the file.
        fix: advice for the user; "" if the only way out is another checkpoint.
    """

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.fix = fix

    def of(self, name: str) -> CorruptFileError:
        """Returns this error with the name of the file prepended."""
        return CorruptFileError(f"{name}: {self}", self.fix)


def to_json(value: Any, max_items: int = MAX_JSON_ITEMS) -> bytes:
    """Encodes a value as standard JSON in ASCII.

    Raises:
        CorruptFileError: the JSON is larger than `from_json` accepts.
    """
    data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
    _check_json_size(data, max_items)
    return data


def from_json(data: bytes, max_items: int = MAX_JSON_ITEMS, encoding: str = "ascii") -> Any:
    """Decodes JSON; raises CorruptFileError if it is malformed, too large or nested too deeply."""
    _check_json_size(data, max_items)
    try:
        return json.loads(data.decode(encoding), parse_constant=_refuse)
    except RecursionError:
        raise CorruptFileError("its JSON is nested too deeply") from None
    except ValueError as error:  # not ASCII, not JSON, or an int of thousands of digits
        raise CorruptFileError(
            f"it isn't JSON as eventloop writes it ({str(error)[:80]})"
        ) from None


def _check_json_size(data: bytes, max_items: int) -> None:
    # Counts commas and brackets within strings, too: telling them apart would need a parser, and this
    # check must be cheap and come before parsing.
    num_items = data.count(b",") + data.count(b"{") + data.count(b"[")
    limits = ((len(data), MAX_JSON_BYTES, "bytes"), (num_items, max_items, "items"))
    for number, limit, unit in limits:
        if number > limit:
            raise CorruptFileError(
                f"its JSON has {number:,} {unit}, of which {limit:,} are allowed"
            )


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} isn't JSON")
