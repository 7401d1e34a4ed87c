"""Random numbers of a sample that a thread reads: from its own seed, whichever thread reads it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from eventloop import TaskError
from eventloop.toolbox import host_generators, is_generator, reseed

# torch's random functions and methods (2.13): those that take a generator, and those that don't.
_TAKE_ONE = {
    *("rand", "randn", "randint", "randperm", "normal"),
    *("bernoulli", "multinomial", "poisson", "binomial", "random_"),
    *("uniform_", "normal_", "bernoulli_", "exponential_", "geometric_"),
    *("cauchy_", "log_normal_", "trunc_normal_"),
}
_TAKE_NONE = {
    *("rand_like", "randn_like", "randint_like", "dropout", "dropout_"),
    *("dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_"),
    *(
        "feature_dropout",
        "feature_dropout_",
        "feature_alpha_dropout",
        "feature_alpha_dropout_",
        "native_dropout",
    ),
    *("rrelu", "rrelu_", "gumbel_softmax"),
}
_MOST_ENTRIES = 100
_MOST_OBJECTS = 2_000  # anything longer or larger is data
_LEAVES = (bool, int, float, complex, str, bytes, bytearray, range, type(None), type)
_NOT_LOOKED_INTO = (*_LEAVES, Tensor, nn.Module, FunctionType, ModuleType)


class SampleDraws(TorchFunctionMode):
    """Makes torch's random functions draw from the current sample's generator.

    Affects only the entering thread; training keeps the global generator.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator()
        self._waiting: int | None = 0

    def seed(self, number: int) -> None:
        """Begins a sample, whose generator is seeded when it first draws."""
        self._waiting = number

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _TAKE_ONE and kwargs.get("generator") is None:
            if self._waiting is not None:
                self._generator.manual_seed(self._waiting)
                self._waiting = None
            kwargs = {**kwargs, "generator": self._generator}
        elif name in _TAKE_NONE:
            raise TaskError(
                f"torch's {name} draws from the generator that the training draws from, and a thread "
                "that reads samples mustn't",
                fix="use a function that takes a generator (rand, randn, bernoulli), or a DataLoader",
            )
        return func(*args, **kwargs)


class ThreadsData:
    """A dataset for a single thread; shares everything with the original dataset except for random generators.

    Args:
        dataset: map-style; generators are found in attributes, lists and mappings, at any depth.
    """

    def __init__(self, dataset: Any) -> None:
        self._own: list[Any] = []
        self._seen: dict[int, Any] = {}
        self.dataset = self._copied(dataset)
        self.draws = SampleDraws()

    def seed(self, number: int) -> None:
        """Begins a sample, or a batch, with this seed."""
        self.draws.seed(number)
        for generator in self._own:
            reseed(generator, number)

    def _copied(self, value: Any) -> Any:
        """Copies a value if it contains a generator; otherwise returns the value itself."""
        if is_generator(value):
            if id(value) not in self._seen:
                clone = value.clone_state() if isinstance(value, torch.Generator) else None
                self._seen[id(value)] = clone or copy.deepcopy(value)
                self._own.append(self._seen[id(value)])
            return self._seen[id(value)]
        if isinstance(value, _NOT_LOOKED_INTO) or len(self._seen) > _MOST_OBJECTS:
            return value
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._seen[id(value)] = value  # ends the recursion for cyclic references
        copied = self._rebuilt(value)
        self._seen[id(value)] = copied
        return copied

    def _rebuilt(self, value: Any) -> Any:
        if isinstance(value, (list, tuple, dict)):
            if len(value) > _MOST_ENTRIES:
                return value
            old = [*(value.values() if isinstance(value, dict) else value)]
            new = [self._copied(nested) for nested in old]
            if all(a is b for a, b in zip(old, new, strict=True)):
                return value
            if isinstance(value, dict):
                return dict(zip(value, new, strict=True))
            return new if isinstance(value, list) else tuple(new)
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict):
            return value
        new_attributes = {name: self._copied(nested) for name, nested in attributes.items()}
        if all(nested is attributes[name] for name, nested in new_attributes.items()):
            return value
        copied = copy.copy(value)
        vars(copied).update(new_attributes)
        return copied


def fingerprints() -> dict[str, Any]:
    """Returns fingerprints of the global generators whose draws can't be attributed to a thread."""
    return {
        name: generator.fingerprint()
        for name, generator in host_generators().items()
        if name != "torch"
    }


class _Noticing:
    """Replaces torch's generator in `torch.random`, to detect a read of its seed."""

    is_used = False

    def __getattr__(self, name: str) -> Any:
        self.is_used = True
        return getattr(torch.default_generator, name)


@contextmanager
def noticed(names: Collection[str], seed: int) -> Iterator[list[str]]:
    """Yields a list that receives the names of the global generators used inside the block, at its end.

    They are seeded before, so that seeding inside the block is detected, and restored afterwards.
    """
    watched = {name: generator for name, generator in host_generators().items() if name in names}
    states = {name: generator.get_state() for name, generator in watched.items()}
    moved: list[str] = []
    for generator in watched.values():
        generator.seed(0x9E3779B9 + seed)
    prints_before = {name: generator.fingerprint() for name, generator in watched.items()}
    random: Any = torch.random
    usual = random.default_generator
    noticing = _Noticing()
    try:
        random.default_generator = noticing
        yield moved
    finally:
        random.default_generator = usual
        reads_seed = {"torch"} if noticing.is_used else set()
        moved += sorted(
            {
                name
                for name, generator in watched.items()
                if generator.fingerprint() != prints_before[name]
            }
            | reads_seed & watched.keys()
        )
        for name, generator in watched.items():
            generator.set_state(states[name])


def draws_from_global(reader: str, names: list[str], index: Any) -> TaskError:
    """Returns the error for code that draws from a global generator that threads share."""
    return TaskError(
        f"{reader} draws from the global generator of {' and '.join(names)} (at sample {index}), which "
        "threads and the training share: the numbers would depend on the speed of each",
        fix="give the data set a generator of its own, self.rng = np.random.default_rng() or "
        "random.Random(), which is seeded for each sample; or use a DataLoader, whose workers are "
        "processes",
    )
