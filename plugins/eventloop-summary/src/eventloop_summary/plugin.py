"""The plugin: when the model is looked at, and where the table goes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from eventloop import hookimpl
from eventloop.toolbox import evaluation_mode_note, untrained_note
from eventloop_summary.layers import Passes, table

if TYPE_CHECKING:
    from eventloop import StateView


class Summary:
    """Writes a table of the model's layers at the first forward pass of a training.

    Args:
        depth: how many levels of modules have lines of their own.

    Raises:
        ValueError: `depth` is less than 1.
    """

    def __init__(self, *, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth!r} shows no layer; give 1 or more")
        self.depth = depth
        self._passes: Passes | None = None
        self._is_done = False

    @hookimpl(rank_zero=True)
    def before_forward(self, state: StateView) -> None:
        """Begins to watch the first pass of a training."""
        if not self._is_done:
            self._is_done = True
            self._passes = Passes(state.model)
            if state.settings.compile:  # whose operations can't be seen
                self._passes.close()

    @hookimpl(rank_zero=True)
    def after_forward(self, state: StateView) -> None:
        """Writes the table, parameters without an optimizer, and modules in evaluation mode."""
        if self._passes is not None:
            passes = self._passes
            self._passes = None
            passes.close()
            sys.stdout.write(table(passes.layers, self.depth))
            for note in (untrained_note(state), evaluation_mode_note(state.model)):
                if note:
                    sys.stdout.write(f"{note}\n")
            sys.stdout.flush()

    @hookimpl
    def exception(self) -> None:
        """Lets the model go, if the pass has failed."""
        if self._passes is not None:
            self._passes.close()
            self._passes = None
