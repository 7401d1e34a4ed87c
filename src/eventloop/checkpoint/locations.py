"""What a person means by a path: a checkpoint, or the run that has some."""

from __future__ import annotations

import os
from pathlib import Path

from eventloop.checkpoint.manifest import BEGINNING, FILE
from eventloop.checkpoint.store import Found, Store, look_at
from eventloop.checkpoint.verifying import batch_of
from eventloop.errors import CheckpointError, UsageError, closest
from eventloop.files.corruption import CorruptFileError
from eventloop.files.disk import OldFile

FOLDER = "checkpoints"  # of a run
_MOST_NAMED = 3


def checkpoints_at(path: Path) -> list[Path]:
    """Returns the checkpoints that a path stands for, the newest first.

    Args:
        path: a run's folder, its `checkpoints`, or a checkpoint, which stands for itself.

    Raises:
        UsageError: there is no such folder.
        CheckpointError: it can't be listed.
    """
    if not path.is_dir():
        raise _no_folder(path)
    # The path is the user's and may be a link; what is in a run's folder may be a stranger's.
    own, inside = path.resolve() if path.is_symlink() else path, path / FOLDER
    if _is_checkpoint(path):
        return [own]
    return Store(inside if os.path.lexists(inside) else own).paths()


def checkpoint_at(path: Path) -> tuple[Path, list[Found[Path]]]:
    """Returns the checkpoint that a path stands for: of a run the newest that verifies and is finite.

    Returns:
        The checkpoint, and newer ones of the run that can't be used.

    Raises:
        UsageError: there is none.
        CheckpointError: there are some, but none verifies and is finite.
    """
    paths = require_checkpoints(path)
    if len(paths) == 1:  # reading it reports what is wrong with it
        return paths[0], []
    refused: list[Found[Path]] = []
    for one in paths:
        found = look_at(one, digests=True)
        if not found.reason:
            return one, refused
        refused.append(found)
    listed = "\n    ".join(f"{one.path.name}: {one.reason}" for one in refused)
    raise CheckpointError(
        f"none of the {len(refused)} checkpoints in {str(path)!r} can be used",
        reasons=f"\n    {listed}",
        fix="restore one from a copy",
    )


def require_checkpoints(path: Path) -> list[Path]:
    """Returns the checkpoints that a path stands for, of which there is one at least.

    Raises:
        UsageError: there is none.
        CheckpointError: they can't be listed.
    """
    paths = checkpoints_at(path)
    if not paths:
        raise UsageError(
            why_none(path), fix="name the folder of a run that has saved, or that of a checkpoint"
        )
    return paths


def why_none(path: Path) -> str:
    """Says of a folder that it has no checkpoints, and which runs in it have some."""
    runs = sorted((one.parent.name for one in path.glob(f"*/{FOLDER}")), reverse=True)
    if not runs:
        return f"there are no checkpoints in {str(path)!r}"
    named = ", ".join(map(repr, runs[:_MOST_NAMED]))
    more = f" and {len(runs) - _MOST_NAMED} more" if len(runs) > _MOST_NAMED else ""
    return f"there are no checkpoints in {str(path)!r} itself, but it has the runs {named}{more}"


def _is_checkpoint(path: Path) -> bool:
    """Returns whether a folder is a checkpoint, by its name or what it holds."""
    if batch_of(path.name) is not None:
        return True
    try:
        with OldFile(path / FILE) as file:
            return file.read(len(BEGINNING)) == BEGINNING
    except CorruptFileError:
        return False


def _no_folder(path: Path) -> UsageError:
    if path.exists():
        whole = _is_checkpoint(path.parent)
        return UsageError(
            f"{str(path)!r} is a file, but runs and checkpoints are folders",
            fix=f"name the folder: {str(path.parent)!r}" if whole else "name a folder",
        )
    there = path.parent
    names = [one.name for one in there.iterdir()] if there.is_dir() else []
    return UsageError(
        f"there is no folder {str(path)!r}{closest(path.name, names)}",
        fix="name the folder of a run, `runs/digits/20260131-120000-3fa9` say, or of a checkpoint",
    )
