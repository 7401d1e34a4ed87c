"""Checkpoints at URLs, for the commands; the copies of them are gone when a command has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from eventloop.checkpoint.remote_checkpoints import RemoteCheckpoints, batch_in
from eventloop.checkpoint.remote_storage import checkpoints_at_url
from eventloop.checkpoint.storage import FOLDER
from eventloop.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from eventloop.checkpoint.store import Found
    from eventloop.urls import Url


def uploaded_at(url: Url, *, digests: bool) -> list[Found[Url]]:
    """Returns the checkpoints that a URL stands for, the newest first.

    Args:
        url: of a run, of its `checkpoints`, or of a checkpoint, which stands for itself.
        digests: whether they are downloaded and verified; otherwise only their manifests are.

    Raises:
        UsageError: there is none, or it can't be the URL of any.
        CheckpointError: the storage fails.
    """
    with _store_of(url) as store:
        found = store.found(digests=digests)
    if batch_in(url.name) is not None:
        found = [one for one in found if one.path == url]
    if not found:
        raise _none(url)
    return found


@contextmanager
def downloaded(url: Url) -> Iterator[tuple[Path, Url, list[tuple[Url, str]]]]:
    """Downloads the checkpoint that a URL stands for: of a run the newest that verifies.

    Yields:
        A local copy, where it is from, and newer ones with why they can't be used.

    Raises:
        UsageError: there is none, or it can't be the URL of any.
        CheckpointError: there are some, but none verifies, or the storage fails.
    """
    with _store_of(url) as store:
        place, refused = (url, []) if batch_in(url.name) is not None else store.latest()
        if place is None and not refused:
            raise _none(url)
        if place is None:
            listed = "\n    ".join(f"{one.name}: {why}" for one, why in refused)
            raise CheckpointError(
                f"none of the {len(refused)} checkpoints at {url} can be used",
                reasons=f"\n    {listed}",
                fix="restore one from a copy",
            )
        yield store.download(place), place, refused


@contextmanager
def _store_of(url: Url) -> Iterator[RemoteCheckpoints]:
    if url.problem:
        raise UsageError(url.problem, fix="give the URL of a run: s3://bucket/run")
    if batch_in(url.name) is not None:
        folder = url.parent
    else:
        folder = url if url.name == FOLDER else url / FOLDER
    with TemporaryDirectory(prefix="eventloop-") as copies:
        yield checkpoints_at_url(folder, Path(copies))


def _none(url: Url) -> UsageError:
    return UsageError(
        f"there are no checkpoints at {url}", fix="give the URL of a run that has saved"
    )
