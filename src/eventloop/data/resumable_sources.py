"""Sources of training batches with a position to resume from: lists, stateful and combined loaders."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from operator import length_hint
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import get_worker_info

from eventloop.data.positions import CycledPosition, StatefulPosition, ZippedPosition
from eventloop.data.too_few_batches import nothing_to_repeat
from eventloop.forms import as_dict, from_dict
from eventloop.rng import KeptGenerators, kept_generators

if TYPE_CHECKING:
    from eventloop.data.combined import Cycled, Zipped
    from eventloop.data.loaders import Loader

Saved = Mapping[str, Any]


class Source:
    """Yields the batches of an epoch, from any batch on. This base class has no state.

    Args:
        loader: the data loader.

    Attributes:
        kind: the kind of data loader; a run must be resumed with the same kind.
        is_stateful: whether the data loader keeps its position itself.
        suits_any_ranks: whether its position is the same on all ranks, for any number of ranks.
        has_first: whether `first` returns the first batch of a resumed epoch.
        resume_risks: the reasons why a resumed run may get other batches, at most one per data loader.
        limit: the maximum number of batches in an epoch; None for no limit.
        draws_when_read: whether a batch may differ when it is read again, because its data set may
            draw from the global generators.
    """

    kind = "none"
    is_stateful = False
    suits_any_ranks = has_first = True
    resume_risks: tuple[str, ...] = ()
    limit: int | None = None
    draws_when_read = False

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._dataloader = loader.dataloader

    @property
    def ahead(self) -> list[Any]:
        """The batches that the data loader has read but not yielded, if it exposes them."""
        return []

    @ahead.setter
    def ahead(self, batches: list[Any]) -> None:
        """Replaces these batches by as many others; called after `batches`."""

    @property
    def even_sizes(self) -> Any:
        """A value that determines the number of samples of each batch; None if there is none.

        If it is equal on all ranks, all ranks have batches of the same sizes.
        """
        return None

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None if it isn't known for certain."""
        length = self._length()
        return length if length is None or self.limit is None else min(length, self.limit)

    def batches(self, epoch: int, num_taken: int | None = None) -> Iterator[Any]:
        """Returns an iterator over an epoch.

        Args:
            epoch: the number of the epoch.
            num_taken: the number of batches taken in the loaded epoch; None for a new epoch.
        """
        batches = self._batches(epoch, num_taken)
        if self.limit is None:
            return batches
        return itertools.islice(batches, max(0, self.limit - (num_taken or 0)))

    def before_peek(self, num_taken: int) -> None:
        """Called before the next batch is fetched without being taken."""

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        """Returns the position.

        Args:
            num_taken: the number of batches taken in the epoch; None between epochs.
        """
        return {}

    def load_state_dict(self, state: Saved, epoch: int, num_taken: int | None) -> None:
        """Restores the position.

        Args:
            state: the result of `state_dict`.
            epoch: the number of the epoch.
            num_taken: the argument of `state_dict`.
        """

    def first(self) -> Any:
        """Returns the first batch of the resumed epoch; called after `batches`."""
        return {}

    def _length(self) -> int | None:
        return self._loader.num_batches

    def _batches(self, epoch: int, num_taken: int | None) -> Iterator[Any]:
        return iter(self._dataloader)


class ListSource(Source):
    """A sequence of batches, taken by index."""

    kind = "list"

    def _batches(self, epoch: int, num_taken: int | None) -> Iterator[Any]:
        if num_taken is None:
            return iter(self._dataloader)
        return map(self._dataloader.__getitem__, range(num_taken, len(self._dataloader)))

    def first(self) -> Any:
        return self._dataloader[0]


