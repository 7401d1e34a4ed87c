"""Files of Lightning's loggers and `ModelCheckpoint`, restored when a run is resumed."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from eventloop import State
from eventloop.toolbox import RunFolder

_NAME = "lightning.json"
_MAX_BYTES = 2**24


class Table(ExperimentWriter):
    """The rows of a CSVLogger, which can be truncated; columns are added atomically.

    Private names: lightning 2.6.6.

    Args:
        log_dir: the logger's folder; its content stays until the run begins.
    """

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self._num_rows = 0

    def save(self) -> None:
        """Appends the rows logged since the last call."""
        self._num_rows += len(self.metrics)
        super().save()

    def state_dict(self) -> dict[str, Any]:
        """Writes all rows, and returns the end of the file."""
        self.save()
        return {"columns": list(self.metrics_keys), "num_rows": self._num_rows}

    def begin(self) -> None:
        """Removes the rows of another run, as Lightning does."""
        Path(self.metrics_file_path).unlink(missing_ok=True)

    def cut(self, columns: Sequence[str], num_rows: int) -> None:
        """Removes the rows after a checkpoint, and the columns that they introduced."""
        path = Path(self.metrics_file_path)
        rows = []
        if path.is_file():
            with path.open(newline="") as file:
                rows = list(csv.DictReader(file))[:num_rows]
        if len(rows) < num_rows:
            warnings.warn(
                f"{path} has {len(rows)} of the {num_rows} rows that it had when the checkpoint was "
                "saved; it goes on with these",
                stacklevel=2,
            )
        self.metrics.clear()
        self.metrics_keys = list(columns)
        self._num_rows = len(rows)
        if rows:
            self._replace(rows)
        else:
            self.begin()

    def _check_log_dir_exists(self) -> None:
        """Keeps existing rows: whether the run is resumed isn't known yet."""

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        with Path(self.metrics_file_path).open(newline="") as file:
            self._replace(list(csv.DictReader(file)))

    def _replace(self, rows: Sequence[Mapping[str, Any]]) -> None:
        new = Path(f"{self.metrics_file_path}.new")
        with new.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.metrics_keys, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        new.replace(self.metrics_file_path)


class OwnFiles:
    """Tracks the files that Lightning wrote in a run, on rank 0 only.

    Args:
        trainer: Lightning's trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._folder: RunFolder | None = None
        self._noted: Mapping[str, Any] = {}
        self._tables: dict[str, Table] = {}
        self._checkpoints: list[str] = []

    def find(self, state: State) -> None:
        """Points loggers to the folders in which the run began, before they create new ones."""
        if state.rank:
            return
        if state.settings.run_dir is not None:  # a run without a folder can't be resumed
            self._folder = RunFolder(state.run_dir.absolute())
            if (state.run_dir / _NAME).is_file():
                self._noted = json.loads(self._folder.read(_NAME, _MAX_BYTES))
        versions = [*self._noted.get("versions", ()), *[None] * len(self._trainer.loggers)]
        for logger, version in zip(self._trainer.loggers, versions, strict=False):
            if isinstance(logger, CSVLogger | TensorBoardLogger) and logger._version is None:
                logger._version = version
            is_local = isinstance(logger, CSVLogger) and "://" not in logger.save_dir
            if is_local and logger._experiment is None:
                logger._experiment = table = Table(logger.log_dir)
                self._tables[str(Path(logger.log_dir).resolve())] = table

    def begin(self, saved: Mapping[str, Any]) -> None:
        """Discards everything written after the checkpoint from which the run resumes.

        Args:
            saved: the `state_dict` in the checkpoint; empty for a new run.
        """
        for path, table in self._tables.items():
            if (position := saved.get("tables", {}).get(path)) is not None:
                table.cut(**position)
            else:
                table.begin()
        for path in self._noted.get("checkpoints", ()):
            if path in saved.get("checkpoints", ()):
                self._checkpoints.append(path)
            else:
                Path(path).unlink(missing_ok=True)
        self._note()

    def add_checkpoint(self, path: Path) -> None:
        """Records a file before it is written, so that a kill leaves no unknown file."""
        if self._folder is not None and str(path) not in self._checkpoints:
            self._checkpoints.append(str(path))
            self._note()

    def state_dict(self) -> dict[str, Any]:
        """Writes all rows; returns the existing checkpoints, and the ends of tables."""
        tables = {path: table.state_dict() for path, table in self._tables.items()}
        return {"tables": tables, "checkpoints": list(self._checkpoints)}

    def _note(self) -> None:
        if self._folder is not None:
            versions = [
                logger.version if isinstance(logger, CSVLogger | TensorBoardLogger) else None
                for logger in self._trainer.loggers
            ]
            noted = {"versions": versions, "checkpoints": self._checkpoints}
            self._folder.write(_NAME, json.dumps(noted, indent=2).encode())
