"""Kinds of objects that hold a state, and places of a task that use them: what set-ups are drawn from.

An object of a kind is callable without arguments: each call changes its state and returns a number
that depends on it. A place calls such an object where a run would.
"""

from __future__ import annotations

import array
import collections
import configparser
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import heapq
import io
import itertools
import multiprocessing
import operator
import pathlib
import queue
import random
import re
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

KINDS: dict[str, Callable[[], Any]] = {}
# Where kinds of tensors and generators of a device are.
DEVICE = torch.device("cpu")
# Objects that no new process can build, or whose state Python doesn't show: they may be named.
UNSAVABLE: set[str] = set()


def kind(maker: Any = None, *, savable: bool = True) -> Any:
    """Adds a class or a function that makes an object of a kind."""

    def add(maker: Any) -> Any:
        KINDS[maker.__name__] = maker
        if not savable:
            UNSAVABLE.add(maker.__name__)
        return maker

    return add if maker is None else add(maker)


def spread(number: float) -> float:
    """Returns a number in [0, 1) that differs between neighbouring numbers."""
    return float(number * 0.6180339887498949 % 1)


# Plain values


@kind
class IntAttribute:
    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return spread(self.count)


@kind
class FloatsAtTheEdge:
    """Holds NaN, infinities and the negative zero."""

    values = (float("nan"), -0.0, float("inf"), 0.5, -float("inf"), 1e-320)

    def __init__(self):
        self.value, self.position = 0.0, 0

    def __call__(self):
        sign = 0.25 if str(self.value).startswith("-") else 0.0
        self.position = (self.position + 1) % len(self.values)
        self.value = self.values[self.position]
        return sign + 0.5 * (self.value == self.value) * spread(self.position)


@kind
class BigInt:
    def __init__(self):
        self.number = 2**70

    def __call__(self):
        self.number = (self.number * 6364136223846793005 + 1442695040888963407) % 2**90
        return self.number / 2**90


@kind
class TextAndBytes:
    def __init__(self):
        self.text, self.code, self.phase = "", b"", 1j

    def __call__(self):
        self.text += chr(233 + len(self.text))
        self.code = bytes([len(self.text) % 256, 0])
        self.phase *= 1j
        return spread(len(self.text) + self.code[0] + self.phase.imag)


# Containers


@kind
class NestedLists:
    def __init__(self):
        self.levels = [[0], {"deep": [1, (2, [3])]}]

    def __call__(self):
        self.levels[0].append(len(self.levels[0]))
        self.levels[1]["deep"][1][1][0] += 1
        return spread(sum(self.levels[0]) + self.levels[1]["deep"][1][1][0])


@kind
class SharedReferences:
    """One list under two names, and in another list that is made late."""

    def __init__(self):
        self.numbers = self.alias = [0]
        self.late = None

    def __call__(self):
        if self.late is None:
            self.late = {"again": self.numbers, "new": [1]}
            self.late["twin"] = self.late["new"]
        self.alias.append(len(self.numbers))
        self.late["twin"][0] += 1
        return spread(len(self.late["again"]) + self.late["new"][0])


@kind
class Cycles:
    """A list in itself, and objects that know each other."""

    def __init__(self):
        self.items = [0]
        self.items.append(self.items)
        self.child = types.SimpleNamespace(parent=self, count=0)

    def __call__(self):
        self.items[1][1][0] += 1
        self.child.parent.child.count += 2
        return spread(self.items[0] + self.child.count)


@kind
class DequeOfFew:
    def __init__(self):
        self.last = collections.deque([1, 2, 3], maxlen=3)

    def __call__(self):
        self.last.append(self.last[0] + self.last[2])
        self.last.rotate(1)
        return spread(sum(self.last) % 1009)


@kind
class DefaultDictOfLists:
    def __init__(self):
        self.lists = collections.defaultdict(list)

    def __call__(self):
        self.lists[len(self.lists) % 3].append(1)
        self.lists[len(self.lists)].append(2)
        return spread(sum(map(len, self.lists.values())))


@kind
class DefaultDictOfDefaultDicts:
    """The inner ones are made by the run, with another factory."""

    def __init__(self):
        self.table = collections.defaultdict(lambda: collections.defaultdict(int))
        self.count = 0

    def __call__(self):
        self.count += 1
        self.table[self.count % 4]["seen"] += 1
        return spread(sum(row["seen"] for row in self.table.values()))


@kind
class CounterAndOrder:
    def __init__(self):
        self.counter = collections.Counter(a=1)
        self.order = collections.OrderedDict.fromkeys("abc", 0)
        self.plain = dict.fromkeys("abc", 0)

    def __call__(self):
        key = next(iter(self.order))
        self.counter[key] += 1
        self.order.move_to_end(key)
        self.plain[(key, self.counter[key])] = self.plain.pop(next(iter(self.plain)))
        return spread(self.counter[key] + ord(next(iter(self.order))) + len(str(self.plain)))


@kind
class Sets:
    def __init__(self):
        self.seen, self.frozen = {0}, frozenset({0})

    def __call__(self):
        self.seen.add(len(self.seen))
        self.frozen |= {("pair", len(self.frozen))}
        return spread(len(self.seen) + len(self.frozen))


class History(list):
    """A list with an attribute."""

    num_added = 0

    def add(self, item):
        self.append(item)
        self.num_added += 1


class Registry(dict):
    __slots__ = ("version",)


class Seen(set):
    pass


class LastFew(collections.deque):
    pass


class Groups(collections.defaultdict):
    pass


class Tally(collections.Counter):
    pass


