"""Writes in the background: a copy of everything on the host, and a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from eventloop.checkpoint.encoding import MAX_DEPTH, is_dense
from eventloop.training.tensor_slices import TensorSlice

_PLAIN = (type(None), bool, int, float, str)  # what is copied with the dict that holds it


class Writer:
    """Runs tasks in a thread, one after the other; `failure` is what one raised, until taken."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def start(self, task: Callable[[], object]) -> None:
        """Starts a task when the previous one has finished."""
        self.wait()

        def run() -> None:
            try:
                task()
            except BaseException as error:  # noqa: BLE001  told to who asks next
                self.failure = error

        # No daemon: an interpreter that ends waits for what is being written.
        self._thread = threading.Thread(target=run, name="eventloop-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits for the running task."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class Snapshot:
    """Copies nests of tensors to the host.

    Copies from a GPU are asynchronous: call `wait` before reading them. Each copy reuses the
    pinned memory of the previous one.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the nest with copies of its tensors, which overwrite those of the call before."""
        self._used: set[tuple[object, ...]] = set()
        self._copied = None
        taken = {name: self._copy((name,), value) for name, value in parts.items()}
        self._buffers = {path: self._buffers[path] for path in self._used}
        return taken

    def wait(self) -> None:
        """Waits until the copies are complete; can be called from another thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, path: tuple[object, ...], value: Any) -> Any:
        """Copies a nest; values that can't be saved are refused later, by the writer."""
        if len(path) > MAX_DEPTH + 1:
            return value
        if isinstance(value, Tensor):
            return self._copy_tensor(path, value.detach()) if is_dense(value) else value
        if isinstance(value, TensorSlice):
            held = value.tensor.detach()
            if value.is_copy:
                held = held.new_empty((0,) * held.ndim)
            offsets = (0,) * held.ndim if value.is_copy else value.offsets
            return TensorSlice(self._copy_tensor(path, held), value.shape, offsets)
        if isinstance(value, Mapping):
            copies: dict[Any, Any] = {}
            for key, one in value.items():
                copies[key] = one if type(one) in _PLAIN else self._copy((*path, key), one)
            return copies
        if type(value) in (list, tuple):
            items = [self._copy((*path, idx), one) for idx, one in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _copy_tensor(self, path: tuple[object, ...], tensor: Tensor) -> Tensor:
        if tensor.device.type != "cuda":
            # Given back when it is written: a run on the host would hold all of itself twice.
            return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        self._used.add(path)
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._buffers[path] = buffer
        buffer.copy_(tensor, non_blocking=True)
        if self._copied is None:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(torch.cuda.current_stream(tensor.device))
        return buffer
