"""Lightning's loop over epochs, replaced by eventloop's: only its data, limits and progress remain."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import torch

# Private parts of Lightning's own fit loop (lightning 2.6.6).
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.trainer.connectors.data_connector import (
    _check_dataloader_iterable,
    _parse_num_batches,
    _process_dataloader,
    _request_dataloader,
    _resolve_overfit_batches,
)
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import has_len_all_ranks
from torch.utils.data import DataLoader, IterableDataset

from eventloop import PluginError

_SHORTEST = "min_size"


class FitLoop(_FitLoop):
    """Holds data, limits and progress of a fit for callbacks; eventloop's loop runs the fit.

    Attributes:
        loader: source of the loop's batches; None before it is set up.
        num_batches: number of batches in an epoch; infinite if unknown.
        has_steps: whether the arguments allow at least a single batch.
        runs: whether the run has an epoch; `should_stop` may have been set before the first.
        first: epochs and steps of earlier fits, before the run began.
    """

    loader: Any = None
    _combined_loader: CombinedLoader | None
    num_batches: float = math.inf
    has_steps = runs = True
    first: tuple[int, int] = (0, 0)

    def setup_data(self) -> None:
        """Requests the training data, unless they are loaded and don't need a reload."""
        if self._combined_loader is not None and not self._should_reload_train_dl:
            return
        trainer = self.trainer
        is_first = self._combined_loader is None
        if trainer.limit_train_batches == 0:
            return
        combined = self._request()
        trainer.strategy.barrier("train_dataloader()")
        lengths = [self._length(loader) for loader in combined.flattened]
        combined.limits = lengths
        self._combined_loader = combined
        self._last_train_dl_reload_epoch = trainer.current_epoch
        self.num_batches = (min if combined._mode == _SHORTEST else max)(lengths)
        self.max_batches = self.num_batches
        self.loader = _for_the_loop(combined, is_sized=not math.isinf(self.num_batches))
        self._set_val_interval()
        if not is_first or not self.has_steps or self.first[0]:
            self.draw_seeds()

    def draw_seeds(self) -> None:
        """Draws the random number that an iterator of a data loader draws, where eventloop makes none.

        Lightning creates an iterator when it requests a data loader, and for a reloaded one, or one of a
        later fit, creates it twice. Drawing as often keeps later random numbers the same.
        """
        for loader in [] if self._combined_loader is None else self._combined_loader.flattened:
            if isinstance(loader, DataLoader):
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)

    def _request(self) -> CombinedLoader:
        """Returns the data loader, or several, as Lightning hands them to its loop."""
        trainer = self.trainer
        source = self._data_source
        train_data = _request_dataloader(source)
        is_combined = isinstance(train_data, CombinedLoader)
        combined = train_data if is_combined else CombinedLoader(train_data, "max_size_cycle")
        if combined._mode == "sequential":
            raise PluginError(
                "a CombinedLoader to train with can't be sequential",
                fix="give it mode='max_size_cycle', 'max_size' or 'min_size'",
            )
        if trainer.overfit_batches > 0:
            _resolve_overfit_batches(combined, mode=RunningStage.TRAINING)
        loaders = []
        for loader in combined.flattened:
            _check_dataloader_iterable(loader, source, TrainerFn.FITTING)
            stage = RunningStage.TRAINING
            loaders.append(_process_dataloader(trainer, TrainerFn.FITTING, stage, loader))
        combined.flattened = loaders
        return combined

    def _length(self, loader: Any) -> float:
        trainer = self.trainer
        allows_none = trainer.lightning_module.allow_zero_length_dataloader_with_multiple_devices
        has_length = has_len_all_ranks(loader, trainer.strategy, allows_none)
        length = len(loader) if has_length else math.inf
        return _parse_num_batches(RunningStage.TRAINING, length, trainer.limit_train_batches)

    def _set_val_interval(self) -> None:
        """Sets after how many batches to validate, as Lightning's loop does."""
        trainer = self.trainer
        interval = self.trainer.val_check_interval
        if trainer._val_check_time_interval is not None:
            trainer.val_check_batch = None
            trainer._train_start_time = trainer._last_val_time = time.monotonic()
        elif isinstance(interval, int):
            trainer.val_check_batch = interval
            is_late = interval > self.max_batches and trainer.check_val_every_n_epoch is not None
            if is_late and trainer.limit_val_batches > 0:
                raise PluginError(
                    f"val_check_interval={interval} is more than an epoch's batches, {self.max_batches}",
                    fix="give check_val_every_n_epoch=None to count over epochs, or limit_val_batches=0",
                )
        elif math.isinf(self.max_batches):
            if interval != 1.0:
                raise PluginError(
                    f"val_check_interval={interval} is a part of an epoch, whose length isn't known",
                    fix="give it as an int, a number of batches",
                )
            trainer.val_check_batch = math.inf
        else:
            trainer.val_check_batch = max(1, int(self.max_batches * interval))


class Combined:
    """Several data loaders, combined by Lightning batch by batch.

    Args:
        loader: Lightning's combination.
    """

    def __init__(self, loader: CombinedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _, _ in self._loader)


class WithLast:
    """A data loader without a length that knows whether a batch is its last.

    It reads a batch ahead, as Lightning does.

    Args:
        loader: an iterable of batches.

    Attributes:
        is_last: whether the latest batch was the last.
        ahead: the batch that was read ahead, if any; saved in checkpoints.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.is_last = False
        self.ahead: list[Any] = []

    @property
    def dataset(self) -> Any:
        """The data set of the loader, by which messages call it; the loader itself if it has none."""
        return getattr(self._loader, "dataset", self._loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        self.is_last = False
        self.ahead = [*itertools.islice(batches, 1)]
        while self.ahead:
            batch = self.ahead.pop()
            self.ahead = [*itertools.islice(batches, 1)]
            self.is_last = not self.ahead
            yield batch


def _for_the_loop(combined: CombinedLoader, *, is_sized: bool) -> Any:
    """Returns the loader for eventloop's loop; a single data loader stays unwrapped, so that it can resume."""
    is_alone = combined.iterables is combined.flattened[0] if combined.flattened else False
    loader: Any = combined.flattened[0] if is_alone else Combined(combined)
    is_iterable = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    return loader if is_sized and not is_iterable else WithLast(loader)
