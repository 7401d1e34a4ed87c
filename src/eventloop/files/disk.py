"""File system operations for checkpoints: the few that change it, and safe reads, of JSON too.

Checkpoints change the disk only through `make_folder`, `create`, `write`, `sync`, `sync_folder`,
`rename`, `replace`, `remove_file` and `remove_empty`: a test that kills a save between any two of
them replaces these and nothing else.
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
# Each takes up to about 200 bytes as Python's objects.
MAX_JSON_ITEMS = 300_000
# Windows has neither, nor files that wait when they are opened.
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
CAREFUL: int = NO_FOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)

# What changes the file system; OSError is the caller's. A name is relative to the folder `at`, a
# descriptor, where that is given.


def make_folder(path: Path | str, at: int | None = None) -> None:
    """Creates a folder; fails if it exists."""
    os.mkdir(path, dir_fd=at)


def create(path: Path | str, at: int | None = None) -> int:
    """Creates a file and returns its descriptor; fails if it exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | CAREFUL
    return os.open(path, flags, 0o666, dir_fd=at)


def write(descriptor: int, data: memoryview) -> None:
    """Writes all of the data."""
    while data:
        data = data[os.write(descriptor, data) :]


def sync(descriptor: int) -> None:
    """Syncs a file to disk."""
    os.fsync(descriptor)


def sync_folder(path: Path | str, at: int | None = None) -> None:
    """Syncs a folder's entries to disk, if the system supports it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
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


def replace(source: Path | str, target: Path | str, at: int | None = None) -> None:
    """Renames a file atomically, replacing another one with the new name."""
    os.replace(source, target, src_dir_fd=at, dst_dir_fd=at)


def remove_file(path: Path | str, at: int | None = None) -> None:
    """Removes a file or a link, not the link's target."""
    os.unlink(path, dir_fd=at)


def remove_empty(path: Path) -> None:
    """Removes an empty folder."""
    path.rmdir()


# Made of these


def open_folder(path: Path | str, at: int | None = None) -> int:
    """Opens a folder and returns its descriptor; with `at`, follows no link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    return os.open(path, flags if at is None else flags | NO_FOLLOW, dir_fd=at)


def name_under_way(name: str) -> str:
    """Returns the name under which `replace_file` writes a file."""
    return f".{name}.new"


def replace_file(path: Path | str, data: bytes, at: int | None = None) -> None:
    """Writes a file and replaces another one atomically; follows no link."""
    path = Path(path)
    new = path.with_name(name_under_way(path.name))
    with contextlib.suppress(FileNotFoundError):
        remove_file(new, at)  # of a process that was killed
    with NewFile(new, at) as file:
        file.write(data)
    replace(new, path, at)
    sync_folder(path.parent, at)


def make_folders(path: Path) -> None:
    """Creates a folder and missing parents, synced to disk."""
    if path.is_dir():
        return
    make_folders(path.parent)
    with contextlib.suppress(FileExistsError):  # another process was faster
        make_folder(path)
    sync_folder(path.parent)


def remove_tree(path: Path) -> None:
    """Removes a folder and its contents; follows no links."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        remove_file(path)
        return
    for entry in sorted(os.scandir(path), key=lambda one: one.name):
        if entry.is_dir(follow_symlinks=False):  # not ours: a checkpoint has none
            shutil.rmtree(entry.path)
        else:
            remove_file(Path(entry.path))
    remove_empty(path)


class NewFile:
    """A file being written: counts and digests its bytes; synced when its `with` block ends."""

    def __init__(self, path: Path, at: int | None = None) -> None:
        self.num_bytes = 0
        self._sha256 = hashlib.sha256()
        self._descriptor = create(path, at)

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
        rest = memoryview(data)
        for start in range(0, len(rest), CHUNK_BYTES):
            chunk = rest[start : start + CHUNK_BYTES]
            write(self._descriptor, chunk)
            self._sha256.update(chunk)
            self.num_bytes += len(chunk)

    def digest(self) -> str:
        """Returns the SHA-256 of all that was written, in hexadecimal digits."""
        return self._sha256.hexdigest()