@kind
class SubclassesOfContainers:
    def __init__(self):
        self.history, self.registry, self.seen = History(), Registry(), Seen()
        self.last, self.groups, self.tally = LastFew([0], 2), Groups(list), Tally()
        self.registry.version = 0

    def __call__(self):
        self.history.add(len(self.history))
        self.registry.version += 1
        self.registry[self.registry.version] = [self.registry.version]
        self.seen.add(self.registry.version % 5)
        self.last.append(self.last[-1] + 1)
        self.groups[self.last[-1] % 2].append(1)
        self.tally[len(self.seen)] += 1
        parts = self.history, self.registry, self.seen, self.groups[0], self.tally
        return spread(sum(map(len, parts)) + self.history.num_added + self.last[0])


class HeldCounters(dict):
    """A dict of objects, which the task builds."""


@kind
class SubclassOfObjects:
    def __init__(self):
        self.parts = HeldCounters(one=IntAttribute(), two=[IntAttribute()])

    def __call__(self):
        return 0.5 * self.parts["one"]() + 0.5 * self.parts["two"][0]()


class Position(NamedTuple):
    """A place and a speed."""

    place: int
    speed: int


@kind
class NamedTuples:
    def __init__(self):
        self.position = Position(0, 1)
        self.queue = [Position(0, 2)]

    def __call__(self):
        place, speed = self.position
        self.position = self.position._replace(place=place + speed)
        self.queue[0] = self.queue[0]._replace(place=self.queue[0].place + 2)
        return spread(self.position.place + self.queue[0].place)


@kind
class NamedTuplesMadeLate:
    """Instances of a class in a list that grows."""

    def __init__(self):
        self.positions = []

    def __call__(self):
        self.positions.append(Position(len(self.positions), 1))
        return spread(sum(position.place for position in self.positions))


