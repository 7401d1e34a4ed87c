"""The state of samplers of every kind: restored to the entry, or refused."""

from __future__ import annotations

import collections
import enum
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, Sampler

from eventloop.data.sampling_state import SamplingState

NUM_SAMPLES = 20


class Phase(enum.Enum):
    FIRST = 0
    SECOND = 1


class Base(Sampler):
    """Yields samples in an order that its state decides; `step` changes the state."""

    def __init__(self):
        self.prepare()

    def __len__(self):
        return NUM_SAMPLES

    def __iter__(self):
        return iter(random.Random(repr(self.step())).sample(range(NUM_SAMPLES), NUM_SAMPLES))


class Deque(Base):
    def prepare(self):
        self.queue = collections.deque(range(5), maxlen=5)

    def step(self):
        self.queue.append(sum(self.queue))
        return list(self.queue)


class NestedList(Base):
    def prepare(self):
        self.levels = {"easy": [[1, 2], {3}]}

    def step(self):
        self.levels["easy"][0].append(len(self.levels))
        self.levels["easy"][1].add(len(self.levels["easy"][0]))
        return self.levels


class NumPyInteger(Base):
    def prepare(self):
        self.epoch = np.int64(3)

    def step(self):
        self.epoch += 1
        return type(self.epoch).__name__, int(self.epoch)


class EnumMember(Base):
    def prepare(self):
        self.phase = Phase.FIRST

    def step(self):
        self.phase = Phase.SECOND if self.phase is Phase.FIRST else Phase.FIRST
        return self.phase.name


class ClassAttribute(Base):
    num_epochs = 0

    def prepare(self):
        type(self).num_epochs = 0

    def step(self):
        type(self).num_epochs += 1
        return self.num_epochs


class Slot(Base):
    __slots__ = ("position",)

    def prepare(self):
        self.position = 0

    def step(self):
        self.position += 3
        return self.position


class GeneratorInAnObject(Base):
    def prepare(self):
        self.helper = SimpleNamespace(rng=np.random.default_rng(0))

    def step(self):
        return self.helper.rng.integers(0, 10**9)


class GeneratorInAList(Base):
    def prepare(self):
        self.stages = [random.Random(0), torch.Generator().manual_seed(1)]

    def step(self):
        return self.stages[0].random(), torch.rand((), generator=self.stages[1]).item()


class MadeLate(Base):
    def prepare(self):
        self.rng = None

    def step(self):
        self.rng = self.rng or np.random.Generator(np.random.Philox(5))
        return self.rng.random()


class Count(Base):
    def prepare(self):
        self.counter = itertools.count(3, 2)
        self.cycle = itertools.cycle("abc")
        self.rest = iter(range(100))

    def step(self):
        return next(self.counter), next(self.cycle), next(self.rest)


class Closure(Base):
    def prepare(self):
        num_calls = 0

        def count():
            nonlocal num_calls
            num_calls += 1
            return num_calls

        self.count = count

    def step(self):
        return self.count()


_GLOBAL_GENERATOR = random.Random(0)


class GlobalGenerator(Base):
    def prepare(self):
        _GLOBAL_GENERATOR.seed(0)

    def step(self):
        return _GLOBAL_GENERATOR.random()


class SharedReference(Base):
    def prepare(self):
        self.stages = [[1], [2], [3]]
        self.current = self.stages[0]

    def step(self):
        self.current.append(len(self.current))
        self.current = self.stages[len(self.current) % 3]
        return self.stages


class OfNumbers(list):
    """A subclass of a container."""


class SubclassOfAContainer(Base):
    def prepare(self):
        self.numbers = OfNumbers([1])

    def step(self):
        self.numbers.append(sum(self.numbers))
        self.numbers.largest = max(self.numbers)
        return list(self.numbers), self.numbers.largest


class RemovedAttribute(Base):
    def prepare(self):
        self.warmup = True

    def step(self):
        if hasattr(self, "warmup"):
            del self.warmup
            return "warmup"
        return "over"


class Tensors(Base):
    def prepare(self):
        self.weights = torch.ones(3)
        self.view = self.weights[1:]
        self.counts = np.zeros(4, dtype=np.int16)

    def step(self):
        self.view.mul_(1.5)
        self.counts[1] += 1
        return self.weights.tolist(), self.counts.tolist()


KINDS = Base.__subclasses__()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("num_epochs", [1, 3])
def test_the_order_goes_on_where_it_was(kind, num_epochs):
    """Whatever decides it: a container, a generator, a slot, a closure, a global variable."""
    sampler = kind()
    state = SamplingState({"sampler": sampler})
    for _ in range(num_epochs):
        list(sampler)
    saved = state.state_dict(with_global=False)
    expected = [list(sampler) for _ in range(3)]

    resumed = kind()
    SamplingState({"sampler": resumed}).load_state_dict(saved)

    assert [list(resumed) for _ in range(3)] == expected


@pytest.mark.parametrize("path", ["sampler.__iter__", "sampler.step", "sampler.queue.x", "step"])
def test_a_path_that_is_no_data_of_the_sampler_is_left_and_named(path):
    """A changed checkpoint would otherwise replace any method of it."""
    sampler = Deque()
    expected = dict(vars(sampler))

    with pytest.warns(UserWarning, match=f"keep their initial values: {path} doesn't exist"):
        SamplingState({"sampler": sampler}).load_state_dict(
            {
                "objects": {
                    "sampler": {
                        "kind": "Deque",
                        "contents": {},
                        "values": {path: 1},
                        "gone": [],
                        "lost": {},
                    }
                }
            }
        )

    assert vars(sampler) == expected


def test_the_state_of_another_sampler_is_not_taken():
    """With another number of ranks torch's sampler for several is in place of the user's, or the reverse."""
    saved = SamplingState({"sampler": Deque()}).state_dict(with_global=False)
    sampler = DistributedSampler(range(8), 2, 0)
    state = SamplingState({"sampler": sampler})
    sampler.set_epoch(3)

    state.load_state_dict(saved)

    assert sampler.epoch == 3