class OldFile:
    """A file that is read once, from beginning to end, and digested while reading.

    Never follows a link, waits for a pipe, or reads beyond the initial size. It raises
    CorruptFileError for anything but a readable regular file.
    """

    def __init__(self, path: Path) -> None:
        self._sha256 = hashlib.sha256()
        try:
            # A device may do something when it is opened.
            _check_regular(path.lstat())
            self._descriptor = os.open(path, os.O_RDONLY | CAREFUL)
        except OSError as error:
            raise CorruptFileError(f"it can't be read: {error.strerror}") from error
        try:
            there = os.fstat(self._descriptor)
            _check_regular(there)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.num_bytes = self.num_left = there.st_size

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
        """Reads exactly so many bytes; the caller has checked that the file has them."""
        if num_bytes > self.num_left:
            raise CorruptFileError(
                f"it ends after {self.num_bytes:,} bytes, in the middle of something"
            )
        buffer = bytearray(num_bytes)
        self.fill(memoryview(buffer))
        return bytes(buffer)

    def read_json(self) -> bytes:
        """Reads all of a file of JSON; raises CorruptFileError if it is too large for one."""
        if self.num_bytes > MAX_JSON_BYTES:
            raise CorruptFileError(f"it has {self.num_bytes:,} bytes")
        return self.read(self.num_left)

    def skip(self) -> None:
        """Reads the rest, for the digest."""
        buffer = memoryview(bytearray(min(CHUNK_BYTES, self.num_left)))
        while self.num_left:
            self.fill(buffer[: self.num_left])

    def digest(self) -> str:
        """Returns the SHA-256 of all that was read, in hexadecimal digits."""
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
    """Returns the size of a regular file; raises CorruptFileError if there is none."""
    try:
        there = path.lstat()
    except OSError as error:
        raise CorruptFileError(f"it can't be read: {error.strerror}") from error
    _check_regular(there)
    return there.st_size


def num_free_bytes(path: Path) -> int:
    """Returns the bytes free for this user where a folder is, or will be."""
    there = next(one for one in (path, *path.absolute().parents) if one.is_dir())
    return shutil.disk_usage(there).free


def require_space(path: Path, num_bytes: int) -> None:
    """Raises OSError (ENOSPC) if fewer bytes are free where a folder is, or will be."""
    if num_free_bytes(path) < num_bytes:
        raise OSError(errno.ENOSPC, "there isn't enough space")


def _check_regular(there: os.stat_result) -> None:
    if stat.S_ISLNK(there.st_mode):
        raise CorruptFileError("it is a link to somewhere else")
    if not stat.S_ISREG(there.st_mode):
        raise CorruptFileError("it is not a regular file")
    # To digest a terabyte of nothing would take an hour. Some file systems report no blocks at all.
    stored = 512 * getattr(there, "st_blocks", 0)
    has_holes = 0 < stored < there.st_size // 1000
    if has_holes and there.st_size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise CorruptFileError(
            f"of its {there.st_size:,} bytes only {stored:,} are stored, the rest are holes"
        )


class CorruptFileError(Exception):
    """A file doesn't match its manifest, or isn't in eventloop's format; the text is the reason.

    `checkpoint_files` turns it into a `CheckpointError`; `store` continues with the next checkpoint.

    Args:
        reason: what is wrong, without the name of the file.
        fix: what to do, if not to use another checkpoint.
    """

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.fix = fix

    def of(self, name: str) -> CorruptFileError:
        """Returns the same error with the name of its file."""
        return CorruptFileError(f"{name}: {self}", self.fix)


def to_json(value: Any, max_items: int = MAX_JSON_ITEMS) -> bytes:
    """Encodes a value as standard JSON in ASCII; raises CorruptFileError if `from_json` would."""
    data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
    _check_json_size(data, max_items)
    return data


def from_json(data: bytes, max_items: int = MAX_JSON_ITEMS, encoding: str = "ascii") -> Any:
    """Decodes JSON; raises CorruptFileError if it isn't that, too large or nested too deeply."""
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
    # Text counts, too: to tell it apart would take longer than to refuse a few files more.
    num_items = data.count(b",") + data.count(b"{") + data.count(b"[")
    limits = ((len(data), MAX_JSON_BYTES, "bytes"), (num_items, max_items, "items"))
    for number, limit, unit in limits:
        if number > limit:
            raise CorruptFileError(
                f"its JSON has {number:,} {unit}, of which {limit:,} are allowed"
            )


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} isn't JSON")