@kind
@dataclasses.dataclass
class DataClass:
    count: int = 0
    values: list = dataclasses.field(default_factory=list)

    def __call__(self):
        self.count += 1
        self.values.append(self.count)
        return spread(sum(self.values))


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run replaces as a whole."""

    count: int = 0


@kind
class FrozenDataClassReplaced:
    def __init__(self):
        self.settings = Settings()

    def __call__(self):
        self.settings = dataclasses.replace(self.settings, count=self.settings.count + 1)
        return spread(self.settings.count)


UNSAVABLE.add("FrozenDataClassReplaced")


@kind
@dataclasses.dataclass(slots=True)
class SlottedDataClass:
    count: int = 0
    values: list = dataclasses.field(default_factory=list)

    def __call__(self):
        self.count += 1
        self.values.append(self.count)
        return spread(sum(self.values))


@kind
class Buffers:
    def __init__(self):
        self.bytes, self.numbers = bytearray(b"\x01"), array.array("d", [0.5])

    def __call__(self):
        self.bytes.append((self.bytes[-1] * 3) % 251)
        self.numbers.append(self.numbers[-1] * 3.7 % 1)
        return spread(self.bytes[-1] + self.numbers[-1])


@kind
class ViewOfBytes:
    """A memoryview over a buffer that nothing else holds."""

    def __init__(self):
        self.view = memoryview(bytearray(4))

    def __call__(self):
        self.view[0] = (self.view[0] + 1) % 256
        return spread(self.view[0])


@kind
class ViewOfBuffer:
    def __init__(self):
        self.buffer = bytearray(4)
        self.view = memoryview(self.buffer)[1:]

    def __call__(self):
        self.view[0] = (self.view[0] + 1) % 256
        return spread(self.buffer[1])


@kind
class Heap:
    def __init__(self):
        self.heap = [(0.0, "first"), (0.5, "second")]

    def __call__(self):
        key, name = heapq.heappop(self.heap)
        heapq.heappush(self.heap, (key + 0.3, name + "'"))
        return spread(key + len(name))


@kind
class ReadOnlyDict:
    """A mappingproxy over a dict that nothing else holds."""

    def __init__(self):
        numbers = [0]
        self.table = types.MappingProxyType({"numbers": numbers})

    def __call__(self):
        self.table["numbers"].append(1)
        return spread(len(self.table["numbers"]))


@kind
class Chained:
    def __init__(self):
        self.maps = collections.ChainMap({"count": 0}, {"count": 5})

    def __call__(self):
        self.maps["count"] += 1
        return spread(self.maps["count"])


@kind
class Queued:
    def __init__(self):
        self.queue = queue.Queue()
        self.queue.put(0)
        self.urgent = queue.PriorityQueue()
        self.urgent.put((1, "a"))

    def __call__(self):
        number = self.queue.get()
        self.queue.put(number + 1)
        rank, name = self.urgent.get()
        self.urgent.put((rank + 2, name))
        return spread(number + rank)


# Random generators


@kind
class PythonGenerator:
    def __init__(self):
        self.rng = random.Random(1)

    def __call__(self):
        self.rng.gauss(0, 1)
        return self.rng.random()


@kind
class NumPyGenerators:
    def __init__(self):
        bits = np.random.Philox(1), np.random.SFC64(2), np.random.MT19937(3), np.random.PCG64(4)
        self.rngs = {"all": [np.random.Generator(bit) for bit in bits]}
        self.legacy = np.random.RandomState(5)

    def __call__(self):
        drawn = [rng.standard_normal() for rng in self.rngs["all"]]
        return spread(sum(drawn) + self.legacy.randn())


@kind
class TorchGenerator:
    def __init__(self):
        self.rng = torch.Generator().manual_seed(1)

    def __call__(self):
        return torch.rand((), generator=self.rng).item()


@kind
class GeneratorOfDevice:
    """Draws where the tensors are; another generator is made late."""

    def __init__(self):
        self.rng, self.late = torch.Generator(DEVICE).manual_seed(1), None

    def __deepcopy__(self, memo):
        raise TypeError("a generator of an accelerator has no copy")

    def __call__(self):
        if self.late is None:
            self.late = torch.Generator(DEVICE).manual_seed(2)
        drawn = torch.rand((), generator=self.rng, device=DEVICE)
        return spread((drawn + torch.rand((), generator=self.late, device=DEVICE)).item())


class SeededRandom(random.Random):
    """A generator with an attribute."""

    num_drawn = 0

    def random(self):
        self.num_drawn += 1
        return (super().random() + self.num_drawn * 0.1) % 1


@kind
class SubclassOfGenerator:
    def __init__(self):
        self.rng = SeededRandom(1)

    def __call__(self):
        return self.rng.random()


@kind
class LateGenerator:
    def __init__(self):
        self.rng = None

    def __call__(self):
        if self.rng is None:
            self.rng = {"late": [np.random.default_rng(3), random.Random(3)]}
        return spread(self.rng["late"][0].random() + self.rng["late"][1].random())


@kind
class ReplacedGenerator:
    def __init__(self):
        self.rng, self.num_made = random.Random(0), 0

    def __call__(self):
        number = self.rng.random()
        if number < 0.2:
            self.num_made += 1
            self.rng = random.Random(self.num_made)
        return number


@kind
class BitGeneratorAlone:
    def __init__(self):
        self.bits = np.random.PCG64(7)

    def __call__(self):
        return self.bits.random_raw() / 2**64


@kind
class SpawnedSeeds:
    """A SeedSequence counts its children."""

    def __init__(self):
        self.seeds = np.random.SeedSequence(7)

    def __call__(self):
        return np.random.default_rng(self.seeds.spawn(1)[0]).random()


@kind
class MethodOfGenerator:
    """A bound method of C code, whose object nothing else holds."""

    def __init__(self):
        self.draw = random.Random(4).random
        self.normal = np.random.default_rng(4).standard_normal

    def __call__(self):
        return spread(self.draw() + self.normal())


GLOBAL_RNG = random.Random(9)
GLOBAL_COUNTS = {"calls": 0}
num_global_calls = 0


@kind
class Globals:
    def __call__(self):
        global num_global_calls
        num_global_calls += 1
        GLOBAL_COUNTS["calls"] += 2
        return spread(GLOBAL_RNG.random() + num_global_calls + GLOBAL_COUNTS["calls"])


# Code with a state


@kind
def closure():
    count, numbers = 0, [0]

    def call():
        nonlocal count
        count += 1

        def inner():
            numbers[0] += 1
            return count + numbers[0]

        return spread(inner())

    return call


@kind
def partial_of_mutable():
    def call(numbers, *, table):
        numbers.append(1)
        table["calls"] += 1
        return spread(len(numbers) + table["calls"])

    return functools.partial(call, [0], table={"calls": 0})


@kind
def partial_in_partial():
    return functools.partial(functools.partial(operator.call, IntAttribute()))


@kind
def bound_method():
    return IntAttribute().__call__


@kind
def method_wrapper():
    """`__next__` of an iterator that nothing else holds."""
    following = itertools.count().__next__
    return lambda: spread(following())


UNSAVABLE.add("method_wrapper")


@kind
def mutable_default():
    def call(numbers=[0], *, table={"calls": 0}):
        numbers[0] += 1
        table["calls"] += 1
        return spread(numbers[0] + 3 * table["calls"])

    # As at the import of a module: what was counted by another run of this process isn't.
    call.__defaults__ = ([0],)
    call.__kwdefaults__ = {"table": {"calls": 0}}
    return call


@kind
def attribute_of_function():
    def call():
        call.count += 1
        return spread(call.count)

    call.count = 0
    return call


def counted(function):
    """Counts calls in an attribute of the wrapper."""

    @functools.wraps(function)
    def wrapper(*args):
        wrapper.count += 1
        return spread(function(*args) + wrapper.count)

    wrapper.count = 0
    return wrapper


@kind
class DecoratedMethod:
    @counted
    def call(self):
        return 0.1

    def __call__(self):
        return self.call()


@kind
class CachedFunction:
    """A pure function in a cache, and a counter beside it."""

    def __init__(self):
        self.count = 0

        @functools.lru_cache(maxsize=4)
        def root(number):
            return number**0.5

        self.root = root

    def __call__(self):
        self.count += 1
        return spread(self.root(self.count % 7) + self.count)


@kind
def generator_function():
    def numbers():
        number = 0
        while True:
            number += 1
            yield spread(number)

    return functools.partial(next, numbers())


UNSAVABLE.add("generator_function")


@kind
class CallableWithCall:
    class Inner:
        def __init__(self):
            self.calls = [0]

        def __call__(self):
            self.calls[0] += 1
            return spread(self.calls[0])

    def __init__(self):
        self.functions = (self.Inner(), {"second": self.Inner()})

    def __call__(self):
        return 0.5 * self.functions[0]() + 0.4 * self.functions[1]["second"]()


# Classes


@kind
class ClassAttribute:
    count = 0
    numbers = [0]
    rng = random.Random(2)

    def __call__(self):
        type(self).count += 1
        self.numbers.append(1)
        return spread(self.count + len(self.numbers) + self.rng.random())


class Base:
    count_of_class = 0
    __count = 0

    def base_calls(self):
        self.__count += 1
        Base.count_of_class += 1
        return self.__count


@kind
class PrivateNames(Base):
    __count = 10

    def __call__(self):
        self.__count += 3
        return spread(self.__count + self.base_calls() + self.count_of_class)


@kind
class ClassMethods:
    count = 0

    @classmethod
    def advance(cls):
        cls.count += 1
        return cls.count

    @staticmethod
    def total():
        ClassMethods.count += 1
        return ClassMethods.count

    def __call__(self):
        return spread(self.advance() + self.total())


class CountsCalls(type):
    """A metaclass with a counter in each of its classes, and one of its own."""

    num_classes = 0

    def advance(cls):
        cls.calls = getattr(cls, "calls", 0) + 1
        CountsCalls.num_classes += 1
        return cls.calls + CountsCalls.num_classes


@kind
class OfMetaclass(metaclass=CountsCalls):
    def __call__(self):
        return spread(type(self).advance())


class SlotsOfBase:
    __slots__ = ("__count", "values")


@kind
class Slots(SlotsOfBase):
    __slots__ = ("__count", "late")

    def __init__(self):
        self.values, self.__count = [0], 0

    def __call__(self):
        self.values.append(1)
        self.__count += 1
        self.late = getattr(self, "late", 0) + 2
        return spread(len(self.values) + self.__count + self.late)


class HiddenSlot:
    __slots__ = ("count",)

    def advance(self):
        HiddenSlot.count.__set__(self, self.base_count() + 1)

    def base_count(self):
        return HiddenSlot.count.__get__(self)


@kind
class SlotsOfOneName(HiddenSlot):
    __slots__ = ("count",)

    def __init__(self):
        HiddenSlot.count.__set__(self, 0)
        self.count = 0

    def __call__(self):
        self.count += 1
        self.advance()
        return spread(self.count + 2 * self.base_count())


@kind
class Properties:
    def __init__(self):
        self._count = 0

    @property
    def count(self):
        return self._count

    @count.setter
    def count(self, count):
        self._count = count

    @functools.cached_property
    def history(self):
        return []

    def __call__(self):
        self.count += 1
        self.history.append(self.count)
        return spread(sum(self.history))


class Descriptor:
    """Keeps the values of all instances in a dict of its own."""

    def __init__(self):
        self.values = weakref.WeakKeyDictionary()

    def __get__(self, whole, kind=None):
        return self if whole is None else self.values.get(whole, 0)

    def __set__(self, whole, value):
        self.values[whole] = value


@kind
class Descriptors:
    count = Descriptor()

    def __call__(self):
        self.count += 1
        return spread(self.count)


UNSAVABLE.add("Descriptors")


@kind
class GuardedAttributes:
    """Refuses ordinary assignment."""

    def __init__(self):
        object.__setattr__(self, "count", 0)

    def __setattr__(self, name, value):
        raise AttributeError(name)

    def __getattr__(self, name):
        raise AttributeError(name)

    def __call__(self):
        object.__setattr__(self, "count", self.count + 1)
        return spread(self.count)


@kind
class DeletedAttribute:
    def __init__(self):
        self.first, self.count = True, 0

    def __call__(self):
        self.count += 1
        if hasattr(self, "first"):
            del self.first
            return 0.9
        return spread(self.count)


class Color(enum.Enum):
    """Values that a run cycles through."""

    RED, GREEN, BLUE = range(3)


class Access(enum.Flag):
    """Values that are combined."""

    READ = enum.auto()
    WRITE = enum.auto()
    RUN = enum.auto()


class Level(enum.IntEnum):
    """Values that are integers."""

    LOW, HIGH = 1, 2


@kind
class Enums:
    def __init__(self):
        self.color, self.level, self.colors = Color.RED, Level.LOW, [Color.BLUE]

    def __call__(self):
        self.color = Color((self.color.value + 1) % 3)
        self.level = Level(3 - self.level)
        self.colors[0] = self.color
        return spread(self.color.value + self.level + self.colors[0].value)


@kind
class Flags:
    def __init__(self):
        self.access, self.count = Access.READ, 0

    def __call__(self):
        self.count += 1
        self.access = Access(self.count % 8)
        return spread(self.access.value * 3)


@kind
class EnumAsKey:
    def __init__(self):
        self.counts = dict.fromkeys(Color, 0)
        self.color = Color.RED

    def __call__(self):
        self.color = Color((self.color.value + 1) % 3)
        self.counts[self.color] += 1
        return spread(self.counts[self.color] * 7 + self.color.value)


# Arrays and tensors


@kind
class NumPyValues:
    def __init__(self):
        self.scalar, self.array = np.float32(0.5), np.zeros(3)
        self.zero_dim, self.is_odd = np.array(1), np.bool_(False)
        self.texts, self.time = np.array(["a"]), np.datetime64("2026-01-01")

    def __call__(self):
        self.scalar = self.scalar * np.float32(3.7) % np.float32(1)
        self.array[1] += 1
        self.zero_dim += 2
        self.is_odd = np.bool_(not self.is_odd)
        self.texts = np.append(self.texts, "b")
        self.time += np.timedelta64(1, "D")
        number = float(self.scalar) + self.array[1] + int(self.zero_dim) + bool(self.is_odd)
        return spread(number + len(self.texts) + self.time.astype(int))


@kind
class ViewsOfArrays:
    """Views that the task makes, and ones that the run makes."""

    def __init__(self):
        self.base = np.zeros((2, 3), order="F")
        self.view = self.base[1:, ::2]
        self.late = None

    def __call__(self):
        if self.late is None:
            self.late = self.base[0]
        self.view += 1
        self.late[1] += 2
        return spread(self.base.sum())


@kind
class GrowingArray:
    def __init__(self):
        self.values = np.zeros(1)
        self.records = np.zeros(1, dtype=[("count", "i8"), ("mean", "f4")])

    def __call__(self):
        self.values = np.append(self.values, len(self.values))
        self.records["count"] += 1
        return spread(self.values.sum() + self.records["count"][0])


UNSAVABLE.add("GrowingArray")


UNSAVABLE.add("ViewsOfArrays")


class Signal(np.ndarray):
    """An array of a class of its own."""


@kind
class SubclassOfArray:
    def __init__(self):
        self.signal = np.zeros(2).view(Signal)
        self.masked = np.ma.masked_array([0.0, 1.0], [False, True])

    def __call__(self):
        self.signal += 1
        self.masked[0] += 1
        return spread(float(self.signal[0]) + float(self.masked[0]))


@kind
class ArrayOfObjects:
    def __init__(self):
        self.lists = np.array([None, None], dtype=object)
        self.lists[0] = [0]

    def __call__(self):
        self.lists[0].append(1)
        return spread(len(self.lists[0]))


@kind
class Tensors:
    def __init__(self):
        self.plain = torch.zeros(2, device=DEVICE)
        self.half = torch.zeros(2, dtype=torch.bfloat16, device=DEVICE)
        self.list, self.late = [torch.zeros((), device=DEVICE)], None

    def __call__(self):
        self.plain += 1
        self.half.add_(1)
        self.list.append(self.list[-1] + 1)
        self.late = torch.ones(1, device=DEVICE) if self.late is None else self.late * 1.1
        number = self.plain[0] + self.half[1].float() + self.list[-1] + self.late[0]
        return spread(number.item())


@kind
class ViewsOfTensors:
    """Views that the task makes, and ones that the run makes."""

    def __init__(self):
        self.base = torch.zeros(2, 3, device=DEVICE)
        self.view, self.late, self.new = self.base[1].t(), None, None

    def __call__(self):
        if self.late is None:
            self.late = self.base[:, 0]
            self.new = torch.zeros(4, device=DEVICE)
            self.tail = self.new[2:]
        self.view += 1
        self.late += 2
        self.tail += 1
        return spread((self.base.sum() + self.new.sum()).item())


@kind
class SwappedTensor:
    def __init__(self):
        self.values, self.other = torch.zeros(2, device=DEVICE), torch.ones(2, device=DEVICE)

    def __call__(self):
        self.values, self.other = self.other, self.values
        self.values.data = self.values.data * 1.5 + 0.1
        return spread(self.values[0].item())


@kind
class AttributeOfTensor:
    def __init__(self):
        self.values = torch.zeros(2)
        self.values.count = 0

    def __call__(self):
        self.values.count += 1
        return spread(self.values.count)


@kind
class SparseTensor:
    def __init__(self):
        self.values = torch.eye(2).to_sparse()

    def __call__(self):
        self.values = self.values * 1.5
        return spread(self.values.to_dense()[0, 0].item())


UNSAVABLE.add("SparseTensor")


@kind
class StorageOfNumPy:
    """A tensor and an array over one memory."""

    def __init__(self):
        self.array = np.zeros(3)
        self.tensor = torch.from_numpy(self.array)

    def __call__(self):
        self.array += 1
        self.tensor[0] += 1
        return spread(self.array.sum())


# References, contexts and iterators


@kind
class WeakReferences:
    def __init__(self):
        self.counter = IntAttribute()
        self.reference = weakref.ref(self.counter)

    def __call__(self):
        return self.reference()()


@kind
class WeakKeys:
    def __init__(self):
        self.part = IntAttribute()
        self.counts = weakref.WeakKeyDictionary({self.part: 0})

    def __call__(self):
        self.counts[self.part] = self.counts.get(self.part, 0) + 1
        return spread(self.counts[self.part])


UNSAVABLE.add("WeakKeys")


@kind
class StackOfContexts:
    def __init__(self):
        self.counter = IntAttribute()
        self.stack = contextlib.ExitStack()
        self.stack.callback(self.counter)

    def __deepcopy__(self, memo):
        raise TypeError("the callbacks of a copy would be those of the original")

    def __call__(self):
        self.stack.pop_all().close()
        self.stack.callback(self.counter)
        return spread(self.counter.count)


UNSAVABLE.add("StackOfContexts")


@kind
class OfThread:
    def __init__(self):
        self.local = threading.local()
        self.local.count = 0

    def __call__(self):
        self.local.count += 1
        return spread(self.local.count)


COUNT_OF_CONTEXT = contextvars.ContextVar("count", default=0)


@kind
class OfContext:
    def __call__(self):
        COUNT_OF_CONTEXT.set(COUNT_OF_CONTEXT.get() + 1)
        return spread(COUNT_OF_CONTEXT.get())


@kind
class Locked:
    def __init__(self):
        self.lock, self.event, self.count = threading.Lock(), threading.Event(), 0

    def __call__(self):
        with self.lock:
            self.count += 1
        if self.count % 3 == 0:
            self.event.set()
        elif self.count % 3 == 1:
            self.event.clear()
        return spread(self.count + self.event.is_set())


@kind
class Iterators:
    def __init__(self):
        self.count, self.cycle = itertools.count(1, 3), itertools.cycle([1, 5, 2])
        self.list, self.range = iter(list(range(1000))), iter(range(0, 100_000, 7))
        self.text, self.repeat = iter("abc" * 500), itertools.repeat(1)

    def __call__(self):
        number = next(self.count) + next(self.cycle) + next(self.list) + next(self.range)
        return spread(number + ord(next(self.text)) + next(self.repeat))


def _iterator_kind(name: str, make: Callable[[], Any]) -> None:
    def maker() -> Any:
        holder = types.SimpleNamespace(iterator=make())

        def call() -> float:
            entry = next(holder.iterator)
            return spread(hash(entry) % 1009)

        return call

    maker.__name__ = name
    kind(maker, savable=False)


_MANY = range(100_000)
_iterator_kind("chain", lambda: itertools.chain([1, 2], _MANY))
_iterator_kind("islice", lambda: itertools.islice(_MANY, 0, None, 3))
_iterator_kind("counted_repeat", lambda: itertools.repeat(2, 1000))
_iterator_kind("accumulate", lambda: itertools.accumulate(_MANY))
_iterator_kind("product", lambda: itertools.product(range(50), range(50)))
_iterator_kind("permutations", lambda: itertools.permutations(range(9)))
_iterator_kind("combinations", lambda: itertools.combinations(range(50), 3))
_iterator_kind("pairwise", lambda: itertools.pairwise(_MANY))
_iterator_kind("tee", lambda: itertools.tee(_MANY)[0])
_iterator_kind("zipped", lambda: zip(_MANY, _MANY))
_iterator_kind("mapped", lambda: map(abs, _MANY))
_iterator_kind("filtered", lambda: filter(None, _MANY))
_iterator_kind("enumerated", lambda: enumerate(_MANY))
_iterator_kind("reverse", lambda: reversed(list(_MANY)))
_iterator_kind("of_dict", lambda: iter(dict.fromkeys(_MANY)))
_iterator_kind("of_set", lambda: iter(set(range(1000))))
_iterator_kind("until_sentinel", lambda: iter(random.Random(1).random, None))
_iterator_kind("of_array", lambda: iter(array.array("i", _MANY)))
_iterator_kind("of_deque", lambda: iter(collections.deque(_MANY)))
_iterator_kind("of_numpy", lambda: np.arange(1000).flat)
_iterator_kind("expression", lambda: (number * 3 for number in _MANY))


@kind(savable=False)
class Text:
    """A stream in memory."""

    def __init__(self):
        self.stream, self.bytes = io.StringIO("0123456789" * 300), io.BytesIO(bytes(1000))

    def __call__(self):
        self.bytes.write(b"\x01")
        return spread(int(self.stream.read(1)) + sum(self.bytes.getvalue()))


@kind(savable=False)
class NumberClasses:
    """Immutable values of classes that Python brings."""

    def __init__(self):
        self.fraction = fractions.Fraction(1, 3)

    def __call__(self):
        self.fraction += fractions.Fraction(1, 7)
        return spread(float(self.fraction))


@kind(savable=False)
class MadeByTheRun:
    """An instance of a class of the user's that only the run makes."""

    def __init__(self):
        self.counters = []

    def __call__(self):
        if len(self.counters) < 3:
            self.counters.append(IntAttribute())
        return spread(sum(counter() for counter in self.counters))


