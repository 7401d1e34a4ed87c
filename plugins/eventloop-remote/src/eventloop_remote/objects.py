"""The objects of a store: the operations that checkpoints need, with retries.

Every request to a store goes through `Objects`, and through `fsspec` to the package that handles
the protocol.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from eventloop import CheckpointError
from eventloop.storage import NewFile, Url, UsageError

CHUNK_BYTES = 4 * 2**20
PAUSES_S = (1.0, 4.0, 15.0)  # between attempts
_ATTEMPTS = (*PAUSES_S, None)
# Retrying doesn't help with these errors.
_DEFINITE = (PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_DEFINITE_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# Packages whose module has another name.
_PACKAGES = {"smbclient": "smbprotocol"}

T = TypeVar("T")


class Objects:
    """The objects under a URL. Operations with temporary failures are retried a few times.

    Args:
        url: URL of a folder; paths are relative to it.
        pause: waits for a number of seconds.

    Raises:
        UsageError: the package that handles such URLs is missing.
    """

    def __init__(self, url: Url, *, pause: Callable[[float], object] = time.sleep) -> None:
        self._url = url
        self._pause = pause
        self._files, self._root = _opened(url)

    def entries(self, folder: str = "") -> dict[str, int | None]:
        """Returns the names in a folder with their sizes; None for entries that aren't files.

        A missing folder counts as empty: most stores don't distinguish them.
        """

        def look() -> list[dict[str, Any]]:
            self._files.invalidate_cache()  # another process may have written
            return list(self._files.ls(self._at(folder), detail=True))

        try:
            listed_entries = self._try(look, folder, "listed")
        except FileNotFoundError:
            return {}
        return {
            entry["name"].rstrip("/").rpartition("/")[2]: _size(entry) for entry in listed_entries
        }

    def read(self, path: str, max_bytes: int) -> bytes:
        """Returns the first bytes of an object.

        Raises:
            FileNotFoundError: the object doesn't exist.
        """

        def get() -> bytes:
            # Not `cat_file`: some stores refuse a range that goes beyond the end.
            with self._files.open(self._at(path), "rb") as source:
                return bytes(source.read(max_bytes))

        return self._try(get, path, "read")

    def download(self, path: str, target: Path, num_bytes: int) -> None:
        """Copies an object to a new file, and flushes it to disk.

        Args:
            num_bytes: size of the object; no more is written.

        Raises:
            FileNotFoundError: the object doesn't exist.
        """

        def copy() -> None:
            target.unlink(missing_ok=True)  # from a previous attempt
            with self._files.open(self._at(path), "rb") as source, NewFile(target) as file:
                while chunk := source.read(min(CHUNK_BYTES, num_bytes - file.num_bytes)):
                    file.write(chunk)
                if file.num_bytes < num_bytes:
                    raise OSError(f"it ended after {file.num_bytes:,} of {num_bytes:,} bytes")

        self._try(copy, path, f"downloaded to {str(target)!r}")

    def upload(self, source: Path, path: str) -> None:
        """Copies a file to an object, which is overwritten."""

        def put() -> None:
            self._make_folder_of(path)
            self._files.put_file(str(source), self._at(path))

        self._change(put, path, "uploaded")

    def write(self, data: bytes, path: str) -> None:
        """Writes an object, which is overwritten."""

        def put() -> None:
            self._make_folder_of(path)
            self._files.pipe_file(self._at(path), data)

        self._change(put, path, "written")

    def publish(self, data: bytes, path: str) -> None:
        """Writes a new object atomically."""
        if self._has_atomic_writes:
            self.write(data, path)
            return
        temporary_path = f"{path}.part"
        self.write(data, temporary_path)
        self._change(
            lambda: self._files.mv(self._at(temporary_path), self._at(path)), path, "written"
        )

    def remove(self, path: str) -> None:
        """Removes an object, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._try(lambda: self._files.rm_file(self._at(path)), path, "removed")

    def remove_folder(self, path: str) -> None:
        """Removes an empty folder, in stores that have any."""
        if not self._has_atomic_writes:
            with contextlib.suppress(OSError, NotImplementedError):  # an empty folder does no harm
                self._files.rmdir(self._at(path))

    # How

    @property
    def _has_atomic_writes(self) -> bool:
        """Whether it is an object store, without folders, where an object appears when its write is done.

        In fsspec these are the asynchronous implementations. Creating a folder in them could create a bucket.
        """
        return bool(self._files.async_impl)

    def _make_folder_of(self, path: str) -> None:
        if not self._has_atomic_writes:
            self._files.makedirs(self._at(path.rpartition("/")[0]), exist_ok=True)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _change(self, action: Callable[[], object], path: str, action_name: str) -> None:
        try:
            self._try(action, path, action_name)
        except FileNotFoundError as error:  # there is no such bucket
            raise self._error(error, path, action_name) from self._cause(error)

    def _try(self, action: Callable[[], T], path: str, action_name: str) -> T:
        for pause_s in _ATTEMPTS:
            try:
                return action()
            except FileNotFoundError:
                raise
            except Exception as error:  # noqa: BLE001  each package has its own classes
                if pause_s is None or not _may_pass(error):
                    raise self._error(error, path, action_name) from self._cause(error)
                self._pause(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def _cause(self, error: Exception) -> Exception | None:
        """Returns an error unless its text may have a password."""
        return error if str(self._url) == self._url.full else None

    def _error(self, error: Exception, path: str, action_name: str) -> CheckpointError:
        return CheckpointError(
            f"{self._url / path if path else self._url} can't be {action_name}: "
            f"{self._url.hide(_reason(error))}",
            fix="look at the store's address and rights, at the network and the free space, and "
            "start again: a run goes on from its newest checkpoint",
        )


def _opened(url: Url) -> tuple[Any, str]:
    """Returns the file system of fsspec for a URL, and the path in it.

    Each has its own connection: some can't be used from two threads at once.
    """
    try:
        files, root = fsspec.url_to_fs(url.full, skip_instance_cache=True)
    except ImportError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        missing = (cause.name or url.protocol).partition(".")[0]
        raise UsageError(
            f"{url} needs a package that isn't installed: {url.hide(str(error))}",
            fix=f"pip install {_PACKAGES.get(missing, missing)}",
        ) from None
    except Exception as error:  # noqa: BLE001  each package has its own classes
        protocols = fsspec.available_protocols()
        if url.protocol not in protocols:
            closest = "".join(difflib.get_close_matches(url.protocol, protocols, 1))
            raise UsageError(
                f"{url}: fsspec knows no store by {url.protocol}://"
                + (f"; the closest is {closest!r}" if closest else ""),
                fix="install the fsspec package that knows it, or write s3://, gs://, file:///",
            ) from None
        raise UsageError(
            f"{url} can't be opened: {url.hide(_reason(error))}",
            fix="look at its address and at the credentials in this environment",
        ) from None
    return files, str(root).rstrip("/")


def _may_pass(error: Exception) -> bool:
    return (
        isinstance(error, OSError)
        and not isinstance(error, _DEFINITE)
        and error.errno not in _DEFINITE_NUMBERS
    )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    kind = type(error).__name__
    return f"{kind}: {error}" if str(error) else kind


def _size(entry: dict[str, Any]) -> int | None:
    if entry["type"] != "file" or entry.get("islink"):
        return None
    return -1 if entry["size"] is None else int(entry["size"])
