"""A trainer's data for the loop: groups of batches, one for each optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import skip_first_batches

from eventloop_transformers.random_numbers import (
    Randoms,
    own_states,
    rng_states,
    set_own_states,
    set_rng_states,
)


class Update:
    """The batches of an optimizer step.

    Args:
        samples: batches of the data loader, each a microbatch.
        num_items: number of tokens in them that the trainer counts; None if it doesn't count them.
    """

    __slots__ = ("num_items", "samples")

    def __init__(self, samples: Sequence[Any], num_items: Any) -> None:
        self.samples = samples
        self.num_items = num_items


@dataclass(frozen=True)
class Resumed:
    """The position at which a checkpoint of Hugging Face's resumes training.

    Args:
        path: folder of the checkpoint; None without one.
        epoch: the epoch.
        num_batches: number of batches of the epoch that are done.
    """

    path: str | None
    epoch: int
    num_batches: int


class Updates:
    """A trainer's data loader as updates, which can resume at any update.

    Args:
        trainer: reads batches from its data loader with `get_batch_samples`.
        dataloader: the training data.
        steps_in_epoch: number of batches in an epoch.
        resumed: position at which a checkpoint of Hugging Face resumes training.
        keeps_position: whether the position may be saved, which requires states of random generators.

    Attributes:
        epoch: number of the epoch, set before iterating.
        is_under_way: whether the next iteration continues an epoch from a checkpoint.
    """

    def __init__(
        self,
        trainer: Any,
        dataloader: Any,
        steps_in_epoch: int,
        resumed: Resumed,
        *,
        keeps_position: bool,
    ) -> None:
        self._trainer = trainer
        self._loader = dataloader
        self._resumed = resumed
        self._keeps_position = keeps_position
        accumulated = trainer.args.gradient_accumulation_steps
        num_full, remainder = divmod(steps_in_epoch, accumulated)
        self._sizes = [accumulated] * num_full + ([remainder] if remainder else [])
        self._at_first = own_states(dataloader)
        self.epoch = 0
        self.is_under_way = False
        self._start: Randoms | None = None
        self._batches: _Batches | None = None
        self._num_updates = 0
        self._loaded: Mapping[str, Any] = {}

    @property
    def num_skipped(self) -> int:
        """The number of batches of the epoch that the checkpoint of Hugging Face skips."""
        return self._resumed.num_batches if self.epoch == self._resumed.epoch else 0

    def __iter__(self) -> Iterator[Update]:
        """Returns the updates of the epoch, or the remaining updates of an epoch from a checkpoint."""
        loaded = self._loaded
        self._loaded = {}
        return self._updates(self._continued(loaded)) if self.is_under_way else self._updates()

    def rewind(self) -> None:
        """Discards a batch that was read before training began."""
        set_own_states(self._loader, self._at_first)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the epoch, and the states of random generators."""
        if self._loaded or self._batches is None or self._start is None:
            return dict(self._loaded)
        return {
            "resumed": [self._resumed.path, self._resumed.epoch, self._resumed.num_batches],
            "num_updates": self._num_updates,
            "num_batches": self._batches.num,
            "start": self._start.state_dict(),
            "before": self._batches.before.state_dict() if self._batches.before else None,
            "own": own_states(self._loader),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a position from `state_dict`."""
        self._loaded = dict(state)
        if state:
            self._resumed = Resumed(*state["resumed"])
            set_own_states(self._loader, state["own"])

    def _updates(self, batches: Iterator[Any] | None = None) -> Iterator[Update]:
        trainer = self._trainer
        first_idx = self._num_updates
        is_first = False
        skipped = 0
        if batches is None:
            is_first = self._resumed.path is not None and self.epoch == self._resumed.epoch
            skipped = self.num_skipped
            if is_first and not skipped:
                trainer._load_rng_state(self._resumed.path)
            first_idx = skipped // trainer.args.gradient_accumulation_steps
            batches = self._begun(skipped)
        remaining = list(enumerate(self._sizes))[first_idx:]
        # Data without a batch yields an empty update, which is reported; an epoch resumed at its end, none.
        for idx, size in remaining if remaining or self.is_under_way else [(0, 1)]:
            samples, num_items = trainer.get_batch_samples(batches, size, trainer.args.device)
            if skipped:
                # Skipped batches consumed random numbers, too.
                trainer._load_rng_state(self._resumed.path)
                skipped = 0
            if not samples and idx > first_idx:
                return
            self._num_updates = idx + 1
            yield Update(samples, num_items)

    def _begun(self, skipped: int) -> Iterator[Any]:
        """Returns an iterator over an epoch's batches, started as the trainer does."""
        if self._keeps_position:
            self._start = Randoms(rng_states(), own_states(self._loader))
        loader = skip_first_batches(self._loader, skipped) if skipped else self._loader
        self._num_updates = 0
        batches: Iterator[Any] = iter(self._with_epoch(loader))
        if not self._keeps_position:
            return batches
        self._batches = _Batches(batches, skipped)
        return self._batches

    def _continued(self, state: Mapping[str, Any]) -> Iterator[Any]:
        """Returns an iterator over the remaining batches of an epoch from a checkpoint.

        Data loaders of accelerate read a batch ahead. So the last two finished batches are read again,
        and the batch that was read ahead draws the same random numbers as before.
        """
        num = state["num_batches"]
        self._start = start = Randoms.of(state["start"])
        set_rng_states(start.states)
        set_own_states(self._loader, start.own)
        num_reread = min(num, 2)
        loader = (
            skip_first_batches(self._loader, num - num_reread) if num > num_reread else self._loader
        )
        self._batches = batches = _Batches(iter(self._with_epoch(loader)), num - num_reread)
        self._num_updates = state["num_updates"]
        for idx in range(num_reread):
            if idx == num_reread - 1 and state["before"] is not None:
                set_rng_states(Randoms.of(state["before"]).states)
            next(batches)
        return batches

    def _with_epoch(self, loader: Any) -> Any:
        """Sets the epoch of the data loader and of its sampler; returns the data loader."""
        sampler = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
        for loader_or_sampler in (loader, sampler):
            set_epoch = getattr(loader_or_sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
        return loader


class _Batches:
    """Counts batches, and records the states of random generators before the last batch.

    Args:
        batches: yields the batches.
        num: number of batches before them.
    """

    def __init__(self, batches: Iterator[Any], num: int) -> None:
        self._batches = batches
        self.num = num
        self.before: Randoms | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        states = rng_states()
        batch = next(self._batches)
        self.num = self.num + 1
        self.before = Randoms(states, {})
        return batch