@kind(savable=False)
class CopiedEachTime:
    """Replaced by a changed copy of itself."""

    def __init__(self):
        self.counter = IntAttribute()

    def __call__(self):
        self.counter = copy.deepcopy(self.counter)
        return self.counter()


@kind
class Modules:
    """A module of torch that isn't registered in another."""

    def __init__(self):
        self.hidden = [nn.BatchNorm1d(1)]

    def __call__(self):
        norm = self.hidden[0].train()
        with torch.no_grad():
            norm(torch.tensor([[float(norm.num_batches_tracked)], [1.0]]))
        return spread(norm.running_mean.item())


# Of real code


@kind
class ReplayBuffer:
    """A ring in a long list and large arrays, of which each call changes an entry."""

    size = 5000

    def __init__(self):
        self.steps, self.rewards = [None] * self.size, np.zeros(self.size)
        self.position = 0

    def __call__(self):
        self.steps[self.position * 37 % self.size] = (self.position, [0.5])
        self.rewards[self.position * 41 % self.size] = self.position
        self.position += 1
        num_steps = sum(step is not None for step in self.steps)
        return spread(num_steps + self.rewards.sum())


@kind
class LossesOfSamples:
    """A curriculum: averages of losses, and how often each sample was seen."""

    def __init__(self):
        self.table = np.zeros(8, dtype=[("loss", "f4"), ("count", "i8")])
        self.averages = collections.defaultdict(float)

    def __call__(self):
        idx = int(self.table["count"].sum()) % 8
        self.table["count"][idx] += 1
        self.averages[idx] = 0.9 * self.averages[idx] + 0.1 * idx
        return spread(self.table["count"][idx] + 10 * sum(self.averages.values()))


