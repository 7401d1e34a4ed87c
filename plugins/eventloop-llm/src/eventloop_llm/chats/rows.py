"""Rows of data, each a mapping: of a file of JSON lines or parquet, or a folder of `datasets`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eventloop import TaskError
from eventloop.toolbox import one_line
from eventloop_llm.extras import optional_module

Row = Mapping[str, Any]


def read_rows(data: Path | str | Sequence[Row]) -> tuple[list[dict[str, Any]], str]:
    """Reads all rows; drops keys whose value is None, also in messages of a chat.

    Args:
        data: a file that ends in .jsonl or .parquet, or a folder that `Dataset.save_to_disk` wrote;
            in Python also the rows themselves.

    Returns:
        The rows, and the name of their source.

    Raises:
        TaskError: the file doesn't exist, has an unknown format, or has no rows.
        EventloopError: the library that reads it isn't installed.
    """
    if isinstance(data, Path | str):
        path = Path(data)
        name = path.name
        rows = _from_path(path)
    else:
        name = "data"
        rows = list(data)
    if not rows:
        raise TaskError(f"{name} has no row", fix="give a row for each chat")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise TaskError(
                f"row {number} of {name} is {one_line(repr(row), 80)}, not a mapping",
                fix='write each row as {"messages": [{"role": "user", "content": "..."}, ...]}',
            )
    return [_without_none(row) for row in rows], name


def _from_path(path: Path) -> list[Any]:
    if path.is_dir():
        return _from_folder(path)
    if not path.exists():
        raise TaskError(f"there is no {path}", fix="name a .jsonl or .parquet file, or a folder")
    if path.suffix == ".jsonl":
        return _from_lines(path)
    if path.suffix == ".parquet":
        parquet = optional_module("pyarrow.parquet", path.name)
        rows: list[Any] = parquet.read_table(path).to_pylist()
        return rows
    raise TaskError(
        f"{path.name} is neither a .jsonl nor a .parquet file",
        fix="name it by what it is, or give a folder of datasets",
    )


def _from_lines(path: Path) -> list[Any]:
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    raise TaskError(
                        f"line {number} of {path.name} is not JSON: {error}",
                        fix="write a JSON object on each line",
                    ) from error
    return rows


def _from_folder(path: Path) -> list[Any]:
    datasets = optional_module("datasets", f"the folder {path}")
    try:
        dataset = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise TaskError(
            f"{path} is not a folder of datasets: {one_line(str(error), 200)}",
            fix="write it with Dataset.save_to_disk",
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        raise TaskError(
            f"{path} has several sets: {', '.join(dataset)}",
            fix=f"name one of the folders, for example {path / next(iter(dataset))}",
        )
    return list(dataset)


def _without_none(nest: Any) -> Any:
    """Removes keys whose value is None: tables fill them in where a row has no such key."""
    if isinstance(nest, Mapping):
        return {key: _without_none(value) for key, value in nest.items() if value is not None}
    return [_without_none(value) for value in nest] if isinstance(nest, list) else nest
