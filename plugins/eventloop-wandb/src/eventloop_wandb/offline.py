"""Reads W&B's offline files.

W&B writes an offline run into `offline-run-DATE-ID/run-ID.wandb`: records, which are protocol buffers, in
the log format of LevelDB, https://github.com/google/leveldb/blob/main/doc/log_format.md, after a header
of seven bytes. A block of 32 KiB reaches the disk when it is full, and the last block when the run is
finished. Checked with wandb 0.21 and 0.31, whose own reader isn't public.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Iterator
from typing import Any

from eventloop.toolbox import RunFolder

_MAGIC = b":W&B"
_NUM_HEADER_BYTES = 7
_BLOCK_BYTES = 32 * 1024
_RECORD = struct.Struct("<IHB")  # checksum, length, kind
_FULL = 1
_LAST = 4
_LONGEST_WAIT_S = 10.0


def offline_rows(folder: RunFolder, run_id: str) -> dict[int, dict[str, Any]]:
    """Returns the rows of a run's history, by step, from all processes of the run.

    Args:
        folder: the folder passed to W&B as `dir`.
    """
    rows: dict[int, dict[str, Any]] = {}
    # If two processes start within a second, the later one's folder has a number at its end.
    of_run = re.compile(rf"offline-run-\d+_\d+-{re.escape(run_id)}(-\d+)?")
    for name in folder.names("wandb"):
        if of_run.fullmatch(name):
            try:
                data = folder.read(f"wandb/{name}/run-{run_id}.wandb", -1)
            except FileNotFoundError:
                continue  # a process that was killed at its start
            for step, row in _history(data):
                rows.setdefault(step, row)
    return rows


def wait_for_end(folder: RunFolder, name: str, run_id: str) -> None:
    """Waits until the last block of a finished run is written; W&B itself doesn't wait.

    Args:
        name: name of the folder that W&B created for the process.
    """
    give_up_at = time.monotonic() + _LONGEST_WAIT_S
    while time.monotonic() < give_up_at:
        *_, last_message = (b"", *_messages(folder.read(f"wandb/{name}/run-{run_id}.wandb", -1)))
        if _record(last_message).WhichOneof("record_type") == "exit":
            return
        time.sleep(0.02)


def _history(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    for message in _messages(data):
        record = _record(message)
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                name, *within = item.nested_key or [item.key]
                value = json.loads(item.value_json)
                if within:  # a table
                    row.setdefault(name, {})["/".join(within)] = value
                else:
                    row[name] = value
            yield record.history.step.num, row


def _record(message: bytes) -> Any:
    from wandb.proto.wandb_internal_pb2 import Record  # not public, 0.21 to 0.31

    return Record.FromString(message)


def _messages(data: bytes) -> Iterator[bytes]:
    """Yields the messages up to the first incomplete one."""
    if not data.startswith(_MAGIC):
        return
    offset = _NUM_HEADER_BYTES
    message = b""
    while offset + _RECORD.size <= len(data):
        num_left = _BLOCK_BYTES - offset % _BLOCK_BYTES
        if num_left < _RECORD.size:  # too little for a record
            offset += num_left
            continue
        _, length, kind = _RECORD.unpack_from(data, offset)
        offset += _RECORD.size
        if not kind or offset + length > len(data):
            return
        message += data[offset : offset + length]
        offset += length
        if kind in (_FULL, _LAST):
            yield message
            message = b""
