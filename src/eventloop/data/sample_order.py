"""The order of an epoch: which samples a map-style data loader reads, from any batch on."""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from eventloop.data.attributes import declares
from eventloop.data.sample_seeds import may_repeat, numbered
from eventloop.data.sharding import RankPart
from eventloop.data.uneven_steps import UnevenSteps
from eventloop.errors import TaskError
from eventloop.rng import (
    arrays_to_tensors,
    get_rng_state,
    global_generators,
    is_generator,
    set_rng_state,
    tensors_to_arrays,
)

_PLAIN = (bool, int, float, str, type(None))
# Those that draw all that they need with their first index, from nothing that is hidden.
_AT_ONCE = (
    list,
    range,
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    RankPart,
    SequentialSampler,
    SubsetRandomSampler,
    UnevenSteps,
    WeightedRandomSampler,
)


class Order(Sampler[Any]):
    """A sampler's samples, and what the epoch under way was drawn from.

    A loader's iterator may be far ahead of what it has yielded: the position isn't known here.

    Args:
        inner: the loader's batch sampler; its sampler, where it makes no batches.
        generator: the loader's own, if it has one.

    Attributes:
        inner: where the order comes from.
        start: where generators and samplers stood when the first of the epoch was drawn; None
            before that.
        first: the first of the epoch, where it is known.
        was_asked: whether the loader has asked for the rest of the epoch.
        numbers: whether what comes again in an epoch is told apart.
    """

    def __init__(self, inner: Iterable[Any], generator: torch.Generator | None) -> None:
        self.inner = inner
        self.start: dict[str, Any] | None = None
        self.first: Any = None
        self.was_asked = False
        self.numbers = False
        self._generator = generator
        self._own = inner
        self._samplers = [Watched(one) for one in samplers_of(inner)]
        self._rest: Iterator[Any] | None = None
        self._checks = array("L")
        self._before: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]  # the loader asks only where it has one

    def __iter__(self) -> Iterator[Any]:
        self.was_asked = True
        return self._turn() if self._rest is None else self._rest

    def take_from(self, inner: Iterable[Any] | None) -> None:
        """Has the order come from elsewhere; None for where it came from when this was made."""
        inner = self._own if inner is None else inner
        if inner is not self.inner:
            self.inner = inner
            self._samplers = [Watched(one) for one in samplers_of(inner)]

    def begin(self) -> None:
        """Has the next turn begin an epoch."""
        self.start = self._rest = self.first = None
        self._checks = array("L")
        self.was_asked = False

    def before_draw(self, call: Callable[[], None] | None) -> bool:
        """Has something called before the epoch's first draw; tells whether the last one was."""
        was_called = self._before is None
        self._before = call
        return was_called

    def check(self, num_taken: int) -> int | None:
        """Returns a number that another order wouldn't have, up to here; None where none is needed."""
        return self._checks[num_taken - 1] if 0 < num_taken <= len(self._checks) else None

    def seek(
        self,
        start: Mapping[str, Any] | None,
        num_taken: int,
        check: int | None,
        *,
        reads_ahead: bool = True,
    ) -> None:
        """Has the next turn go on with an epoch; draws from the generators what is over.

        Args:
            start: what `start` was; None where nothing had been drawn.
            num_taken: how many are over.
            check: what `check` gave for them.
            reads_ahead: whether the loader asks for more than it yields, and so for the end, where
                samplers may draw once more.

        Raises:
            TaskError: these aren't the ones that were given.
        """
        self.begin()
        if start is None:
            return
        self.put(start)
        drawn = self._drawn()
        taken = 0
        for one in itertools.islice(drawn, num_taken):
            self.first = one if taken == 0 else self.first
            taken += 1
        if taken < num_taken or (check is not None and self.check(num_taken) != check):
            raise _other_order(num_taken, self._samplers)
        # Drawn here, where the generators stand as they stood, whenever a batch is asked for.
        ahead = list(itertools.islice(drawn, 1)) if reads_ahead or not num_taken else []
        self.start = dict(start)
        generator = None if self._generator is None else self._generator.get_state()
        self._rest = self._going_on(itertools.chain(ahead, drawn), generator)

    def standing(self, *, shared: bool) -> dict[str, Any]:
        """Returns where the loader's generator and the samplers stand now.

        Args:
            shared: whether the global generators are among them.
        """
        found: dict[str, Any] = {"samplers": [one.state_dict() for one in self._samplers]}
        if shared:
            named = global_generators().items()
            found["shared"] = {name: get_rng_state(one) for name, one in named}
        if self._generator is not None:
            found["loader"] = get_rng_state(self._generator)
        return found

    def put(self, standing: Mapping[str, Any]) -> None:
        """Lets all go on from where `standing` found them."""
        generators = global_generators()
        for name, one in standing.get("shared", {}).items():
            if name in generators:
                set_rng_state(generators[name], one)
        if self._generator is not None and "loader" in standing:
            set_rng_state(self._generator, standing["loader"])
        left = list(standing.get("samplers", ()))
        for sampler in self._samplers:
            # By their kinds: with other ranks they may be arranged in another way.
            fitting = [idx for idx, one in enumerate(left) if one["kind"] == sampler.kind]
            if fitting:
                sampler.load_state_dict(left.pop(fitting[0]))

    def _going_on(self, rest: Iterator[Any], drawn: Tensor | None) -> Iterator[Any]:
        # By now the loader has drawn a seed for its workers, which it had when the epoch began.
        if self._generator is not None and drawn is not None:
            self._generator.set_state(drawn)
        yield from rest

    def _turn(self) -> Iterator[Any]:
        # Runs when the first is asked for: by the first batch, or by workers when they start.
        if self._before is not None:
            self._before()
            self._before = None
        self.start = self.standing(shared=True)
        yield from self._drawn()

    def _drawn(self) -> Iterator[Any]:
        """Draws the order of an epoch from where all stand."""
        inner = iter(self.inner)
        knows_all = not any(one.kind == RankPart.__qualname__ for one in self._samplers)
        if self.numbers and knows_all and may_repeat(self.inner):
            inner = numbered(inner)
        if all(one.draws_at_once for one in self._samplers):
            return inner
        return self._checked(inner)

    def _checked(self, inner: Iterator[Any]) -> Iterator[Any]:
        check = 0
        for one in inner:
            check = zlib.crc32(repr(one).encode(), check)
            self._checks.append(check)
            yield one


