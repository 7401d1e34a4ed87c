"""Results of evaluations: a table with a row for each data loader."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eventloop.toolbox import Results, short

GAP = 2
NARROWEST = 9


class ResultsTable:
    """Prints data loaders as rows and metrics as columns.

    Column widths are the same for every evaluation, so that all rows form a single table; its header is
    repeated when the metrics change. If the terminal is too narrow for the columns, each number gets
    its own line.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._head: tuple[str, ...] = ()

    def add(self, epoch: int, batch: int, results: Results) -> None:
        """Prints the results of an evaluation, with its epoch and its number of finished batches."""
        metrics = list(dict.fromkeys(name for numbers in results.values() for name in numbers))
        if not metrics:
            return
        names = max(NARROWEST, *(cell_len(dataset) for dataset in results))
        widths = [max(NARROWEST, cell_len(name)) for name in metrics]
        if 5 + 9 + names + sum(widths) + GAP * (len(widths) + 2) <= self._console.width:
            self._add_rows(epoch, batch, results, metrics)
        else:
            self._add_list(epoch, batch, results)

    def _add_rows(self, epoch: int, batch: int, results: Results, metrics: list[str]) -> None:
        head = (*results, *metrics)
        table = Table(
            box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim",
            show_header=head != self._head,
        )  # fmt: skip
        table.add_column("epoch", justify="right", min_width=5, no_wrap=True)
        table.add_column("batch", justify="right", min_width=9, no_wrap=True)
        names = max(NARROWEST, *(cell_len(dataset) for dataset in results))
        table.add_column("data", min_width=names, no_wrap=True)
        for name in metrics:
            table.add_column(Text(name), justify="right", min_width=NARROWEST, no_wrap=True)
        for idx, (dataset, numbers) in enumerate(results.items()):
            moment = ("", "") if idx else (str(epoch), f"{batch:,}")
            values = [short(numbers[name]) if name in numbers else "" for name in metrics]
            table.add_row(*moment, Text(dataset), *(Text(value, "bold") for value in values))
        self._head = head
        self._console.print(table)

    def _add_list(self, epoch: int, batch: int, results: Results) -> None:
        self._head = ()
        self._console.print(Text(f"epoch {epoch}, batch {batch:,}", "dim"))
        table = Table.grid(padding=(0, GAP, 0, 0))
        table.add_column(overflow="fold")
        table.add_column(justify="right", no_wrap=True)
        for dataset, numbers in results.items():
            for name, value in numbers.items():
                table.add_row(Text(f"{dataset}/{name}"), Text(short(value), "bold"))
        self._console.print(table)