class StatefulSource(Source):
    """A data loader with `state_dict` and `load_state_dict`, such as torchdata's."""

    kind = "stateful"
    is_stateful = True
    has_first = False

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        # The loader can set this: then its position is global, and a rank may load any rank's state.
        self.suits_any_ranks = bool(getattr(self._dataloader, "suits_any_ranks", False))
        self._has_begun = self._is_exhausted = False
        # The loaded position, until the loader has yielded a batch or ended.
        self._loaded: StatefulPosition | None = None
        self._num_yielded = 0
        self._before_peek: dict[str, Any] | None = None

    def _batches(self, epoch: int, num_taken: int | None) -> Iterator[Any]:
        if num_taken is not None:
            if self._is_exhausted:  # only this rank; others may have batches left
                return iter(())
            with kept_generators():
                iterator = _begun(iter(self._dataloader))
        else:
            self._has_begun = True
            self._num_yielded = 0
            saved = KeptGenerators()
            iterator = iter(self._dataloader)
            if self._loaded is not None:
                # After loading a position at the end of an epoch, some loaders yield the next epoch,
                # others nothing. After loading one in mid-epoch, they yield the rest of that epoch,
                # which was abandoned and must be skipped.
                first_batches = list(itertools.islice(iterator, 1))
                is_next_epoch = first_batches and self._is_exhausted
                if not is_next_epoch:
                    saved.put_back()  # the second `iter` draws the seeds once more
                iterator = (
                    itertools.chain(first_batches, iterator)
                    if is_next_epoch
                    else iter(self._dataloader)
                )
            self._loaded = None
        return self._counted(iterator)

    def before_peek(self, num_taken: int) -> None:
        self._before_peek = self.state_dict(num_taken)

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        # torchdata's loader would start workers, and draw, just to return the loaded state.
        if self._loaded is not None:
            return as_dict(self._loaded)
        # The loader's own state counts a peeked batch as taken.
        has_peeked = num_taken is not None and self._num_yielded > num_taken
        if has_peeked and self._before_peek is not None:
            return self._before_peek
        loader_state = self._dataloader.state_dict() if self._has_begun else None
        return as_dict(StatefulPosition(loader_state, self._is_exhausted))

    def load_state_dict(self, state: Saved, epoch: int, num_taken: int | None) -> None:
        saved = from_dict(StatefulPosition, state)
        if saved.dataloader is not None:
            self._dataloader.load_state_dict(saved.dataloader)
            self._has_begun = True
            self._loaded = saved
        # After the last batch, litdata's loader would yield the next epoch as the rest of this one.
        at_end = num_taken is not None and num_taken == length_hint(self._dataloader, -1)
        self._is_exhausted = saved.is_exhausted or at_end
        self._num_yielded = num_taken or 0

    def _counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        self._is_exhausted = False
        for batch in iterator:
            self._loaded = None
            self._num_yielded += 1
            yield batch
        self._loaded = None
        self._is_exhausted = True


class _RestoreSeeds(TorchFunctionMode):
    """Restores the global RNG states after each seed that torch's loaders and samplers draw."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Forked workers inherit this mode, and must not restore their own generators.
        if func is Tensor.random_ and not args[0].dim() and get_worker_info() is None:
            with kept_generators():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _begun(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yields batches, without letting the start of the iterator move the global generators.

    A generator function starts, and draws the seed of its workers, with its first batch.
    """
    with _RestoreSeeds():
        first_batches = list(itertools.islice(iterator, 1))
    yield from itertools.chain(first_batches, iterator)


class ZippedSource(Source):
    """Several sources side by side; each batch consists of a batch of every source."""

    def __init__(self, loader: Zipped, sources: Mapping[str, Source]) -> None:
        super().__init__(loader)
        self._zipped = loader
        self._sources = sources
        self.kind = " and ".join(source.kind for source in sources.values())
        self.suits_any_ranks = all(source.suits_any_ranks for source in sources.values())
        self.is_stateful = any(source.is_stateful for source in sources.values())
        self.has_first = all(source.has_first for source in sources.values())
        self.resume_risks = tuple(
            risk for source in sources.values() for risk in source.resume_risks
        )

    def _length(self) -> int | None:
        loaders = self._zipped.loaders
        return shortest(
            source.num_batches
            for name, source in self._sources.items()
            if not loaders[name].is_endless
        )

    def _batches(self, epoch: int, num_taken: int | None) -> Iterator[Any]:
        iterators = {
            name: source.batches(epoch, num_taken) for name, source in self._sources.items()
        }
        return self._zipped.side_by_side(iterators)

    def before_peek(self, num_taken: int) -> None:
        for source in self._sources.values():
            source.before_peek(num_taken)

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        positions: dict[str, Mapping[str, Any]] = {
            name: source.state_dict(num_taken) for name, source in self._sources.items()
        }
        return as_dict(ZippedPosition(positions))

    def load_state_dict(self, state: Saved, epoch: int, num_taken: int | None) -> None:
        positions = from_dict(ZippedPosition, state).parts
        for name, source in self._sources.items():
            source.load_state_dict(positions[name], epoch, num_taken)

    def first(self) -> Any:
        batches = {name: iter([source.first()]) for name, source in self._sources.items()}
        return next(self._zipped.side_by_side(batches))


