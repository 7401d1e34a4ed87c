"""A file of events that TensorBoard reads."""

from __future__ import annotations

import os
import socket
import time
from typing import BinaryIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog

# What torch's and TensorBoard's own writers are built on (tensorboard 2.21). They write from a
# thread, which a forked worker of a data loader lacks, and name files by the second, by which a
# quick restart could come before what it goes on from.
from tensorboard.summary.writer.record_writer import RecordWriter

from eventloop.toolbox import RunFolder


class EventFile:
    """The events of one process, in a folder of its run's.

    TensorBoard reads the files of a folder one after the other, in the order of their names.
    Nothing is held back: what `append` was given is in the operating system's hands when it
    returns. Folder and file are made when the first event comes.

    Args:
        run: the run's folder.
        name: of the folder in it.
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
        """Returns whether no process has written into the folder."""
        return not self._names()

    def close(self) -> None:
        """Closes the file; the next `append` opens another one."""
        if self._file is not None:
            file = self._file
            self._file = None
            file.close()

    def _open(self) -> BinaryIO:
        number = time.time_ns()
        # The clock of the machine that wrote the last one may have been ahead.
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
        return [one for one in names if one.startswith("events.out.tfevents.")]


def start_of_process(step: int) -> Event:
    """Returns the event that hides what earlier files of a folder have from this step on."""
    event = Event(wall_time=time.time(), step=step)
    event.session_log.status = SessionLog.START
    return event
