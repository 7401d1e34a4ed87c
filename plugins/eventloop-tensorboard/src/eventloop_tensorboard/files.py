"""A file of events for TensorBoard."""

from __future__ import annotations

import os
import socket
import time
from typing import BinaryIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog

# The base of torch's and TensorBoard's own writers (tensorboard 2.21). Those write from a thread, which
# a forked worker of a data loader lacks, and name files by the second, so that after a quick restart
# the new file could be sorted before the old one.
from tensorboard.summary.writer.record_writer import RecordWriter

from eventloop.toolbox import RunFolder


class EventFile:
    """The events of a process, in a folder of its run's folder.

    TensorBoard reads the files of a folder in the order of their names. Nothing is buffered: when `append`
    returns, the operating system has the events. Folder and file are created with the first event.

    Args:
        run: the run's folder.
        name: name of the folder in it.
    """

    def __init__(self, run: RunFolder, name: str) -> None:
        self.folder = run.path / name
        self._run = run
        self._file: BinaryIO | None = None

    def append(self, *events: bytes) -> None:
        """Writes events, each as returned by `Event.SerializeToString`.

        Raises:
            OSError: the file can't be written.
        """
        if self._file is None:
            self._file = self._open()
        writer = RecordWriter(self._file)
        for event in events:
            writer.write(event)
        self._file.flush()

    def is_first(self) -> bool:
        """Whether no process has written into the folder yet."""
        return not self._names()

    def close(self) -> None:
        """Closes the file; the next `append` opens a new file."""
        if self._file is not None:
            file = self._file
            self._file = None
            file.close()

    def _open(self) -> BinaryIO:
        number = time.time_ns()
        # The last file may come from a machine whose clock was ahead.
        for name in self._names():
            digits = name.split(".")[3]
            number = max(number, int(digits) + 1 if digits.isdigit() else 0)
        name = f"events.out.tfevents.{number:020}.{socket.gethostname()}.{os.getpid()}"
        file = os.fdopen(self._run.create(f"{self.folder.name}/{name}"), "wb")
        version = Event(wall_time=time.time(), file_version="brain.Event:2")
        RecordWriter(file).write(version.SerializeToString())
        return file

    def _names(self) -> list[str]:
        names = self._run.names(self.folder.name)
        return [name for name in names if name.startswith("events.out.tfevents.")]


def start_of_process(step: int) -> Event:
    """Returns the event that hides the entries of earlier files from this step on."""
    event = Event(wall_time=time.time(), step=step)
    event.session_log.status = SessionLog.START
    return event