class CycledSource(Source):
    """Restarts another source when it is exhausted; its passes are independent of the run's epochs."""

    has_first = False

    def __init__(self, loader: Cycled, source: Source) -> None:
        super().__init__(loader)
        self._repeated = loader.part
        self._source = source
        self.kind = f"cycled {source.kind}"
        self.is_stateful = source.is_stateful
        self.suits_any_ranks = source.suits_any_ranks
        self.resume_risks = source.resume_risks
        self._pass = -1
        self._num_in_pass = 0  # batches yielded in the current pass
        self._num_in_epoch = 0
        self._iterator: Iterator[Any] | None = None
        self._is_loaded = False

    def _batches(self, epoch: int, num_taken: int | None) -> Iterator[Any]:
        self._num_in_epoch = num_taken or 0
        return self._endless()

    def before_peek(self, num_taken: int) -> None:
        self._source.before_peek(self._num_in_pass)

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        # A peeked batch, which may be the first of a pass, is yielded again after resuming.
        num_peeked = 0 if num_taken is None else max(0, self._num_in_epoch - num_taken)
        num_in_pass = self._num_in_pass - num_peeked if self._pass >= 0 else None
        repeated = self._source.state_dict(num_in_pass)
        return as_dict(CycledPosition(self._pass, num_in_pass, repeated))

    def load_state_dict(self, state: Saved, epoch: int, num_taken: int | None) -> None:
        saved = from_dict(CycledPosition, state)
        self._pass = saved.pass_idx
        self._num_in_pass = saved.num_in_pass or 0
        self._num_in_epoch = num_taken or 0
        self._iterator = None
        self._is_loaded = saved.num_in_pass is not None
        self._repeated.set_epoch(max(0, self._pass))
        self._source.load_state_dict(saved.repeated, max(0, self._pass), saved.num_in_pass)

    def _endless(self) -> Iterator[Any]:
        while True:
            if self._iterator is None:
                self._iterator = self._rest_of_pass() if self._is_loaded else self._next_pass()
            for batch in self._iterator:
                self._num_in_pass += 1
                self._num_in_epoch += 1
                yield batch
            if not self._num_in_pass:
                raise nothing_to_repeat(self._repeated)
            self._iterator = None

    def _rest_of_pass(self) -> Iterator[Any]:
        self._is_loaded = False
        remaining_batches = self._source.batches(self._pass, self._num_in_pass)
        if self._num_in_pass:
            return remaining_batches
        # Some sources are still at the end of the previous pass. The draws and `set_epoch` at the
        # start of this pass were made before the checkpoint, so they must not be repeated.
        with kept_generators():
            first_batches = list(itertools.islice(remaining_batches, 1))
            if not first_batches:
                remaining_batches = self._source.batches(self._pass)
                first_batches = list(itertools.islice(remaining_batches, 1))
        return itertools.chain(first_batches, remaining_batches)

    def _next_pass(self) -> Iterator[Any]:
        self._pass += 1
        self._num_in_pass = 0
        self._repeated.set_epoch(self._pass)
        return self._source.batches(self._pass)


def shortest(lengths: Iterable[int | None]) -> int | None:
    """Returns the smallest length; None if there are no lengths, or if any isn't known."""
    all_lengths = list(lengths)
    if not all_lengths or None in all_lengths:
        return None
    return min(length for length in all_lengths if length is not None)
