"""Displays of progress: a terminal, a notebook's cell, or lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from eventloop.toolbox import Results
from eventloop_progress.bar import Field, Line
from eventloop_progress.logged_texts import Text as LoggedText
from eventloop_progress.logged_texts import lines_of
from eventloop_progress.notebook import Notebook
from eventloop_progress.table import ResultsTable


class Display(Protocol):
    """A place to show progress."""

    draws: bool

    def draw(self, fields: Sequence[Field], frac: float) -> None:
        """Shows the run's progress; call it as often as the display should refresh."""

    def results(self, epoch: int, batch: int, results: Results) -> None:
        """Shows the results of an evaluation."""

    def line(self, line: str) -> None:
        """Shows the report of an epoch."""

    def note(self, text: str) -> None:
        """Shows a note, once."""

    def text(self, name: str, text: LoggedText) -> None:
        """Shows the beginning of a logged text or table."""

    def close(self, *, keep: bool) -> None:
        """Restores the terminal; the next call of `draw` takes it again.

        Args:
            keep: whether the last drawn bar stays visible.
        """


class Terminal:
    """A bar, and above it the results of each evaluation.

    Only `draw` writes to the terminal, never a background thread: such a thread could hold the
    terminal's lock at the moment when a data loader forks its workers, and a worker that prints
    would wait for that lock forever.
    """

    draws = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line = Line()
        self._table = ResultsTable(console)
        self._live: Live | None = None

    def draw(self, fields: Sequence[Field], frac: float) -> None:
        """Draws the bar over the previous one."""
        self._line.fields = fields
        self._line.frac = frac
        if self._live is None:
            self._live = Live(self._line, console=self._console, auto_refresh=False)
            self._live.start()
        self._live.refresh()

    def results(self, epoch: int, batch: int, results: Results) -> None:
        """Adds rows to the table above the bar."""
        encoding = self._console.encoding
        self._table.add(epoch, batch, {
            printable(dataset, encoding): {
                printable(name, encoding): value for name, value in numbers.items()
            }
            for dataset, numbers in results.items()
        })  # fmt: skip

    def line(self, line: str) -> None:
        """Shows nothing: the bar and the tables already contain it."""

    def note(self, text: str) -> None:
        """Adds a line above the bar; the terminal wraps it, so that a path can be copied."""
        line = Text(printable(text, self._console.encoding), "dim")
        self._console.print(line, soft_wrap=True)

    def text(self, name: str, text: LoggedText) -> None:
        """Prints the text above the progress bar."""
        _print(self._console, name, text)

    def close(self, *, keep: bool) -> None:
        """Ends the drawing; the cursor is shown again."""
        if self._live is not None:
            live = self._live
            self._live = None
            live.transient = not keep
            live.stop()


class Log:
    """A line for each epoch, for files and pipes."""

    draws = False

    def __init__(self, console: Console) -> None:
        self._console = console

    def draw(self, fields: Sequence[Field], frac: float) -> None:
        """Draws nothing: output in a file can't be overwritten."""

    def results(self, epoch: int, batch: int, results: Results) -> None:
        """Shows nothing: results are part of the line of their epoch."""

    def line(self, line: str) -> None:
        """Prints a report on a single line, without wrapping."""
        self.note(line)

    def note(self, text: str) -> None:
        """Prints the note on a single line."""
        self._console.print(Text(printable(text, self._console.encoding)), soft_wrap=True)

    def text(self, name: str, text: LoggedText) -> None:
        """Prints the text on a few lines."""
        _print(self._console, name, text)

    def close(self, *, keep: bool) -> None:
        """Does nothing: there is nothing to release."""


def display_on(console: Console) -> Display:
    """Returns the display that suits a console."""
    if console.is_jupyter:
        return Notebook()
    return Terminal(console) if console.is_interactive else Log(console)


def _print(console: Console, name: str, text: LoggedText) -> None:
    for line in lines_of(name, text):
        console.print(Text(printable(line, console.encoding)), soft_wrap=True)


def printable(name: str, encoding: str) -> str:
    """Returns a name that stays on its line and that a stream of this encoding takes."""
    line = "".join(char if char.isprintable() else "?" for char in name)
    return line.encode(encoding, "replace").decode(encoding)
