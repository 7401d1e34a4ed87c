"""The feed: takes training batches from a data loader, as many on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

from eventloop.data.batches import Count
from eventloop.data.combine import tell_epoch, too_few
from eventloop.data.loaders import source_of
from eventloop.errors import TaskError
from eventloop.rng import kept_generators

if TYPE_CHECKING:
    from eventloop.clock import Clock
    from eventloop.distributed.processes import Processes
    from eventloop.plugin.plans import Plans
    from eventloop.state import State

NOTHING = Count(0, 0, 0)


class Feed:
    """Takes batches from a data loader, epoch after epoch, and knows whether there is another.

    A loader with a known length is asked for a batch when it is wanted, not before; of any other,
    one batch is taken ahead, after everything that the batch before it caused.

    Args:
        processes: the ranks, each with a loader of its own; built on all of them at once.
        uneven: what becomes of the batches that some ranks have and others don't. pad: a rank
            that has run out repeats its first batch, which counts for nothing; drop: they are left
            out; error: they are an error.
        sample_seed: what random draws of a data set are tied to; None leaves them alone.
        counts_samples: whether a batch counts for its samples, and for nothing else.

    Attributes:
        used: whether an epoch has ever begun.
        num_batches: how many batches an epoch has; None where some loader doesn't know.
        is_even: whether each batch is known to count for as much on all ranks.

    Raises:
        TaskError: the lengths differ, and that is an error.
    """

    def __init__(
        self,
        dataloader: Any,
        processes: Processes,
        uneven: Literal["pad", "drop", "error"] = "pad",
        sample_seed: int | None = None,
        *,
        counts_samples: bool = False,
    ) -> None:
        self.dataloader = dataloader
        self.used = self.is_even = False
        self._counts_samples = counts_samples
        self._processes = processes
        self._uneven = uneven
        self._source = source_of(dataloader, processes, sample_seed)
        self._own_length = self._source.num_batches
        self.num_batches = self._agreed_length()
        may_pad = self.num_batches is None or self.num_batches != self._own_length
        self._keeps_first = processes.world_size > 1 and uneven == "pad" and may_pad
        self._first: Any = None
        self._iterator: Iterator[Any] | None = None
        self._ahead: list[Any] = []
        self._epoch = 0
        self._taken = 0
        self._is_repeated = False
        self._is_loaded = self._may_differ = False

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why it isn't known that a resumed run gets the same batches; nothing where it does."""
        return self._source.doubts

    @property
    def under_way(self) -> bool:
        """Whether an epoch has begun and hasn't ended."""
        return self._iterator is not None or self._is_loaded

    def is_ahead_of(self, clock: Clock) -> bool:
        """Returns whether a batch has been taken that isn't done."""
        return self.under_way and self._taken != clock.batch_in_epoch

    def start_epoch(self, epoch: int) -> None:
        """Begins an epoch, and tells its number to samplers that want it.

        Raises:
            TaskError: it has no batch, so that epochs would pass, or never end, untrained.
        """
        tell_epoch(self.dataloader, epoch)
        self._iterator, self._ahead, self._taken = self._source.start(epoch), [], 0
        self._epoch, self.used = epoch, True
        if self._may_differ:
            self._may_differ = False
            self._learn_lengths()
        if not self._has_own():
            raise TaskError(
                f"the train data loader gave no batch in epoch {epoch}",
                fix="give an iterable that starts anew each time, such as a list or a DataLoader; "
                "an iterator or a generator is used up after one epoch",
            )

    def has_next(self) -> bool:
        """Returns whether the epoch has another batch; on every rank alike.

        Raises:
            TaskError: some ranks have one and others don't, and that is an error.
        """
        if self.num_batches is not None:
            return self._taken < self.num_batches
        num_with = self._processes.count_true(self._has_own())
        world_size = self._processes.world_size
        if self._uneven == "error" and 0 < num_with < world_size:
            raise _uneven(f"{world_size - num_with} of {world_size} ranks have run out of batches")
        return num_with == world_size if self._uneven == "drop" else num_with > 0

    def has_ended(self) -> bool:
        """Returns whether nothing is left of the epoch; what it finds counts as not taken."""
        if not self._ahead:
            self._source.look_ahead(self._taken)
        return not self.has_next()

    def next(self) -> Any:
        """Returns the next batch, as the loader made it."""
        if self._iterator is None:
            self._iterator = self._rest()
        length = self._own_length
        self._is_repeated = not self._ahead if length is None else self._taken >= length
        try:
            if self._is_repeated:
                batch = self._first
            else:
                batch = self._ahead.pop() if self._ahead else next(self._iterator)
        except StopIteration as error:
            raise too_few("train data loader", self._taken, length) from error
        except Exception as error:
            self._blame(error)
            raise
        self._taken += 1
        if self._keeps_first and self._first is None:
            self._first = batch
        return batch

    def counted(self, count: Count) -> Count:
        """Returns what the batch at hand counts for: nothing, if it is repeated to pad."""
        return NOTHING if self._is_repeated else count

    def end_epoch(self) -> None:
        """Ends the epoch; what is left of it is dropped."""
        self._iterator, self._ahead, self._first = None, [], None
        self._is_loaded = False

    def state_dict(self) -> dict[str, Any]:
        """Returns where this rank is: a nest of plain values and tensors.

        What the loader has fetched, and what is held ahead, counts as not taken.
        """
        num_taken = self._taken if self.under_way else None
        return {
            "kind": self._source.kind,
            "used": self.used,
            "under_way": self.under_way,
            "epoch": self._epoch,
            "num_taken": self._taken,
            "num_batches": self.num_batches,
            "world_size": self._processes.world_size,
            # It can't always be read again: its source has moved on.
            "first": None if self._source.has_first else self._first,
            "position": self._source.state_dict(num_taken),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave; before the first batch.

        What is left of an epoch under way begins when it is asked for; the global generators stay
        as they are, then and now.

        Raises:
            TaskError: this loader can't give the batches that come next.
        """
        self._require_kind(state)
        under_way = state["under_way"]
        self.used, self._epoch = state["used"], state["epoch"]
        if self._other_ranks(state) and not self._source.suits_any_ranks:
            return  # each rank begins the next epoch with a loader of its own
        self._is_loaded, self._taken, self._first = under_way, state["num_taken"], state["first"]
        tell_epoch(self.dataloader, self._epoch)
        with kept_generators():
            self._source.load(state["position"], self._epoch, self._taken if under_way else None)
        self._learn_lengths()
        # An epoch that other ranks began may have another length than those to come.
        self._may_differ = under_way
        if under_way and self.num_batches != state["num_batches"]:
            raise TaskError(
                f"the run was stopped in an epoch of {state['num_batches']} batches with "
                f"{state['world_size']} ranks; now it has {self.num_batches} with "
                f"{self._processes.world_size}",
                fix="go on with the same data in global batches of the same size, or from a "
                "checkpoint at the end of an epoch",
            )

    def _other_ranks(self, state: Mapping[str, Any]) -> bool:
        return bool(state["world_size"] != self._processes.world_size)

    def _require_kind(self, state: Mapping[str, Any]) -> None:
        """Checks that this loader is of the kind that the run had, and can be shared out anew."""
        if state["kind"] != self._source.kind:
            raise TaskError(
                f"the run was begun with another kind of train data loader: {state['kind']}, "
                f"now {self._source.kind}",
                fix="go on with the data loader that the run was begun with",
            )
        is_free = not state["under_way"] or self._source.suits_any_ranks
        if self._other_ranks(state) and not is_free:
            raise TaskError(
                f"the run was stopped in mid-epoch with {state['world_size']} ranks, and only they "
                f"know where their data loaders were; now it has {self._processes.world_size}",
                fix=f"go on with {state['world_size']} ranks, or from a checkpoint at the end of "
                "an epoch",
            )

    def _rest(self) -> Iterator[Any]:
        """Begins what is left of the epoch that was loaded."""
        assert self._is_loaded
        rest = self._source.rest()
        if self._keeps_first and self._first is None and self._source.has_first:
            with kept_generators():
                self._first = self._source.first()
        return rest

    def _has_own(self) -> bool:
        if self._own_length is not None:
            return self._taken < self._own_length
        if not self._ahead:
            if self._iterator is None:
                self._iterator = self._rest()
            try:
                self._ahead += itertools.islice(self._iterator, 1)
            except Exception as error:
                self._blame(error)
                raise
        return bool(self._ahead)

    def _blame(self, error: Exception) -> None:
        error.add_note(f"raised by the train data loader, at batch {self._taken + 1} of its epoch")

    def _learn_lengths(self) -> None:
        self._own_length = self._source.num_batches
        self.num_batches = self._agreed_length()

    def _agreed_length(self) -> int | None:
        sizes = self._source.even_sizes if self._counts_samples else None
        everybody = self._processes.all_gather((self._own_length, sizes))
        self.is_even = sizes is not None and all(one == everybody[0] for one in everybody)
        lengths: list[int] = [length for length, _ in everybody]
        if None in lengths:
            return None
        if self._uneven == "error" and len(set(lengths)) > 1:
            raise _uneven(f"the ranks have {', '.join(map(str, lengths))} batches an epoch")
        return min(lengths) if self._uneven == "drop" else max(lengths)


def _uneven(what: str) -> TaskError:
    return TaskError(
        what,
        fix="set uneven to pad (a rank that has run out waits with a batch that counts for "
        "nothing) or to drop (what is left over isn't trained on)",
    )


class Feeds:
    """Knows which data loader training batches come from.

    Args:
        hooks: the plans of the run.
        processes: those that train together.

    Attributes:
        was_rebuilt: whether another data loader has taken the place of the first.
    """

    def __init__(self, hooks: Plans, processes: Processes) -> None:
        self._hooks = hooks
        self._processes = processes
        self._feed: Feed | None = None
        self.was_rebuilt = False

    @property
    def current(self) -> Feed:
        """What gives training batches now."""
        assert self._feed is not None
        return self._feed

    def take(self, state: State, dataloader: Any) -> None:
        """Takes training batches from this data loader from now on."""
        self.was_rebuilt = self._feed is not None
        state.train_dataloader = dataloader
        settings = state.settings
        sample_seed = settings.seed if settings.seed_samples else None
        # The core's own functions, where no plugin or task stands before or around them.
        actions = (self._hooks.count_batch, self._hooks.split_batch)
        counts = all(isinstance(one, MethodType) for one in actions)
        given = (dataloader, self._processes, settings.uneven, sample_seed)
        self._feed = Feed(*given, counts_samples=counts)
        state.num_batches = self._feed.num_batches
        if not self.was_rebuilt:
            state.epoch_length = state.num_batches

    def of_epoch(self, state: State) -> Feed:
        """Returns the feed of an epoch, the one under way or the next; rebuilt if a plugin asks."""
        feed = self._feed
        between = feed is not None and feed.used and not feed.under_way
        if between and self._hooks.should_rebuild_dataloader(state):
            self.take(state, self._hooks.build_train_dataloader(state))
        elif feed is None or feed.dataloader is not state.train_dataloader:
            self.take(state, state.train_dataloader)
        return self.current

    def are_ahead_of(self, clock: Clock) -> bool:
        """Returns whether a batch has been taken that isn't done."""
        return self._feed is not None and self._feed.is_ahead_of(clock)

    def give_up(self) -> None:
        """Lets the data loader go, with its workers."""
        self._feed = None

    def state_dict(self) -> dict[str, Any]:
        """Returns whether the data loader was replaced; each rank's feed knows its position."""
        return {"was_rebuilt": self.was_rebuilt}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self.was_rebuilt = state["was_rebuilt"]
