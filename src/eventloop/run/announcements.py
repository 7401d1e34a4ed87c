"""Lines that a fit writes to stderr for scripts and notebooks, where no command prints a header."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from eventloop.safe_text import one_line

if TYPE_CHECKING:
    from eventloop.state import State


class Announcements:
    """Writes each line once, on rank 0; writes nothing if a command prints the lines itself.

    Args:
        state: the run's state.
        makes_folder: whether the run creates a folder with a generated name, unknown to the user.

    Attributes:
        by_command: whether a command prints header and result.
    """

    def __init__(self, state: State, *, makes_folder: bool) -> None:
        self._state = state
        self._makes_folder = makes_folder
        self.by_command = False

    def write(self, lines: Iterable[str]) -> None:
        """Writes lines, unless a command prints them."""
        if self._state.rank == 0 and not self.by_command:
            sys.stderr.writelines(f"eventloop: {one_line(line)}\n" for line in lines)

    def folder(self) -> None:
        """Writes the path of the run's folder, as soon as the folder exists.

        The folder is created with its first file: a run whose plugins write nothing has none.
        """
        run_dir = self._state.run_dir
        if self._makes_folder and run_dir.is_dir():
            self._makes_folder = False
            self.write([f"run dir: {run_dir}"])
