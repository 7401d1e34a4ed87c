"""The file in the folder of a run that tells what it is made of, written when it is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventloop.errors import EventloopError
from eventloop.hooks import hookimpl
from eventloop.run.run_manifest import write_manifest

if TYPE_CHECKING:
    from eventloop.run.start import Start
    from eventloop.state import State


class RunFile:
    """Writes `manifest.json` when a trainer's first fit begins; a plugin of the core.

    It stands after what takes the run's lock.

    Args:
        start: of the run.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._is_written = False

    @hookimpl
    def fit_start(self, state: State) -> None:
        """Writes it, once."""
        if self._is_written:
            return
        problem = None
        if state.rank == 0:
            start = self._start
            try:
                write_manifest(
                    state.manifest, state.run_dir, resumed=start.resumed, changes=start.changes
                )
            except EventloopError as error:
                problem = error
        (problem, *_) = state.gathered(problem)
        if problem is not None:
            raise problem
        self._is_written = True