UNSAVABLE.add("LossesOfSamples")


@kind
class ManyLists:
    """An index of each class, in more lists than are entered."""

    def __init__(self):
        self.members, self.count = [[idx] for idx in range(1203)], 0

    def __call__(self):
        self.count += 1
        self.members[self.count * 7 % 1203].append(self.count)
        return spread(max(map(len, self.members)) + self.members[self.count * 7 % 1203][-1])


@kind(savable=False)
class ManyObjects:
    """More objects than are entered, with state of their own."""

    def __init__(self):
        self.counters = [IntAttribute() for _ in range(1500)]

    def __call__(self):
        return spread(self.counters[1234]() + self.counters[7]())


class CountingMixin:
    __slots__ = ()

    def advance(self):
        self.count += 1
        return self.count


class Countable:
    __slots__ = ("__weakref__", "count")


@kind
class MixinOfSlots(CountingMixin, Countable):
    __slots__ = ("__dict__",)

    def __init__(self):
        self.count, self.extra = 0, [0]

    def __call__(self):
        self.extra[0] += self.advance()
        return spread(self.extra[0])


@kind
class GeneratorsByEnum:
    def __init__(self):
        self.rngs = {color: random.Random(color.value) for color in Color}
        self.bits = {Level.LOW: np.random.default_rng(1), Level.HIGH: torch.Generator()}

    def __call__(self):
        number = self.rngs[Color.GREEN].random() + self.rngs[Color.RED].gauss(0, 1)
        return spread(number + self.bits[Level.LOW].random())


