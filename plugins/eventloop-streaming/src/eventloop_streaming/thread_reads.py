"""Reads batches in threads, each thread a part of a batch, and collates them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils.data import DataLoader

from eventloop.toolbox import map_tensors, reads_batches
from eventloop_streaming.thread_random_numbers import ThreadsData, fingerprints


class Batch:
    """A batch that several threads read in parts.

    Attributes:
        indices: indices of its samples; a single index for a loader without batches.
        seeds: a seed for each sample, and a seed for the collate function.
        result: the batch, once `is_done` is set, unless there is an error.
        moved: global generators that advanced meanwhile; the training's draws advance them, too.
    """

    def __init__(self, indices: Sequence[Any], seeds: list[int], num_parts: int) -> None:
        self.indices = indices
        self.seeds = seeds
        self.samples: list[Any] = [None] * len(indices)
        self.errors: dict[int, BaseException] = {}
        self.moved: set[str] = set()
        self.result: Any = None
        self.is_done = threading.Event()
        self._left = num_parts
        self._lock = threading.Lock()

    def end_part(self) -> bool:
        """Marks a part as read; returns whether it was the last part."""
        with self._lock:
            self._left -= 1
            return self._left == 0


class Reader:
    """Reads parts of batches, in a single thread."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._data = ThreadsData(loader.dataset)
        self._collate = loader.collate_fn
        self.makes_batches = loader.batch_sampler is not None
        self.reads_batches = reads_batches(loader.dataset)
        self._pins = loader.pin_memory and torch.accelerator.is_available()

    def work(self, tasks: SimpleQueue[tuple[Batch, range] | None]) -> None:
        """Reads parts until it receives None."""
        while (task := tasks.get()) is not None:
            self.read(*task)

    def read(self, batch: Batch, positions: range) -> None:
        """Reads a part of a batch; collates the batch after its last part."""
        prints_before = fingerprints()
        position = positions.start
        with self._data.draws:
            try:
                if self.makes_batches and self.reads_batches:
                    self._data.seed(batch.seeds[0])
                    plain = [_plain(index) for index in batch.indices]
                    batch.samples = self._data.dataset.__getitems__(plain)
                else:
                    for position in positions:
                        self._data.seed(batch.seeds[position])
                        batch.samples[position] = self._data.dataset[
                            _plain(batch.indices[position])
                        ]
            except BaseException as error:  # noqa: BLE001  the loop raises it
                error.add_note(
                    f"raised by sample {batch.indices[position]!r} in a thread of the data loader"
                )
                batch.errors[position] = error
            batch.moved |= {
                name
                for name, fingerprint in fingerprints().items()
                if prints_before.get(name) != fingerprint
            }
            if batch.end_part():
                self._end(batch)

    def _end(self, batch: Batch) -> None:
        prints_before = fingerprints()
        try:
            if not batch.errors:
                self._data.seed(batch.seeds[-1])
                samples = batch.samples if self.makes_batches else batch.samples[0]
                batch.result = self._collate(samples)
                if self._pins:
                    batch.result = map_tensors(lambda tensor: tensor.pin_memory(), batch.result)
        except BaseException as error:  # noqa: BLE001  the loop raises it
            error.add_note(f"raised by the collate function, of samples {[*batch.indices]!r:.200}")
            batch.errors[len(batch.indices)] = error
        batch.moved |= {
            name
            for name, fingerprint in fingerprints().items()
            if prints_before.get(name) != fingerprint
        }
        batch.samples = []
        batch.is_done.set()


def _plain(index: Any) -> Any:
    """Returns the index as from torch's samplers, without the trainer's mark."""
    return int(index) if isinstance(index, int) else index
