"""A data loader whose workers are threads: for decoders that release the GIL, and free-threaded Python."""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from eventloop.toolbox import host_generators
from eventloop_streaming.stream import mixed_bits
from eventloop_streaming.thread_random_numbers import draws_from_global, noticed
from eventloop_streaming.thread_reads import Batch, Reader

_PROBES = 3  # another thread of the process may draw at the same time


class ThreadedDataLoader(DataLoader[Any]):
    """torch's `DataLoader`, with threads of this process in place of worker processes.

    Batches come in order. The samples of a batch are divided over all threads, so that the first batch is
    ready early. As with workers, a sample's random numbers depend only on its seed, for torch's random
    functions and for generators in the dataset. Draws from Python's or NumPy's global generator are
    refused.

    Args:
        dataset: map-style; read by several threads at once.
        batch_size: as in torch, like all other arguments.
        num_workers: number of threads, 1 or more.
        options: torch's other arguments, except for `worker_init_fn`, `multiprocessing_context` and
            `persistent_workers`, which threads don't support.

    Attributes:
        sample_seeds: set by the trainer: the source of each sample's seed.
    """

    sample_seeds: Any = None

    def __init__(
        self, dataset: Any, batch_size: int | None = 1, *, num_workers: int = 2, **options: Any
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise TypeError(
                f"a {type(dataset).__name__} has no samples by index, which threads could share; give "
                "a map-style data set, or train on eventloop_streaming.Batches"
            )
        if type(num_workers) is not int or num_workers < 1:
            raise ValueError(f"num_workers={num_workers!r} is not a number of threads, 1 or more")
        for name in ("worker_init_fn", "multiprocessing_context", "persistent_workers"):
            if options.get(name):
                raise ValueError(f"{name} is for worker processes; threads take none")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create .* worker processes")
            super().__init__(dataset, batch_size, num_workers=num_workers, **options)
        self._is_checked: list[bool] = []  # shared by all copies

    def __iter__(self) -> Any:
        """Returns an iterator over an epoch, whose threads end with it."""
        base = torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return _Epoch(self, int(base), self._is_checked)


class _Epoch(Iterator[Any]):
    """Batches of an epoch, in order; reads ahead as many batches as torch's workers."""

    def __init__(self, loader: ThreadedDataLoader, base: int, is_checked: list[bool]) -> None:
        self._loader = loader
        self._base = base
        self._num_drawn = 0
        batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._order = iter(batches)
        self._ahead: deque[Batch] = deque()
        self._tasks: SimpleQueue[tuple[Batch, range] | None] = SimpleQueue()
        self._reader = Reader(loader)
        self._is_checked = is_checked
        readers = [Reader(loader) for _ in range(loader.num_workers)]
        self._threads = [
            threading.Thread(
                target=reader.work, args=(self._tasks,), name="data loader", daemon=True
            )
            for reader in readers
        ]
        self._add()
        if self._ahead and not is_checked:
            self._check(self._ahead[0], host_generators(), 1, collates=False)
            is_checked.append(True)
        for thread in self._threads:
            thread.start()
        for _ in range((loader.prefetch_factor or 2) * loader.num_workers - 1):
            self._add()

    def __next__(self) -> Any:
        """Returns the next batch."""
        if not self._ahead:
            self.close()
            raise StopIteration
        batch = self._ahead.popleft()
        if not batch.is_done.wait(self._loader.timeout or None):
            raise RuntimeError(f"no batch within timeout={self._loader.timeout} s")
        if batch.moved:
            self._check(batch, batch.moved, len(batch.indices), collates=True)
        if batch.errors:
            error = batch.errors[min(batch.errors)]
            if isinstance(error, StopIteration):
                raise RuntimeError(
                    "StopIteration isn't the end of the data in a data set that is read by index"
                ) from error
            raise error
        self._add()
        return batch.result

    def close(self) -> None:
        """Ends the threads, and waits for their current samples."""
        self._stop()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(self._loader.timeout or None)

    def __del__(self) -> None:
        if hasattr(self, "_threads"):
            self._stop()

    def _stop(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._tasks.get_nowait()
        for _ in self._threads:
            self._tasks.put(None)

    def _add(self) -> None:
        """Schedules the next batch for reading, if there is one."""
        for drawn in self._order:
            indices = drawn if self._reader.makes_batches else [drawn]
            size = max(1, math.ceil(len(indices) / len(self._threads)))
            if self._reader.reads_batches:
                size = len(indices)
            ranges = [
                range(start, min(start + size, len(indices)))
                for start in range(0, len(indices), size)
            ]
            batch = Batch(indices, self._seeds(indices), len(ranges))
            self._ahead.append(batch)
            for positions in ranges:
                self._tasks.put((batch, positions))
            return

    def _seeds(self, indices: Sequence[Any]) -> list[int]:
        of_run = self._loader.sample_seeds
        if of_run is not None:
            return [*map(of_run.of_sample, indices), of_run.of_collate(indices[0])]
        start = self._base + self._num_drawn
        self._num_drawn += len(indices) + 1
        return [mixed_bits((start + offset) % 2**64) for offset in range(len(indices) + 1)]

    def _check(
        self, batch: Batch, names: Collection[str], num_samples: int, *, collates: bool
    ) -> None:
        """Reads samples in this thread, while the training draws no random numbers.

        Args:
            names: names of the global generators that must not advance.

        Raises:
            TaskError: a global generator advanced.
        """
        for attempt in range(_PROBES):
            probe = Batch(batch.indices[:num_samples], batch.seeds, 1 if collates else 2)
            with noticed(names, 1 + attempt) as moved:
                self._reader.read(probe, range(num_samples))
            if not moved:
                return
        reader = f"the data set {type(self._loader.dataset).__name__}"
        raise draws_from_global(reader, moved, batch.indices[0])