@kind
class HeapOfLists:
    """With a count that breaks ties."""

    def __init__(self):
        self.ties = itertools.count()
        self.heap = [[0.5, next(self.ties), "a"], [0.1, next(self.ties), "b"]]
        heapq.heapify(self.heap)

    def __call__(self):
        entry = heapq.heappop(self.heap)
        heapq.heappush(
            self.heap, [entry[0] + 0.3, next(self.ties), entry[2] * 2 if len(entry[2]) < 9 else "c"]
        )
        return spread(entry[0] + entry[1] + len(entry[2]))


@kind
class UserContainers:
    def __init__(self):
        self.data, self.items = collections.UserDict(a=1), collections.UserList([1])

    def __call__(self):
        self.data[len(self.data)] = len(self.items)
        self.items.append(self.data)
        del self.items[:-3]
        return spread(len(self.data) + len(self.items))


@kind
class SharedNumber:
    """Numbers in memory that processes share, and that C code may write."""

    def __init__(self):
        self.epoch = multiprocessing.Value("i", 0)
        self.raw = multiprocessing.RawArray("d", 3)
        self.plain = ctypes.c_long(0)

    def __deepcopy__(self, memo):
        raise TypeError("memory that processes share has no copies")

    def __call__(self):
        with self.epoch.get_lock():
            self.epoch.value += 1
        self.raw[1] += 0.5
        self.plain.value += 2
        return spread(self.epoch.value + self.raw[1] + self.plain.value)


