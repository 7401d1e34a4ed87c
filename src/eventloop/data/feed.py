"""The feed: takes training batches from a data loader, the same number on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

from eventloop.data.batches import Count
from eventloop.data.loaders import loader_of
from eventloop.data.microbatches import microbatches_of
from eventloop.data.positions import Position
from eventloop.data.token_weights import may_weigh_tokens
from eventloop.data.too_few_batches import no_batch_in_epoch, too_few
from eventloop.errors import TaskError
from eventloop.forms import NonNegativeInt, NumRanks, as_dict, from_dict
from eventloop.rng import kept_generators

if TYPE_CHECKING:
    from eventloop.clock import Clock
    from eventloop.distributed.processes import Processes
    from eventloop.plugin.plans import Plans
    from eventloop.state import State

NO_SAMPLES = Count(0, 0)


@dataclass(frozen=True)
class ReadAhead:
    """Batches that were read but not trained on yet.

    Attributes:
        peeked: batches read by the feed.
        of_source: batches read by the feed's source.
    """

    peeked: list[Any]
    of_source: list[Any]


@dataclass(frozen=True)
class FeedState:
    """The position of a rank in its data.

    Attributes:
        kind: the kind of the source of the batches.
        used: whether an epoch has ever begun.
        under_way: whether an epoch has begun and not ended.
        epoch: the number of the epoch.
        num_taken: the number of batches that were taken in the epoch, including padding.
        num_padding: the number of these that repeated a batch, because other ranks had more.
        num_batches: the number of batches of an epoch; None if a rank doesn't know.
        world_size: the number of ranks that share the data.
        first: the first batch of the epoch, if the source can't read it again.
        ahead: batches read ahead; None if the source reads the same batches again.
        position: the position of the source.
    """

    kind: str
    used: bool
    under_way: bool
    epoch: NonNegativeInt
    num_taken: NonNegativeInt
    num_padding: NonNegativeInt
    num_batches: NonNegativeInt | None
    world_size: NumRanks
    first: Any
    ahead: ReadAhead | None
    position: Position


@dataclass(frozen=True)
class FeedsState:
    """Whether a plugin has replaced the train data loader."""

    was_rebuilt: bool


class Feed:
    """Yields batches of a data loader, epoch after epoch, and knows whether another batch follows.

    If the loader's length is known, a batch is fetched when it is needed. Otherwise the next batch is
    fetched as soon as all work on the previous batch is done, to know whether there is one.

    Args:
        dataloader: any iterable of batches.
        processes: the ranks, each with its own loader. Collective: every rank must build its feed.
        uneven: how to handle batches that not all ranks have. pad: an exhausted rank repeats its
            first batch with weight 0; drop: the batches are left out; error: they are an error.
        sample_seed: the seed for the random draws of a data set; None doesn't seed them.
        counts_samples: whether a batch is weighted only by its samples, not by tokens.

    Attributes:
        used: whether an epoch has ever begun.
        num_taken: the number of batches that were taken in the epoch.
        num_batches: the number of batches in an epoch; None if a loader doesn't know its length.
        is_even: whether each batch is known to have the same weight on all ranks.
        is_padding: whether the latest batch only repeats a batch, with weight 0.

    Raises:
        TaskError: the lengths differ, and `uneven` is "error".
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
        self.used = False
        self._counts_samples = counts_samples
        self._processes = processes
        self._uneven = uneven
        self._pads = processes.data_world_size > 1 and uneven == "pad"
        self._loader = loader_of(dataloader)
        self._source = self._loader.source(processes, sample_seed)
        self._learn_lengths()
        self._first: Any = None
        self._iterator: Iterator[Any] | None = None
        self._peeked: list[Any] = []
        self._latest: Any = None
        self._loaded_ahead: ReadAhead | None = None
        self._epoch = 0
        self.num_taken = 0
        self._num_own = 0  # batches taken, without padding
        self.is_padding = self._is_loaded = False

    @property
    def resume_risks(self) -> tuple[str, ...]:
        """The reasons why a resumed run may get other batches, at most one per data loader."""
        return self._source.resume_risks

    @property
    def under_way(self) -> bool:
        """Whether an epoch has begun and hasn't ended."""
        return self._iterator is not None or self._is_loaded

    def start_epoch(self, epoch: int) -> None:
        """Begins an epoch, and calls `set_epoch` of its samplers.

        Raises:
            TaskError: the epoch has no batch. Epochs would pass, or never end, without training.
        """
        self._loader.set_epoch(epoch)
        self._iterator = self._source.batches(epoch)
        self._peeked = []
        self.num_taken = 0
        self._num_own = 0
        self._epoch = epoch
        self.used = True
        # The length may change: a sampler's may depend on the epoch, or on a resumed order.
        self._learn_lengths()
        if not self._has_own():
            raise no_batch_in_epoch(self._loader, epoch)

    def has_next(self) -> bool:
        """Returns whether the epoch has another batch. Collective; the answer is the same on all ranks.

        Raises:
            TaskError: only some ranks have another batch, and `uneven` is "error".
        """
        if self.num_batches is not None:
            return self.num_taken < self.num_batches
        num_with = self._processes.count_true(self._has_own())
        world_size = self._processes.world_size
        if self._uneven == "error" and 0 < num_with < world_size:
            raise _uneven(f"{world_size - num_with} of {world_size} ranks have run out of batches")
        return num_with == world_size if self._uneven == "drop" else num_with > 0

    def has_ended(self) -> bool:
        """Returns whether the epoch is exhausted. A batch that is fetched for this isn't taken yet."""
        if not self._peeked:
            self._source.before_peek(self._num_own)
        return not self.has_next()

    def next(self) -> Any:
        """Returns the next batch, as the loader made it."""
        if self._iterator is None:
            self._iterator = self._rest()
        length = self._own_length
        self.is_padding = not self._peeked if length is None else self.num_taken >= length
        batch = self._first
        if self.is_padding and batch is None:
            message = (
                "the checkpoint lacks the batch that this rank, which has no data left, repeats"
            )
            raise TaskError(message, fix="resume from a checkpoint at the end of an epoch")
        try:
            if not self.is_padding:
                batch = self._peeked.pop() if self._peeked else next(self._iterator)
                self._num_own += 1
        except StopIteration as error:
            raise too_few("train data loader", self.num_taken, length) from error
        except BaseException as error:
            self._rewind(error)
            raise
        self._latest = batch
        self.num_taken += 1
        if self._keeps_first and self._first is None:
            # As padding it has weight 0, so a single microbatch is enough.
            self._first = microbatches_of(batch)[0]
        return batch

    def put_back(self) -> None:
        """Undoes the last call of `next`, so that the next call returns this batch again.

        The batch is read again, as in a resumed run. If the loader can't seek, it is the same object,
        in which plugins may have changed tensors in place.
        """
        self.num_taken -= 1
        if self.is_padding:
            return
        self._num_own -= 1
        if self._source.resume_risks or self._source.is_stateful:
            self._peeked = [self._latest]
        else:
            self._read_again()

    def end_epoch(self) -> None:
        """Ends the epoch; its remaining batches aren't read."""
        self._iterator = None
        self._peeked = []
        self._first = None
        self._latest = None
        self._is_loaded = False

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's position. Batches that were fetched but not taken will be read again."""
        num_own = self._num_own if self.under_way else None
        saved = FeedState(
            kind=self._source.kind,
            used=self.used,
            under_way=self.under_way,
            epoch=self._epoch,
            num_taken=self.num_taken,
            num_padding=self.num_taken - self._num_own,
            num_batches=self.num_batches,
            world_size=self._processes.data_world_size,
            first=None if self._source.has_first else self._first,
            ahead=self._ahead() if self.under_way else None,
            position=self._source.state_dict(num_own),
        )
        return as_dict(saved)

    def _ahead(self) -> ReadAhead | None:
        """Returns the batches read but not taken; None if the source would read the same ones again."""
        if not self._source.draws_when_read:
            return None
        return ReadAhead([*self._peeked], self._source.ahead)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the position, before the first batch; leaves the global generators alone.

        Raises:
            TaskError: this loader can't yield the batches that come next.
        """
        saved = from_dict(FeedState, state)
        self._require_kind(saved)
        under_way = saved.under_way
        self.used = saved.used
        self._epoch = saved.epoch
        if self._has_other_ranks(saved) and not self._source.suits_any_ranks:
            return  # between epochs, where every rank starts the next epoch
        self._is_loaded = under_way
        self.num_taken = saved.num_taken
        self._num_own = self.num_taken - saved.num_padding
        self._first = saved.first
        self._loaded_ahead = saved.ahead
        if self.used:  # otherwise the start of the first epoch sets it
            self._loader.set_epoch(self._epoch)
        with kept_generators():
            num_own = self._num_own if under_way else None
            self._source.load_state_dict(saved.position, self._epoch, num_own)
        self._learn_lengths()
        if under_way and self.num_batches != saved.num_batches:
            raise TaskError(
                f"the run was stopped in an epoch of {saved.num_batches} batches with "
                f"{saved.world_size} ranks; now it has {self.num_batches} with "
                f"{self._processes.data_world_size}",
                fix="resume with the same data in global batches of the same size, or from a "
                "checkpoint at the end of an epoch",
            )

    def _has_other_ranks(self, saved: FeedState) -> bool:
        return saved.world_size != self._processes.data_world_size

    def _require_kind(self, saved: FeedState) -> None:
        """Raises TaskError unless this loader is of the saved kind and suits the number of ranks."""
        if saved.kind != self._source.kind:
            raise TaskError(
                f"the run was begun with another kind of train data loader: {saved.kind}, "
                f"now {self._source.kind}",
                fix="resume with the data loader that the run was begun with",
            )
        is_free = not saved.under_way or self._source.suits_any_ranks
        if self._has_other_ranks(saved) and not is_free:
            num_data_ranks = self._processes.data_world_size
            num_ranks = self._processes.world_size
            ranks = f"{saved.world_size} {'ranks' if num_data_ranks == num_ranks else 'data ranks'}"
            raise TaskError(
                f"the run was stopped in mid-epoch with {ranks}, and only these "
                f"know the positions of their data loaders; now it has {num_data_ranks}",
                fix=f"resume with {ranks}, or from a checkpoint at the end of an epoch",
            )

    def _rest(self) -> Iterator[Any]:
        """Returns an iterator over the remaining batches of the loaded epoch."""
        assert self._is_loaded
        ahead = self._loaded_ahead
        self._loaded_ahead = None
        self._peeked = [] if ahead is None else list(ahead.peeked)
        remaining_batches = self._source.batches(self._epoch, self._num_own + len(self._peeked))
        if ahead is not None:
            self._source.ahead = list(ahead.of_source)
        if self._keeps_first and self._first is None and self._source.has_first:
            with kept_generators():
                self._first = microbatches_of(self._source.first())[0]
        return remaining_batches

    def _has_own(self) -> bool:
        if self._own_length is not None:
            return self.num_taken < self._own_length
        if self._iterator is None:
            self._iterator = self._rest()
        if not self._peeked:
            try:
                self._peeked = [*islice(self._iterator, 1)]
            except BaseException as error:
                self._rewind(error)
                raise
        return bool(self._peeked)

    def _rewind(self, error: BaseException) -> None:
        """Makes another fit read the failed batch again, as in a resumed run."""
        batch = self.num_taken + 1
        error.add_note(f"raised by the train data loader, at batch {batch} of its epoch")
        with suppress(Exception):  # a second failure must not hide the first
            self._read_again()

    def _read_again(self) -> None:
        """Makes the loader continue after the batches that were taken, as in a resumed run."""
        with kept_generators():
            position = self._source.state_dict(self._num_own)
            self._source.load_state_dict(position, self._epoch, self._num_own)
            self._iterator = None
            self._is_loaded = True

    def _learn_lengths(self) -> None:
        self._own_length = self._source.num_batches
        sizes = self._source.even_sizes if self._counts_samples else None
        all_lengths = self._processes.all_gather((self._own_length, sizes))
        self.is_even = sizes is not None and all(
            rank_lengths == all_lengths[0] for rank_lengths in all_lengths
        )
        self.num_batches = self._agreed_length([length for length, _ in all_lengths])
        may_pad = self.num_batches is None or self.num_batches != self._own_length
        self._keeps_first = self._pads and may_pad

    def _agreed_length(self, lengths: list[int]) -> int | None:
        if None in lengths:
            return None
        if self._uneven == "error" and len(set(lengths)) > 1:
            raise _uneven(f"the ranks have {', '.join(map(str, lengths))} batches an epoch")
        return min(lengths) if self._uneven == "drop" else max(lengths)


def _uneven(message: str) -> TaskError:
    return TaskError(
        message,
        fix="set uneven to pad (an exhausted rank repeats a batch with weight 0) or to "
        "drop (batches that not all ranks have are left out)",
    )


class Feeds:
    """The feed of the run's current train data loader.

    Attributes:
        was_rebuilt: whether the first data loader was replaced.
        was_assigned: whether a plugin replaced a loader that was trained on by assigning
            `state.train_dataloader`; a resumed run builds the previous loader.
    """

    def __init__(self, hooks: Plans, processes: Processes) -> None:
        self._hooks = hooks
        self._processes = processes
        self._feed: Feed | None = None
        self.was_rebuilt = self.was_assigned = False

    @property
    def current(self) -> Feed:
        """The feed in use."""
        assert self._feed is not None
        return self._feed

    def take(self, state: State, dataloader: Any) -> None:
        """Replaces the train data loader."""
        self.was_rebuilt = self._feed is not None
        state.train_dataloader = dataloader
        settings = state.settings
        sample_seed = settings.seed if settings.seed_samples else None
        # A plan is a method of the core if no plugin or task implements or wraps the action.
        hooks = self._hooks
        actions = (hooks.count_batch, hooks.split_batch, hooks.weigh_microbatch)
        counts = all(isinstance(action, MethodType) for action in actions) and not may_weigh_tokens(
            state
        )
        args = (dataloader, self._processes, settings.uneven, sample_seed)
        self._feed = Feed(*args, counts_samples=counts)
        state.num_batches = self._feed.num_batches
        if not self.was_rebuilt and state.epoch_length is None:  # a resumed run has it already
            state.epoch_length = state.num_batches

    def of_epoch(self, state: State) -> Feed:
        """Returns the feed of the current or next epoch, rebuilt if a plugin asks for it."""
        feed = self._feed
        between = feed is not None and feed.used and not feed.under_way
        if between and self._hooks.should_rebuild_dataloader(state):
            self.take(state, self._hooks.build_train_dataloader(state))
            self.was_assigned = False
        elif feed is None or feed.dataloader is not state.train_dataloader:
            self.take(state, state.train_dataloader)
            self.was_assigned = feed is not None and feed.used
        return self.current

    def is_assigned(self, state: State) -> bool:
        """Returns whether a plugin has assigned a data loader that a resumed run wouldn't have."""
        feed = self._feed
        is_new = feed is not None and feed.used and feed.dataloader is not state.train_dataloader
        return self.was_assigned or is_new

    def are_ahead_of(self, clock: Clock) -> bool:
        """Returns whether a batch was taken but not trained on."""
        feed = self._feed
        return feed is not None and feed.under_way and feed.num_taken != clock.batch_in_epoch

    def give_up(self) -> None:
        """Releases the data loader and its workers."""
        self._feed = None

    def state_dict(self) -> dict[str, Any]:
        """Returns a `FeedsState`; `Feed.state_dict` has the position of the data loader."""
        return as_dict(FeedsState(self.was_rebuilt))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `FeedsState`."""
        self.was_rebuilt = from_dict(FeedsState, state).was_rebuilt
