"""The data of a trainer as the loop takes them: what an optimizer step is made of, step after step."""

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
    """What an optimizer step is made of.

    Args:
        samples: batches of the data loader, of which each is a microbatch.
        num_items: how many tokens count in them, as the trainer counts; None where it doesn't.
    """

    __slots__ = ("num_items", "samples")

    def __init__(self, samples: Sequence[Any], num_items: Any) -> None:
        self.samples = samples
        self.num_items = num_items


@dataclass(frozen=True)
class Resumed:
    """The position at which a checkpoint of Hugging Face's resumes training.

    Args:
        path: its folder; None for none.
        epoch: the epoch.
        num_batches: how many batches of the epoch are over.
    """

    path: str | None
    epoch: int
    num_batches: int


class Updates:
    """A trainer's data loader, in updates, from any of them on.

    Args:
        trainer: takes batches from its data loader by `get_batch_samples`.
        dataloader: what it trains on.
        steps_in_epoch: how many batches an epoch has.
        resumed: where a checkpoint of Hugging Face's says that training goes on.
        keeps_position: whether the position may be saved, for which the random generators are noted.

    Attributes:
        epoch: the number of the epoch, set before it is iterated over.
        is_under_way: whether the next iteration is over the rest of the epoch that was loaded.
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
        whole, rest = divmod(steps_in_epoch, accumulated)
        self._sizes = [accumulated] * whole + ([rest] if rest else [])
        self._at_first = own_states(dataloader)
        self.epoch = 0
        self.is_under_way = False
        self._start: Randoms | None = None
        self._batches: _Batches | None = None
        self._num_updates = 0
        self._loaded: Mapping[str, Any] = {}

    @property
    def num_skipped(self) -> int:
        """How many batches of the epoch are over by the checkpoint of Hugging Face's."""
        return self._resumed.num_batches if self.epoch == self._resumed.epoch else 0

    def __iter__(self) -> Iterator[Update]:
        """Returns the updates of the epoch, or the rest of the loaded one, which is found now."""
        loaded = self._loaded
        self._loaded = {}
        return self._updates(self._found(loaded)) if self.is_under_way else self._updates()

    def rewind(self) -> None:
        """Forgets a batch that was looked at before training began."""
        set_own_states(self._loader, self._at_first)

    def state_dict(self) -> dict[str, Any]:
        """Returns where it is in the epoch, and where the random generators were."""
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
        """Restores what `state_dict` returned."""
        self._loaded = dict(state)
        if state:
            self._resumed = Resumed(*state["resumed"])
            set_own_states(self._loader, state["own"])

    def _updates(self, found: Iterator[Any] | None = None) -> Iterator[Update]:
        trainer = self._trainer
        first = self._num_updates
        is_first = False
        skipped = 0
        if found is None:
            is_first = self._resumed.path is not None and self.epoch == self._resumed.epoch
            skipped = self.num_skipped
            if is_first and not skipped:
                trainer._load_rng_state(self._resumed.path)
            first = skipped // trainer.args.gradient_accumulation_steps
            found = self._begun(skipped)
        left = list(enumerate(self._sizes))[first:]
        # Data without a batch make an empty update, to be told of; an epoch resumed at its end makes none.
        for idx, size in left if left or self.is_under_way else [(0, 1)]:
            samples, num_items = trainer.get_batch_samples(found, size, trainer.args.device)
            if skipped:
                # What was skipped has drawn.
                trainer._load_rng_state(self._resumed.path)
                skipped = 0
            if not samples and idx > first:
                return
            self._num_updates = idx + 1
            yield Update(samples, num_items)

    def _begun(self, skipped: int) -> Iterator[Any]:
        """Returns an iterator over an epoch's batches, as the trainer begins one."""
        if self._keeps_position:
            self._start = Randoms(rng_states(), own_states(self._loader))
        loader = skip_first_batches(self._loader, skipped) if skipped else self._loader
        self._num_updates = 0
        batches: Iterator[Any] = iter(self._with_epoch(loader))
        if not self._keeps_position:
            return batches
        self._batches = _Batches(batches, skipped)
        return self._batches

    def _found(self, state: Mapping[str, Any]) -> Iterator[Any]:
        """Returns an iterator over the rest of a loaded epoch.

        Data loaders of accelerate read a batch ahead. So the last two batches that are over are read
        once more, and the one that was read ahead draws what it drew.
        """
        num = state["num_batches"]
        self._start = start = Randoms.of(state["start"])
        set_rng_states(start.states)
        set_own_states(self._loader, start.own)
        again = min(num, 2)
        loader = skip_first_batches(self._loader, num - again) if num > again else self._loader
        self._batches = batches = _Batches(iter(self._with_epoch(loader)), num - again)
        self._num_updates = state["num_updates"]
        for idx in range(again):
            if idx == again - 1 and state["before"] is not None:
                set_rng_states(Randoms.of(state["before"]).states)
            next(batches)
        return batches

    def _with_epoch(self, loader: Any) -> Any:
        """Returns the data loader after setting its epoch and that of its sampler."""
        sampler = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
        for one in (loader, sampler):
            set_epoch = getattr(one, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
        return loader


class _Batches:
    """Counts batches, and notes where the random generators were before the last one.

    Args:
        batches: yields them.
        num: how many there were before.
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
