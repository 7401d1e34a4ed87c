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

# Functions and methods of torch that draw (2.13): those that take a generator, and those that don't.
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
_MOST_OBJECTS = 2_000  # what is longer or larger is data
_LEAVES = (bool, int, float, complex, str, bytes, bytearray, range, type(None), type)
_NOT_LOOKED_INTO = (*_LEAVES, Tensor, nn.Module, FunctionType, ModuleType)


class SampleDraws(TorchFunctionMode):
    """Has torch's random functions draw from the generator of the sample under way.

    Of the thread alone that enters it: torch's global generator is the training's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator()
        self._waiting: int | None = 0

    def seed(self, number: int) -> None:
        """Begins a sample; its generator is seeded once it draws."""
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
    """A data set for one thread: it shares all but its random generators with the data set itself.

    Args:
        dataset: map-style; generators are found in attributes, lists and mappings, however deep.
    """

    def __init__(self, dataset: Any) -> None:
        self._own: list[Any] = []
        self._seen: dict[int, Any] = {}
        self.dataset = self._copied(dataset)
        self.draws = SampleDraws()

    def seed(self, number: int) -> None:
        """Begins a sample, or a batch, that draws from this seed on."""
        self.draws.seed(number)
        for generator in self._own:
            reseed(generator, number)

    def _copied(self, value: Any) -> Any:
        """Returns the value itself where no generator is in it."""
        if is_generator(value):
            if id(value) not in self._seen:
                made = value.clone_state() if isinstance(value, torch.Generator) else None
                self._seen[id(value)] = made or copy.deepcopy(value)
                self._own.append(self._seen[id(value)])
            return self._seen[id(value)]
        if isinstance(value, _NOT_LOOKED_INTO) or len(self._seen) > _MOST_OBJECTS:
            return value
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._seen[id(value)] = value  # a circle ends here
        self._seen[id(value)] = made = self._rebuilt(value)
        return made

    def _rebuilt(self, value: Any) -> Any:
        if isinstance(value, (list, tuple, dict)):
            if len(value) > _MOST_ENTRIES:
                return value
            old = [*(value.values() if isinstance(value, dict) else value)]
            new = [self._copied(one) for one in old]
            if all(a is b for a, b in zip(old, new, strict=True)):
                return value
            if isinstance(value, dict):
                return dict(zip(value, new, strict=True))
            return new if isinstance(value, list) else tuple(new)
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict):
            return value
        parts = {name: self._copied(one) for name, one in attributes.items()}
        if all(one is attributes[name] for name, one in parts.items()):
            return value
        made = copy.copy(value)
        vars(made).update(parts)
        return made


def fingerprints() -> dict[str, Any]:
    """Returns fingerprints of the global generators whose draws can't be attributed to a thread."""
    return {name: one.fingerprint() for name, one in host_generators().items() if name != "torch"}


class _Noticing:
    """Stands in for torch's generator in `torch.random`, to notice a read of its seed."""

    is_used = False

    def __getattr__(self, name: str) -> Any:
        self.is_used = True
        return getattr(torch.default_generator, name)


@contextmanager
def noticed(names: Collection[str], seed: int) -> Iterator[list[str]]:
    """Yields a list that has the names of those global generators that a block used, when it ends.

    They are seeded before, so that a block which seeds them is noticed, and restored afterwards.
    """
    watched = {name: one for name, one in host_generators().items() if name in names}
    states = {name: one.get_state() for name, one in watched.items()}
    moved: list[str] = []
    for one in watched.values():
        one.seed(0x9E3779B9 + seed)
    before = {name: one.fingerprint() for name, one in watched.items()}
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
            {name for name, one in watched.items() if one.fingerprint() != before[name]}
            | reads_seed & watched.keys()
        )
        for name, one in watched.items():
            one.set_state(states[name])


def draws_from_global(who: str, names: list[str], index: Any) -> TaskError:
    """Returns the error for code that draws from a global generator that threads share."""
    return TaskError(
        f"{who} draws from the global generator of {' and '.join(names)} (at sample {index}), which "
        "threads and the training share: the numbers would depend on the speed of each",
        fix="give the data set a generator of its own, self.rng = np.random.default_rng() or "
        "random.Random(), which is seeded for each sample; or use a DataLoader, whose workers are "
        "processes",
    )