def samplers_of(inner: Any) -> list[Any]:
    """Returns a sampler and those that it is made of, as far as they are its attributes."""
    found: list[Any] = []
    waiting = [inner]
    while waiting:
        one = waiting.pop(0)
        if not any(one is other for other in found):
            found.append(one)
            waiting += [
                part
                for name, part in _attributes(one).items()
                if isinstance(part, Sampler) or name.endswith("sampler")
            ]
    return found


class Watched:
    """A sampler, and what its turns change in it.

    One with `state_dict` and `load_state_dict` knows best. Of any other these are its generators,
    and those attributes of plain values that aren't what they were when the loader was built.
    """

    def __init__(self, sampler: Any) -> None:
        self.kind = type(sampler).__qualname__
        self.draws_at_once = type(sampler) in _AT_ONCE
        self._sampler = sampler
        self._built = {} if isinstance(sampler, Stateful) else _plain_attributes(sampler)

    def state_dict(self) -> dict[str, Any]:
        """Returns where it is, with the name of its class."""
        if isinstance(self._sampler, Stateful):
            return {"kind": self.kind, "state": self._sampler.state_dict()}
        attributes = _attributes(self._sampler).items()
        drawn = {name: get_rng_state(one) for name, one in attributes if is_generator(one)}
        changed = {
            name: arrays_to_tensors(one)
            for name, one in _plain_attributes(self._sampler).items()
            if name not in self._built or not _equal(one, self._built[name])
        }
        return {"kind": self.kind, "generators": drawn, "attributes": changed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave.

        Raises:
            ValueError: an attribute isn't one that its class sets.
        """
        if isinstance(self._sampler, Stateful):
            self._sampler.load_state_dict(state["state"])
            return
        attributes = _attributes(self._sampler)
        for name, one in state["generators"].items():
            if is_generator(attributes.get(name)):
                set_rng_state(attributes[name], one)
        for name, one in state["attributes"].items():
            value = tensors_to_arrays(one)
            if not declares(self._sampler, name) or not _is_plain(value):
                raise ValueError(
                    f"a {self.kind} sets no attribute {name!r} to values of this kind; give it "
                    "state_dict and load_state_dict"
                )
            setattr(self._sampler, name, _copied(value))


def _other_order(num_taken: int, samplers: Sequence[Watched]) -> TaskError:
    names = ", ".join(one.kind for one in samplers)
    return TaskError(
        f"the order of the train data loader ({names}) isn't the one that the epoch began with, of "
        f"which {num_taken} batches were trained on",
        fix="let samplers draw from a generator of their own, not from one that the training draws "
        "from in between, or have state_dict and load_state_dict; then go on from a checkpoint at "
        "the end of an epoch",
    )


def _attributes(sampler: Any) -> dict[str, Any]:
    return getattr(sampler, "__dict__", {})


def _plain_attributes(sampler: Any) -> dict[str, Any]:
    """Returns copies of those that hold plain values; torch's own samplers change none."""
    if type(sampler).__module__.startswith("torch."):
        return {}
    attributes = _attributes(sampler).items()
    return {name: _copied(one) for name, one in attributes if _is_plain(one)}


def _is_plain(value: Any) -> bool:
    if type(value) in _PLAIN or isinstance(value, Tensor) or type(value).__name__ == "ndarray":
        return True
    return type(value) in (list, tuple) and all(type(one) in _PLAIN for one in value)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if hasattr(value, "copy") else value


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    same = one == other
    return bool(same.all() if hasattr(same, "all") else same)


@runtime_checkable
class Stateful(Protocol):
    """An object like those of `torch.distributed.checkpoint.stateful`."""

    def state_dict(self) -> dict[str, Any]:
        """Returns where it is."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Goes on from what `state_dict` gave."""
