"""Checkpoints that several ranks write together, in a shared folder or each in its own.

In a shared folder, rank 0 creates a temporary folder and broadcasts its name; each rank writes its
files, syncs them, reads them back and sends the digests; then rank 0 writes the manifest. A step
that fails on one rank fails on all.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop.checkpoint.leftovers import UNDER_WAY, new_id
from eventloop.checkpoint.verifying import name_of
from eventloop.errors import CheckpointError, EventloopError, text_of
from eventloop.files import disk
from eventloop.files.run_folder import check_folder
from eventloop.text import as_set

if TYPE_CHECKING:
    from eventloop.checkpoint.format import Draft
    from eventloop.checkpoint.manifest import FileFacts, Manifest
    from eventloop.distributed.crew import Crew
    from eventloop.state import State

_PATIENCE_S = 5.0  # some network file systems show a new name seconds later


@contextmanager
def telling(crew: Crew) -> Iterator[Callable[[str], None]]:
    """Yields a function that sends the folder to the crew; an exception sends its text."""
    is_sent = crew.world_size == 1

    def tell(name: str) -> None:
        nonlocal is_sent
        is_sent = True
        crew.first((name, ""))

    try:
        yield tell
    except BaseException as error:
        if not is_sent:
            crew.first(("", text_of(error)))
        raise


def write_first(draft: Draft, folder: Path, crew: Crew, tell: Callable[[str], None]) -> Manifest:
    """Writes a checkpoint into an empty folder, on rank 0."""
    if crew.world_size == 1:
        return draft.write(folder, [])
    tell(folder.name)
    files = _all_of(crew.run(lambda: draft.write_share(folder)))
    return draft.write_manifest(folder, files, [])


@contextmanager
def written_apart(
    prepare: Callable[[], Draft], under_way: Callable[[], AbstractContextManager[Path]], crew: Crew
) -> Iterator[Path]:
    """Writes each rank's files into its own folder, which other ranks needn't see.

    Args:
        prepare: returns what this rank writes.
        under_way: creates the folder and removes it afterwards.

    Yields:
        This rank's folder, which is removed afterwards; that of rank 0 has the manifest of all.

    Raises:
        CheckpointError: a rank can't write; raised on every rank.
    """
    mine: list[tuple[Draft, Path]] = []
    with ExitStack() as folders:

        def write() -> dict[str, FileFacts]:
            draft = prepare()
            folder = folders.enter_context(under_way())
            mine.append((draft, folder))
            with draft.failing(folder):
                return draft.write_share(folder)

        files = _all_of(crew.run(write))
        ((draft, folder),) = mine

        def write_manifest() -> None:
            if crew.rank == 0:
                with draft.failing(folder):
                    draft.write_manifest(folder, files, [])

        crew.run(write_manifest)
        yield folder


def _all_of(shares: Iterable[Mapping[str, FileFacts]]) -> dict[str, FileFacts]:
    """Returns the files of all ranks."""
    return {name: one for share in shares for name, one in share.items()}


def write_share(draft: Draft, folder: Path, crew: Crew) -> None:
    """Writes the files of a rank other than 0, into the folder that rank 0 sends."""
    name, problem = crew.first(("", ""))
    if problem:
        raise CheckpointError("rank 0: " + problem)

    def step() -> dict[str, FileFacts]:
        with draft.failing(folder / name):
            return draft.write_share(folder / name)

    crew.run(step)


def require_shared(folder: Path, state: State) -> None:
    """Checks that all ranks see what rank 0 creates in a folder; collective.

    Raises:
        CheckpointError: a rank doesn't see it, or it can't be created.
    """
    with new_id() as one:
        # The name of what is under way: if this process is killed now, the next one removes it.
        name, problem = f"{UNDER_WAY}{name_of(0)}-{one}", None
        if state.rank == 0:
            problem = _failure(lambda: _make(folder, name))
        name, problem = state.all_gather((name, problem))[0]
        if problem is not None:
            raise CheckpointError(problem, fix="give another folder, " + as_set(run_dir="FOLDER"))
        seen: list[tuple[bool, str]] = state.all_gather((_is_there(folder / name), platform.node()))
        if state.rank == 0:
            _failure(lambda: disk.remove_empty(folder / name))
    blind = [rank for rank, (is_there, _) in enumerate(seen) if not is_there]
    if blind:
        raise CheckpointError(
            f"rank {blind[0]} on {seen[blind[0]][1]!r} doesn't see what rank 0 on {seen[0][1]!r} has made "
            f"in {str(folder)!r}, but each rank writes its share of a checkpoint there",
            fix="give a folder on a file system that all machines share, or the URL of a storage, "
            + as_set(run_dir="FOLDER"),
        )


def _make(folder: Path, name: str) -> None:
    check_folder(folder)
    disk.make_folders(folder)
    disk.make_folder(folder / name)


def _is_there(path: Path) -> bool:
    end = time.monotonic() + _PATIENCE_S
    while not (is_there := os.path.lexists(path)) and time.monotonic() < end:
        time.sleep(0.05)
    return is_there


def _failure(step: Callable[[], None]) -> str | None:
    try:
        step()
    except (OSError, EventloopError) as error:
        return "the checkpoints' folder can't be used: " + text_of(error)
    return None