@kind(savable=False)
class Digest:
    """A seed from a hash of all that came before."""

    def __init__(self):
        self.hash = hashlib.sha256(b"seed")

    def __call__(self):
        self.hash.update(b"step")
        return int.from_bytes(self.hash.copy().digest()[:4], "big") / 2**32


@kind(savable=False)
class ImmutablesOfLibraries:
    """Values that are replaced: dates, decimals, paths."""

    def __init__(self):
        self.date, self.amount = datetime.date(2026, 1, 1), decimal.Decimal("0.1")
        self.path, self.pattern = pathlib.PurePath("a"), re.compile("a")

    def __call__(self):
        self.date += datetime.timedelta(days=1)
        self.amount *= decimal.Decimal("1.3")
        self.path /= "b"
        self.pattern = re.compile(self.pattern.pattern + "a")
        size = len(str(self.path)) + len(self.pattern.pattern)
        return spread(self.date.toordinal() + float(self.amount % 7) + size)


@kind(savable=False)
class Settled:
    """An object of Python's library that is changed in place."""

    def __init__(self):
        self.parser = configparser.ConfigParser()
        self.parser["state"] = {"count": "0"}

    def __call__(self):
        section = self.parser["state"]
        section["count"] = str(int(section["count"]) + 1)
        return spread(int(section["count"]))


@kind
class Signals:
    def __init__(self):
        self.event, self.slots = threading.Event(), threading.Semaphore(1000)

    def __deepcopy__(self, memo):
        raise TypeError("a lock has no copy")

    def __call__(self):
        self.slots.acquire()
        was_set = self.event.is_set()
        (self.event.clear if was_set else self.event.set)()
        return spread(self.slots._value + 3 * was_set)


@kind(savable=False)
class CallbacksOfStack:
    """How many callbacks wait decides."""

    def __init__(self):
        self.stack = contextlib.ExitStack()

    def __call__(self):
        self.stack.callback(len, "")
        return spread(len(self.stack._exit_callbacks))


@kind
class WeakCache:
    """A cache of objects that another list holds."""

    def __init__(self):
        self.parts = [IntAttribute() for _ in range(3)]
        self.cache = weakref.WeakValueDictionary(enumerate(self.parts))

    def __deepcopy__(self, memo):
        raise TypeError("the cache of a copy would be empty")

    def __call__(self):
        return 0.5 * self.cache[1]() + 0.4 * self.cache[2]()


@kind
class PartialMethods:
    def call(self, numbers, *, step):
        numbers.append(step)
        return spread(sum(numbers))

    advance = functools.partialmethod(call, [0], step=3)

    def __init__(self):
        type(self).advance = functools.partialmethod(type(self).call, [0], step=3)

    def __call__(self):
        return self.advance()


@kind
class StateInRegistry:
    """A registry at a class, with closures in it."""

    registry: dict = {}

    def __init__(self):
        totals = [0]

        def add(number):
            totals[0] += number
            return totals[0]

        self.registry.clear()
        self.registry["add"] = add

    def __call__(self):
        return spread(self.registry["add"](3))


@kind
class Average(torch.optim.swa_utils.AveragedModel):
    """An averaged model that no other module has registered."""

    def __init__(self):
        super().__init__(nn.Linear(1, 1))

    def __call__(self):
        with torch.no_grad():
            source = nn.Linear(1, 1)
            source.weight.fill_(float(self.n_averaged))
            source.bias.fill_(1.0)
        self.update_parameters(source)
        return spread(self.module.weight.item() + self.n_averaged.item())


# Places: each takes an object of a kind, and returns parts of a task

NUM_SAMPLES, BATCH_SIZE = 24, 4
INPUTS = torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.argmax(1)
PLACES: dict[str, Callable[[Any, dict[str, Any]], None]] = {}


def place(function: Any) -> Any:
    """Adds a function that puts an object into the parts of a task."""
    PLACES[function.__name__] = function
    return function


class Data(Dataset):
    """Samples that are moved a little."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return INPUTS[index] + 0.1 * self.draw(), TARGETS[index]


class DataOfEpochs(Data):
    """Is told the epoch, and draws then."""

    scale = 0.0

    def set_epoch(self, epoch):
        self.scale = self.draw() + epoch

    def __getitem__(self, index):
        return INPUTS[index] * (1 + 0.1 * self.scale), TARGETS[index]


class Order(Sampler):
    """An order that depends on its draws, some for each sample."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return NUM_SAMPLES

    def __iter__(self):
        shift = int(NUM_SAMPLES * self.draw())
        for idx in range(NUM_SAMPLES):
            yield (idx + shift + int(3 * self.draw())) % NUM_SAMPLES


