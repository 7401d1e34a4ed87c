"""Which checkpoint a run goes on from, if from any: rank 0 looks, all ranks read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eventloop.checkpoint.format import read
from eventloop.checkpoint.store import Store
from eventloop.errors import CheckpointError, EventloopError, ResumeError
from eventloop.start import Allowed, Anew, FromCheckpoint, Start

if TYPE_CHECKING:
    from eventloop.processes import Processes
    from eventloop.settings import Settings

Refused = list[tuple[Path, str]]


def find_start(settings: Settings, store: Store, processes: Processes, allowed: Allowed) -> Start:
    """Finds out how a run starts.

    Raises:
        ResumeError: what is asked for can't be had.
        CheckpointError: there are checkpoints, but none verifies.
    """
    mine: tuple[Path | None, Refused, EventloopError | None] = (None, [], None)
    if processes.rank == 0:
        try:
            mine = (*_chosen(settings, store), None)
        except EventloopError as error:
            mine = (None, [], error)
    path, refused, problem = processes.gathered(mine)[0]
    if problem is not None:
        raise problem
    return Anew() if path is None else FromCheckpoint(read(path), allowed, refused)


def _chosen(settings: Settings, store: Store) -> tuple[Path | None, Refused]:
    """Gives the checkpoint to go on from, and newer ones that can't be used."""
    is_new = settings.run_dir is None
    path, refused = (None, []) if is_new else store.latest()
    wanted = settings.resume
    if wanted == "never" and (path is not None or refused):
        raise ResumeError(
            f"resume='never', but {settings.run_dir} holds a run already",
            fix="give another run_dir, or delete this one",
        )
    if path is None and refused:
        raise _none_verifies(refused)
    if wanted in ("auto", "never"):
        return path, refused
    return _named(Path(wanted).expanduser(), path), refused


def _named(wanted: Path, newest: Path | None) -> Path:
    """Gives the checkpoint that a person named, unless the run has gone further."""
    if newest is None:
        return wanted
    if wanted.resolve() == newest.resolve() or wanted.resolve().parent != newest.resolve().parent:
        return newest
    raise ResumeError(
        f"the run has gone on to {newest.name} since {wanted.name}",
        fix=f"begin another run with it: `--run-dir ANOTHER --resume {wanted}`",
    )


def _none_verifies(refused: Refused) -> CheckpointError:
    listed = "\n    ".join(f"{path.name}: {why}" for path, why in refused)
    return CheckpointError(
        f"none of {len(refused)} checkpoints verifies"
        if len(refused) > 1
        else "the only checkpoint doesn't verify",
        reasons=f"\n    {listed}",
        fix=f"restore {refused[0][0].parent} from a copy, or begin a new run in another run_dir",
    )
