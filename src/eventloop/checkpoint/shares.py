"""A checkpoint that several ranks write together: each its share, rank 0 the manifest at last.

Rank 0 makes the folder under way and says its name; each rank writes what it holds, syncs it, reads it
back, and says its digests; then rank 0 writes the manifest. A step that fails on one rank fails on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop.errors import CheckpointError

if TYPE_CHECKING:
    from eventloop.checkpoint.format import Draft
    from eventloop.checkpoint.manifest import FileFacts, Manifest
    from eventloop.distributed.crew import Crew


@contextmanager
def telling(crew: Crew) -> Iterator[Callable[[str], None]]:
    """Yields what tells the crew where to write, once; tells it on an exception that nothing is written."""
    is_told = crew.world_size == 1

    def tell(name: str) -> None:
        nonlocal is_told
        is_told = True
        crew.first((name, ""))

    try:
        yield tell
    except BaseException as error:
        if not is_told:
            crew.first(("", str(error)))
        raise


def write_first(draft: Draft, folder: Path, crew: Crew, tell: Callable[[str], None]) -> Manifest:
    """Writes a checkpoint into an empty folder, on rank 0."""
    if crew.world_size == 1:
        return draft.write(folder, [])
    tell(folder.name)
    files = crew.run(lambda: draft.write_share(folder))
    return draft.write_manifest(
        folder, {name: one for share in files for name, one in share.items()}, []
    )


def write_share(draft: Draft, folder: Path, crew: Crew) -> None:
    """Writes what another rank than the first one holds, where rank 0 says."""
    name, problem = crew.first(("", ""))
    if problem:
        raise CheckpointError(f"rank 0: {problem}")

    def step() -> dict[str, FileFacts]:
        with draft.failing(folder / name):
            return draft.write_share(folder / name)

    crew.run(step)