class Batches(Order):
    """Batches that depend on draws."""

    def __len__(self):
        return NUM_SAMPLES // BATCH_SIZE

    def __iter__(self):
        indices = list(super().__iter__())
        for start in range(0, NUM_SAMPLES, BATCH_SIZE):
            yield indices[start : start + BATCH_SIZE]


class Stream(IterableDataset):
    """Batches of an iterable data set."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return NUM_SAMPLES

    def __iter__(self):
        for idx in range(NUM_SAMPLES):
            yield INPUTS[idx] + 0.1 * self.draw(), TARGETS[idx]


class Loader:
    """An iterable of a user's own."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return NUM_SAMPLES // BATCH_SIZE

    def __iter__(self):
        for batch in INPUTS.view(-1, BATCH_SIZE, 3):
            yield batch + 0.1 * self.draw(), batch.argmax(1)


class Collate:
    """Moves a batch."""

    def __init__(self, draw):
        self.draw = draw

    def __call__(self, samples):
        inputs, targets = map(torch.stack, zip(*samples, strict=True))
        return inputs + 0.1 * self.draw(), targets


@place
def dataset(draw, parts):
    parts["data"]["dataset"] = Data(draw)


@place
def dataset_of_epochs(draw, parts):
    parts["data"]["dataset"] = DataOfEpochs(draw)


@place
def sampler(draw, parts):
    parts["data"]["sampler"] = Order(draw)


@place
def batch_sampler(draw, parts):
    parts["data"]["batch_sampler"] = Batches(draw)


@place
def sampler_in_batch_sampler(draw, parts):
    parts["data"]["batch_sampler"] = BatchSampler(Order(draw), BATCH_SIZE, drop_last=True)


@place
def collate_fn(draw, parts):
    parts["data"]["collate_fn"] = Collate(draw)


@place
def stream(draw, parts):
    parts["train_dataloader"] = DataLoader(Stream(draw), BATCH_SIZE)


@place
def loader(draw, parts):
    parts["train_dataloader"] = Loader(draw)


class Model(nn.Linear):
    """Draws when it is trained."""

    def __init__(self):
        super().__init__(3, 3)
        self.draws = []

    def forward(self, inputs):
        scale = 1.0
        if self.training:
            for draw in self.draws:
                scale += 0.1 * draw()
        return super().forward(inputs * scale)


@place
def model(draw, parts):
    parts["on_model"].append(lambda module: module.draws.append(draw))


@place
def attribute_of_model(draw, parts):
    class Module(Model):
        def forward(self, inputs):
            if self.training:
                inputs = inputs + 0.1 * self.noise()
            return super().forward(inputs)

    parts["model"] = Module
    parts["on_model"].append(lambda module: setattr(module, "noise", draw))


@place
def forward_hook(draw, parts):
    def hook(module, args, outputs):
        return outputs * (1 + 0.1 * draw()) if module.training else outputs

    parts["on_model"].append(lambda module: module.register_forward_hook(hook))


@place
def gradient_hook(draw, parts):
    parts["on_model"].append(
        lambda module: module.weight.register_hook(lambda grad: grad * (1 + 0.1 * draw()))
    )


@place
def accumulation_hook(draw, parts):
    def hook(param):
        param.grad.mul_(1 + 0.1 * draw())

    parts["on_model"].append(lambda module: module.bias.register_post_accumulate_grad_hook(hook))


@place
def attribute_of_parameter(draw, parts):
    class Module(Model):
        def forward(self, inputs):
            if self.training:
                inputs = inputs + 0.1 * self.weight.noise()
            return super().forward(inputs)

    parts["model"] = Module
    parts["on_model"].append(lambda module: setattr(module.weight, "noise", draw))


class Loss(nn.Module):
    """Scales itself."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, outputs, targets):
        loss = nn.functional.cross_entropy(outputs, targets)
        return loss * (1 + self.draw()) if self.training else loss


@place
def loss_module(draw, parts):
    parts["loss"] = Loss(draw)


@place
def loss_function(draw, parts):
    parts["loss"] = lambda outputs, targets: (
        nn.functional.cross_entropy(outputs, targets) * (1 + draw())
    )


class DrawingSGD(torch.optim.SGD):
    """Draws at each step."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 0.1 + 0.05 * self.draw()
        return super().step(closure)


@place
def optimizer_step(draw, parts):
    def make(params):
        optimizer = DrawingSGD(params, lr=0.1, momentum=0.9)
        optimizer.draw = draw
        return optimizer

    parts["optimizer"] = make


@place
def optimizer_hook(draw, parts):
    def make(params):
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)

        def scale(optimizer, args, kwargs):
            for param in optimizer.param_groups[0]["params"]:
                param.grad.mul_(1 + draw())

        optimizer.register_step_pre_hook(scale)
        return optimizer

    parts["optimizer"] = make


@place
def schedule(draw, parts):
    parts["scheduler"] = lambda step: 0.5 + draw()


class Metric(torchmetrics.Metric):
    """A metric that draws beside its state."""

    higher_is_better = True

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.add_state("total", torch.zeros(()), "sum")

    def update(self, outputs, targets):
        self.total += outputs.sum() + self.draw()

    def compute(self):
        return self.total + self.draw()


@place
def metric(draw, parts):
    parts["metrics"] = lambda: {"drawn": Metric(draw)}


@place
def train_metric(draw, parts):
    parts["train_metrics"] = lambda: {"drawn_in_training": Metric(draw)}


@place
def eval_dataset(draw, parts):
    parts["eval_dataset"] = Data(draw)


@place
def eval_sampler(draw, parts):
    parts["eval_sampler"] = Order(draw)
