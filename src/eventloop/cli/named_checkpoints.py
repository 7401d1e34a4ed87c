"""Finds the checkpoints that a command line names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich import filesize

from eventloop.checkpoint.locations import (
    FOLDER,
    best_among,
    checkpoint_at,
    checkpoints_at,
    storage_for,
    unusable,
)
from eventloop.checkpoint.store import look_at
from eventloop.checkpoint.verifying import batch_in
from eventloop.cli.arguments import Arguments, Command, CommandOption
from eventloop.errors import CheckpointError, UsageError
from eventloop.safe_text import one_line
from eventloop.urls import Place, Url, place_of

if TYPE_CHECKING:
    from eventloop.checkpoint.locations import UrlCheckpoints
    from eventloop.checkpoint.store import FoundCheckpoint

size_text = filesize.decimal
BEST_OPTION = CommandOption(
    "best", "", "for a run, use the checkpoint of the best evaluation instead of the newest"
)


def words(arguments: Arguments, command: Command) -> tuple[str, ...]:
    """Returns the positional arguments; raises UsageError if one is missing."""
    if missing := command.argument.split()[len(arguments.words) :]:
        raise UsageError(
            f"`eventloop {command.name}` needs {' and '.join(missing)}",
            fix=f"write it as `{command.usage}`",
        )
    return arguments.words


@contextmanager
def one_checkpoint(word: str, *, best: bool = False) -> Iterator[tuple[Path, Place]]:
    """Yields a checkpoint; reports newer checkpoints that can't be used on stderr.

    Args:
        word: the path or URL of a checkpoint or a run.
        best: whether to use the checkpoint of the best evaluation instead of the newest.

    Yields:
        The folder of the checkpoint, or of a temporary copy; and its path or URL.

    Raises:
        UsageError: there is no checkpoint.
        CheckpointError: no checkpoint verifies.
    """
    place = _best(word) if best else place_of(word)
    if isinstance(place, Path):
        path, refused = checkpoint_at(place)
        _tell((checkpoint.path, checkpoint.reason) for checkpoint in refused)
        yield path, path
        return
    with _store_of(place) as (store, is_checkpoint):
        while True:
            url, passed_over = (place, []) if is_checkpoint else store.latest()
            if url is None:
                raise unusable(place, passed_over) if passed_over else _none(place)
            try:
                copy = store.download(url)
                break
            except CheckpointError:
                if store.has(url.name):
                    raise
                if is_checkpoint:  # otherwise an active run has removed it, and has newer ones
                    raise _none(place) from None
        _tell(passed_over)
        yield copy, url


def _best(word: str) -> Place:
    """Returns the checkpoint of the best evaluation of a run."""
    place = place_of(word)
    checkpoints: Iterable[FoundCheckpoint[Any]] = (
        uploaded_at(place, digests=False)
        if isinstance(place, Url)
        else (look_at(path, digests=False) for path in checkpoints_at(place))
    )
    if (best := best_among(checkpoints)) is None:
        raise UsageError(
            f"--best: {word!r} has no checkpoint of the best evaluation",
            fix="train with `--checkpoint-best test/accuracy`, or leave --best out",
        )
    path: Place = best.path
    return path


def _tell(refused: Iterable[tuple[Place, str]]) -> None:
    for place, reason in refused:
        sys.stderr.write(f"{place.name} isn't used: {one_line(reason)}\n")


def uploaded_at(url: Url, *, digests: bool) -> list[FoundCheckpoint[Url]]:
    """Returns the checkpoints that a URL refers to, the newest first.

    Args:
        url: the URL of a run, of its `checkpoints`, or of a checkpoint.
        digests: whether to download and verify all files; otherwise only the manifests.

    Raises:
        UsageError: there is no checkpoint, or the URL is invalid.
        CheckpointError: the storage fails.
    """
    with _store_of(url) as (store, is_checkpoint):
        checkpoints = [
            checkpoint
            for checkpoint in store.found(digests=digests)
            if not is_checkpoint or checkpoint.path == url
        ]
    if not checkpoints:
        raise _none(url)
    return checkpoints


@contextmanager
def _store_of(url: Url) -> Iterator[tuple[UrlCheckpoints, bool]]:
    """Yields the checkpoints under a URL, and whether the URL names a single checkpoint."""
    if url.problem:
        raise UsageError(url.problem, fix="use the URL of a run: s3://bucket/run")
    is_checkpoint = batch_in(url.name) is not None
    checkpoints_url = url if url.name == FOLDER else url / FOLDER
    with TemporaryDirectory(prefix="eventloop-") as copies:
        folder = url.parent if is_checkpoint else checkpoints_url
        yield storage_for(url).checkpoints(folder, Path(copies)), is_checkpoint


def _none(url: Url) -> UsageError:
    return UsageError(
        f"there are no checkpoints at {url}", fix="use the URL of a run with checkpoints"
    )
