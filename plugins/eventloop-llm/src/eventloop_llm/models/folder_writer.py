"""Writes folders of save_pretrained in a background thread, and uploads them."""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop import Url
from eventloop_llm.extras import optional_module
from eventloop_llm.models.folders import CONFIG, Pretrained, whole_folders, write_folder

if TYPE_CHECKING:
    from eventloop_remote.objects import Objects


class FolderWriter:
    """Writes folders in the background during training.

    Args:
        pretrained: configuration and tokenizer of the folders.
        folder: where the folders go.
        keep: number of folders to keep; None for all.
        store: URL to upload the folders to; "" for no upload.

    Raises:
        UsageError: no package handles such URLs.
        EventloopError: eventloop-remote isn't installed.
    """

    def __init__(self, pretrained: Pretrained, folder: Path, keep: int | None, store: str) -> None:
        self._pretrained = pretrained
        self._folder = folder
        self._keep = keep
        self._objects = _opened(store) if store else None
        self._thread = ThreadPoolExecutor(1, "hf-checkpoints")
        self._tasks: list[Future[None]] = []

    def write(self, checkpoint: Path, name: str) -> None:
        """Schedules writing a folder of a checkpoint, which is removed afterwards."""
        self._tasks.append(self._thread.submit(self._write, checkpoint, name))

    def require(self) -> None:
        """Raises the error of a folder that couldn't be written."""
        finished_tasks = [task for task in self._tasks if task.done()]
        self._tasks = [task for task in self._tasks if not task.done()]
        for task in finished_tasks:
            task.result()

    def wait(self) -> None:
        """Waits until all folders are written; raises the error of a folder that couldn't be."""
        tasks = self._tasks
        self._tasks = []
        for task in tasks:
            task.result()

    def close(self) -> None:
        """Ends the thread when it has written everything."""
        self._thread.shutdown()

    def _write(self, checkpoint: Path, name: str) -> None:
        target = self._folder / name
        try:
            write_folder(checkpoint, target, self._pretrained)
        finally:
            shutil.rmtree(checkpoint, ignore_errors=True)
        if self._objects is not None:
            _upload(self._objects, target)
        if self._keep is not None:
            for old_folder in whole_folders(self._folder)[: -self._keep]:
                if self._objects is not None:
                    _remove(self._objects, old_folder.name)
                shutil.rmtree(old_folder)


def _opened(url: str) -> Objects:
    objects: Objects = optional_module("eventloop_remote.objects", f"store={url!r}").Objects(
        Url(url)
    )
    return objects


def _upload(objects: Objects, folder: Path) -> None:
    """Uploads a folder, its configuration last: a folder without it counts as incomplete."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in sorted(files, key=lambda path: path.name == CONFIG):
        objects.upload(path, f"{folder.name}/{path.relative_to(folder).as_posix()}")


def _remove(objects: Objects, name: str) -> None:
    """Removes a folder, its configuration first, so that a kill leaves an incomplete folder."""
    files = [file for file, size in objects.entries(name).items() if size is not None]
    for file in sorted(files, key=lambda file: file != CONFIG):
        objects.remove(f"{name}/{file}")
    objects.remove_folder(name)
