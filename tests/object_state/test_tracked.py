"""What a run has changed in objects is saved and put back in place; what can't be saved is named."""

from __future__ import annotations

import collections
import configparser
import contextlib
import ctypes
import datetime
import enum
import functools
import graphlib
import hashlib
import io
import itertools
import logging
import multiprocessing
import os
import queue
import random
import re
import threading
import types
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from eventloop.object_state.tracked import TrackedObjects, restored_objects


def resumed(make, change, probe):
    """Changes objects, and returns what is seen in them, and in others that their state was put into."""
    root = make()
    objects = TrackedObjects({"root": root})
    change(root)
    state = objects.state_dict()
    assert state["lost"] == {}
    other = make()
    TrackedObjects({"root": other}).load_state_dict(state)
    return probe(root), probe(other)


def test_unchanged_objects_have_no_state():
    """A checkpoint doesn't grow by data that a new process makes again."""
    root = SimpleNamespace(data=torch.zeros(1000), names=["a"] * 50, table=np.zeros(100), rate=0.5)

    state = TrackedObjects({"root": root}).state_dict()

    assert state == {"contents": {}, "values": {}, "gone": [], "lost": {}}


def test_objects_that_change_places_are_followed():
    """State belongs to the object, not to the attribute that it was found at."""

    def make():
        return SimpleNamespace(
            left=SimpleNamespace(n=0), right=SimpleNamespace(n=0), order=[[1], [2]]
        )

    def change(root):
        root.left, root.right = root.right, root.left
        root.left.n = 5
        root.order.reverse()
        root.order[0].append(3)

    expected, actual = resumed(make, change, lambda root: (root.left.n, root.right.n, root.order))

    assert actual == expected == (5, 0, [[2, 3], [1]])


def test_references_to_an_object_stay_references():
    """A container that two objects share has one content."""

    def make():
        shared = collections.deque([1])
        return SimpleNamespace(queue=shared, view=SimpleNamespace(queue=shared), late=None)

    def change(root):
        root.queue.append(2)
        root.late = [root.queue, root.view]

    def probe(root):
        return (
            list(root.queue),
            root.view.queue is root.queue,
            root.late[0] is root.queue,
            root.late[1] is root.view,
        )

    expected, actual = resumed(make, change, probe)

    assert actual == expected == ([1, 2], True, True, True)


def test_a_tensor_is_restored_in_place():
    """Its views, and who else holds it, see the values."""

    def make():
        whole = torch.zeros(4)
        return SimpleNamespace(whole=whole, part=whole[2:])

    def change(root):
        root.whole[3] = 7

    expected, actual = resumed(make, change, lambda root: (root.whole.tolist(), root.part.tolist()))

    assert actual == expected == ([0, 0, 0, 7], [0, 7])


def test_a_function_that_the_start_of_a_process_assigns_is_not_lost():
    """A plugin does it again when the run is resumed; one that is assigned later is named."""
    root = SimpleNamespace(step=None, filter=None)
    objects = TrackedObjects({"root": root})

    root.step = lambda: 1
    assert objects.state_dict()["lost"] == {}
    assert objects.state_dict()["lost"] == {}

    root.filter = lambda: 2
    assert objects.state_dict()["lost"].keys() == {"root.filter"}


@pytest.mark.parametrize(
    "late",
    [
        lambda: (number for number in range(3)),
        lambda: io.BytesIO(),
        lambda: SimpleNamespace(),
        lambda: [open],
        lambda: print,
    ],
)
def test_what_is_made_in_the_run_and_can_not_be_saved_is_named(late):
    """By its path, with its type."""
    root = SimpleNamespace(parts=[SimpleNamespace(handle=None)])
    objects = TrackedObjects({"root": root})
    objects.state_dict()

    root.parts[0].handle = late()

    state = objects.state_dict()
    assert state["lost"].keys() == {"root.parts[0].handle"}
    assert re.match("it holds a|it is an iterator", state["lost"]["root.parts[0].handle"])


def test_a_container_that_holds_too_much_is_named():
    """A cache of a data set isn't the state of a run."""
    root = SimpleNamespace(cache={})
    objects = TrackedObjects({"root": root}, max_bytes=1000)

    root.cache["a"] = "x" * 2000

    assert "at most" in objects.state_dict()["lost"]["root.cache"]


def test_a_shape_that_the_new_process_builds_otherwise_is_left_and_named():
    """The data have changed in the meantime."""
    objects = TrackedObjects({"root": (old := SimpleNamespace(counts=np.zeros(3)))})
    old.counts[0] = 1
    new = SimpleNamespace(counts=np.zeros(5))

    with pytest.warns(UserWarning, match=r"root\.counts has the shape \(5,\), and had \(3,\) in"):
        TrackedObjects({"root": new}).load_state_dict(objects.state_dict())

    assert new.counts.tolist() == [0] * 5


def test_code_is_not_replaced_by_a_value():
    """A file could switch off what it likes."""
    root = SimpleNamespace(transform=print, rate=0.1)
    state = {"contents": {}, "values": {"root.transform": 1}, "gone": ["root.rate"], "lost": {}}

    words = r"root\.transform is a .*otherwise resume the run with the task .* or start a new run in another"
    with pytest.warns(UserWarning, match=words):
        TrackedObjects({"root": root}).load_state_dict(state)

    assert root.transform is print
    assert not hasattr(root, "rate")


def test_a_block_leaves_objects_as_they_were():
    """Reading a batch to look at it mustn't move the data."""
    root = SimpleNamespace(queue=collections.deque([1, 2]), rng=np.random.default_rng(0), n=1)
    expected = np.random.default_rng(0).random()

    with restored_objects(root=root):
        root.queue.popleft()
        root.rng.random()
        root.n, root.late = 5, 3

    assert list(root.queue) == [1, 2]
    assert (root.n, root.rng.random()) == (1, expected)


def test_a_state_can_be_loaded_twice():
    """A position in the data is sought again when a run goes on in the same process."""
    root = SimpleNamespace(queue=[1], stage=None)
    objects = TrackedObjects({"root": root})
    root.queue.append(2)
    root.stage = [root.queue]
    state = objects.state_dict()

    root.queue.clear()
    root.stage = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objects.load_state_dict(state)
        objects.load_state_dict(state)

    assert root.queue == [1, 2]
    assert root.stage[0] is root.queue


def test_an_iterator_whose_position_is_not_readable_is_named_from_the_start():
    """Nobody sees whether it has moved."""
    root = SimpleNamespace(parts={"source": (number for number in range(3))}, numbers=iter([1]))
    objects = TrackedObjects({"root": root})

    assert objects.unsavable_iterators() == ["root.parts['source']"]
    assert objects.state_dict()["lost"].keys() == {"root.parts['source']"}


def test_files_and_caches_of_objects_that_are_read_by_index_are_left_out(tmp_path):
    """What a data set opens when it is first read, it opens again."""
    (tmp_path / "data").write_bytes(b"abc")
    root = SimpleNamespace(file=None, cache={}, source=None)
    objects = TrackedObjects({"root": root}, needs_all=False, max_bytes=10)

    with (tmp_path / "data").open("rb") as root.file:
        root.cache["long"] = "x" * 100
        root.source = (number for number in range(3))

        assert objects.state_dict()["lost"].keys() == {"root.source"}


def test_a_tensor_that_is_expanded_is_restored():
    """Its entries share memory, so that nothing can be copied into it."""

    def make():
        return SimpleNamespace(scale=torch.ones(1).expand(3), untouched=torch.zeros(1).expand(2))

    def change(root):
        root.scale.data = torch.full((1,), 2.0).expand(3)

    expected, actual = resumed(make, change, lambda root: root.scale.tolist())

    assert actual == expected == [2, 2, 2]
    root = make()
    with restored_objects(root=root):
        root.scale.data = torch.full((1,), 2.0).expand(3)
    assert root.scale.tolist() == [1, 1, 1]


class Kind(enum.Flag):
    """A class that the objects below use as keys of a dict."""

    LEFT = 1
    RIGHT = 2


class Step(NamedTuple):
    """A class whose instances the run makes."""

    number: int


class SlotOfBase:
    __slots__ = ("count",)


class SlotOfOneName(SlotOfBase):
    __slots__ = ("count",)


class CountingRandom(random.Random):
    """A generator with an attribute."""

    num_drawn = 0


def keyword_default():
    def call(*, numbers=[0]):
        numbers[0] += 1
        return numbers[0]

    call.__kwdefaults__ = {"numbers": [0]}
    return call


HELD = {
    "a method of C code": (
        lambda: SimpleNamespace(draw=random.Random(1).random),
        lambda root: root.draw(),
        lambda root: root.draw(),
    ),
    "a memoryview": (
        lambda: SimpleNamespace(view=memoryview(bytearray(2))),
        lambda root: root.view.__setitem__(1, 7),
        lambda root: bytes(root.view),
    ),
    "a read-only view of a dict": (
        lambda: SimpleNamespace(table=types.MappingProxyType({"a": [0]})),
        lambda root: root.table["a"].append(1),
        lambda root: root.table["a"],
    ),
    "a default of a keyword": (
        lambda: SimpleNamespace(call=keyword_default()),
        lambda root: root.call(),
        lambda root: root.call(),
    ),
    "a queue": (
        lambda: SimpleNamespace(queue=queue.Queue()),
        lambda root: root.queue.put(3),
        lambda root: [*root.queue.queue],
    ),
    "an attribute of a thread's": (
        threading.local,
        lambda root: setattr(root, "count", 3),
        lambda root: root.count,
    ),
    "a bit generator": (
        lambda: SimpleNamespace(bits=np.random.PCG64(1), seeds=np.random.SeedSequence(2)),
        lambda root: (root.bits.random_raw(), root.seeds.spawn(3)),
        lambda root: (root.bits.random_raw(), root.seeds.spawn(1)[0].spawn_key),
    ),
    "a subclass of a generator": (
        lambda: SimpleNamespace(rng=CountingRandom(1)),
        lambda root: setattr(root.rng, "num_drawn", root.rng.random()),
        lambda root: root.rng.num_drawn,
    ),
    "a slot that another hides": (
        lambda: SimpleNamespace(part=SlotOfOneName()),
        lambda root: SlotOfBase.count.__set__(root.part, 5),
        lambda root: SlotOfBase.count.__get__(root.part),
    ),
    "flags in a dict": (
        lambda: SimpleNamespace(kinds={Kind.LEFT: 0}),
        lambda root: root.kinds.update({Kind.LEFT | Kind.RIGHT: 2}),
        lambda root: root.kinds,
    ),
    "named tuples in a list": (
        lambda: SimpleNamespace(steps=[], first=Step(0)),
        lambda root: root.steps.append(Step(4)),
        lambda root: (root.steps, type(root.steps[0])),
    ),
    "a view of a tensor": (
        lambda: SimpleNamespace(whole=torch.zeros(4), part=None),
        lambda root: setattr(root, "part", root.whole[1:]),
        lambda root: (root.part.add_(1).tolist(), root.whole.tolist()),
    ),
    "an attribute of a tensor": (
        lambda: SimpleNamespace(values=torch.zeros(1)),
        lambda root: setattr(root.values, "count", 3),
        lambda root: root.values.count,
    ),
    "an array of a class": (
        lambda: SimpleNamespace(masked=np.ma.masked_array([0, 1], [False, True])),
        lambda root: root.masked.__setitem__(0, 9),
        lambda root: root.masked.tolist(),
    ),
    "a list in an array of objects": (
        lambda: SimpleNamespace(lists=np.array([[0], None], dtype=object)),
        lambda root: root.lists[0].append(1),
        lambda root: root.lists[0],
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_objects_behind_others_are_restored(name):
    """Whatever holds them: code in C, a hidden slot, a default, an instance of a class."""
    make, change, probe = HELD[name]

    expected, actual = resumed(make, change, probe)

    assert actual == expected


def test_an_iterator_behind_code_in_c_is_named():
    """Nothing else can be put there."""
    root = SimpleNamespace(following=itertools.count().__next__)
    objects = TrackedObjects({"root": root})
    root.following()

    assert list(objects.state_dict()["lost"]) == ["root.following.__self__"]


def test_a_plain_value_that_a_run_had_not_changed_is_as_it_was_built():
    """Though the process that goes on has changed it before the state is loaded."""
    state = TrackedObjects({"root": SimpleNamespace(count=0, rate=0.5)}).state_dict()
    root = SimpleNamespace(count=0, rate=0.5)
    objects = TrackedObjects({"root": root})
    root.count, root.rate = 1, 0.7

    objects.load_state_dict(state)

    assert (root.count, root.rate) == (0, 0.5)


def test_an_object_that_this_process_has_replaced_by_a_value_stays_so():
    """The saved run may have kept it: there is nothing to put back."""

    def make():
        return SimpleNamespace(part=SimpleNamespace(n=1), day=datetime.date(2026, 1, 1))

    state = TrackedObjects({"root": make()}).state_dict()
    root = make()
    objects = TrackedObjects({"root": root})
    root.part = root.day = None

    objects.load_state_dict(state)

    assert (root.part, root.day) == (None, None)


def test_what_a_process_works_by_is_not_lost(tmp_path):
    """A log, a lock and a file to write give nothing to the training, even if they are made late."""
    root = SimpleNamespace(lock=None, log=None, file=None)
    objects = TrackedObjects({"root": root})
    with (tmp_path / "log").open("w") as root.file:
        root.lock, root.log = threading.Lock(), logging.getLogger("late")

        assert objects.state_dict()["lost"] == {}


def test_a_file_to_read_is_named():
    """Its position decides what comes next."""
    with Path(os.devnull).open() as file:
        objects = TrackedObjects({"root": SimpleNamespace(file=file)})

        assert list(objects.state_dict()["lost"]) == ["root.file"]


class Sample:
    def __init__(self, number):
        self.number, self.scores = number, []


MANY = {
    "an attribute": lambda samples: setattr(samples[700], "number", -1),
    "a list in an attribute": lambda samples: samples[700].scores.append(0.5),
    "an entry": lambda samples: samples.__setitem__(700, Sample(-1)),
}


@pytest.mark.parametrize("name", MANY)
def test_a_change_in_more_objects_than_are_entered_is_named(name):
    """Only a long list itself is compared, and that as a whole."""
    root = SimpleNamespace(samples=[Sample(idx) for idx in range(1001)])
    objects = TrackedObjects({"root": root})
    assert objects.state_dict()["lost"] == {}

    MANY[name](root.samples)

    lost = objects.state_dict()["lost"]
    assert list(lost) == ["root.samples"]
    assert "1,001 entries" in lost["root.samples"]
    assert "Store the changing values in an array" in lost["root.samples"]


def test_iterators_among_many_objects_are_named():
    """Python doesn't show where they are."""
    root = SimpleNamespace(sources=[(number for number in range(3)) for _ in range(1001)])

    lost = TrackedObjects({"root": root}, needs_all=True).state_dict()["lost"]

    assert list(lost) == ["root.sources"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: [[idx] for idx in range(1500)],
        lambda: {idx: [idx] for idx in range(1500)},
        lambda: [np.zeros(2) for _ in range(1500)],
        lambda: [torch.zeros(2) for _ in range(1500)],
        lambda: [random.Random(idx) for idx in range(1500)],
    ],
)
def test_a_change_in_many_built_in_values_is_saved(make):
    """No class of the task has to be made for them."""

    def change(root):
        entry = root.parts[1400]
        if isinstance(entry, random.Random):
            entry.random()
        else:
            entry[0] = 7

    def probe(root):
        entry = root.parts[1400]
        return entry.random() if isinstance(entry, random.Random) else float(entry[0])

    expected, actual = resumed(lambda: SimpleNamespace(parts=make()), change, probe)

    assert actual == expected


def test_of_many_objects_that_are_read_by_index_changed_numbers_are_named():
    """Losses of samples decide what comes next; what is read into a sample is a cache."""
    root = SimpleNamespace(samples=[SimpleNamespace(loss=0.0, pixels=None) for _ in range(1001)])
    objects = TrackedObjects({"root": root}, needs_all=False)

    root.samples[3].pixels = bytes(10)
    assert objects.state_dict()["lost"] == {}

    root.samples[5].loss = 0.5
    assert list(objects.state_dict()["lost"]) == ["root.samples"]


def test_of_many_values_that_are_too_large_the_size_is_named():
    """Not the number of entries."""
    root = SimpleNamespace(cache=[np.zeros(2) for _ in range(1500)])
    objects = TrackedObjects({"root": root}, max_bytes=1000)

    root.cache[3][0] = 1

    assert "at most" in objects.state_dict()["lost"]["root.cache"]


def make_groups():
    """Returns more objects than a walk enters, in lists that are short enough."""
    groups = [[Sample(idx) for idx in range(900)] for _ in range(25)]
    return SimpleNamespace(rate=0.1, tables={"groups": groups})


def test_more_objects_than_a_walk_enters_are_named_at_the_start_and_when_they_change():
    """With where they are, what it means for a resume, and what to do."""
    root = make_groups()
    message = (
        r"first 20,000 objects of root are checked for changes; most of them are in "
        r"root.tables\['groups'\]\. .* must be allowed\. Store many small objects as an array"
    )
    with pytest.warns(UserWarning, match=message):
        objects = TrackedObjects({"root": root})
    assert objects.state_dict()["lost"] == {}

    root.tables["groups"][24][899].number = -1

    lost = objects.state_dict()["lost"]
    assert list(lost) == ["root.tables['groups']"]
    assert "the run has changed other objects" in lost["root.tables['groups']"]


def test_an_object_that_is_freed_and_one_in_its_memory_differ():
    """Python gives a new object the address of the last that it has freed."""
    root = SimpleNamespace(value=datetime.date(2026, 1, 1))
    objects = TrackedObjects({"root": root})
    address = id(root.value)

    root.value = None
    others = [datetime.date(2026, 1, day) for day in range(2, 9)]
    root.value = next((value for value in others if id(value) == address), others[0])

    assert list(objects.state_dict()["lost"]) == ["root.value"]


def test_an_entry_of_a_large_array_or_list_is_seen():
    """A replay buffer changes by an entry at a time."""

    def make():
        return SimpleNamespace(rewards=np.zeros(100_000), steps=[(0, 0.0)] * 10_000)

    def change(root):
        root.rewards[77_777] = 1.5
        root.steps[7_777] = (3, 0.5)

    expected, actual = resumed(make, change, lambda root: (root.rewards[77_777], root.steps[7_777]))

    assert actual == expected == (1.5, (3, 0.5))


class Key:
    """A key with identity."""


def test_generators_under_keys_of_any_class_are_restored():
    """Paths of their own, whatever the keys look like."""

    def make():
        keys = [Kind.LEFT, Kind.RIGHT, (1, "a"), Key(), Key()]
        return SimpleNamespace(rngs={key: random.Random(idx) for idx, key in enumerate(keys)})

    def draw(root):
        return [rng.random() for rng in root.rngs.values()]

    expected, actual = resumed(make, draw, draw)

    assert actual == expected


def test_classes_of_the_same_name_are_restored():
    """A function may make a class each time it is called."""

    def make_class():
        class Counting:
            count = 0

        return Counting

    def make():
        return SimpleNamespace(classes=[make_class(), make_class(), make_class()])

    def change(root):
        for idx, kind in enumerate(root.classes):
            kind.count = idx + 1

    expected, actual = resumed(make, change, lambda root: [kind.count for kind in root.classes])

    assert actual == expected == [1, 2, 3]


def test_numbers_of_c_are_restored_in_place():
    """Memory that processes share, of which each has a handle."""

    def make():
        return SimpleNamespace(
            epoch=multiprocessing.Value("i", 0), raw=(ctypes.c_double * 3)(), one=ctypes.c_bool()
        )

    def change(root):
        root.epoch.value, root.raw[1], root.one.value = 3, 0.5, True

    expected, actual = resumed(
        make, change, lambda root: (root.epoch.value, list(root.raw), root.one.value)
    )

    assert actual == expected == (3, [0, 0.5, 0], True)


OPAQUE = {
    "a hash": (hashlib.sha256, lambda value: value.update(b"a")),
    "a hash of any length": (hashlib.shake_128, lambda value: value.update(b"a")),
    "a parser of settings": (
        configparser.ConfigParser,
        lambda value: value.read_dict({"a": {"b": "c"}}),
    ),
    "a stack of callbacks": (contextlib.ExitStack, lambda value: value.callback(print)),
    "an order of tasks": (graphlib.TopologicalSorter, lambda value: value.add(1, 2)),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_objects_of_the_standard_library_that_change_in_place_are_named(name):
    """Not before they change."""
    make, change = OPAQUE[name]
    root = SimpleNamespace(part=make())
    objects = TrackedObjects({"root": root})
    assert objects.state_dict()["lost"] == {}

    change(root.part)

    assert list(objects.state_dict()["lost"]) == ["root.part"]


def test_a_path_that_caches_its_text_has_not_changed():
    """Nor has a lock that a thread waits for."""
    root = SimpleNamespace(path=Path("a") / "b", jobs=queue.Queue())
    objects = TrackedObjects({"root": root})

    hash(root.path)
    str(root.path)
    waiting = threading.Thread(target=root.jobs.get)
    waiting.start()
    state = objects.state_dict()
    root.jobs.put(None)
    waiting.join()

    assert state == {"contents": {}, "values": {}, "gone": [], "lost": {}}


class Looks:
    """Keeps facts about the tensors that it has seen, each made anew when it is read."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.shape = self.dtype = None

    def look(self, tensor):
        self.device = torch.device(str(tensor.device))
        self.shape = tensor.shape
        self.dtype = tensor.dtype


def test_facts_about_tensors_are_values():
    """Equal ones are no change, however often they are made; others are restored."""
    looks = Looks()
    objects = TrackedObjects({"looks": looks})
    looks.device = torch.device("cpu", None)

    assert objects.state_dict()["values"] == {}
    looks.look(torch.zeros(2, 3, dtype=torch.float64))
    state = objects.state_dict()
    assert state["lost"] == {}
    other = Looks()
    TrackedObjects({"looks": other}).load_state_dict(state)

    assert (other.shape, other.dtype) == (torch.Size([2, 3]), torch.float64)
    assert other.device == torch.device("cpu")


class Cache:
    """Knows its layers by their identities."""

    def __init__(self):
        self.layers = [torch.nn.Linear(1, 1) for _ in range(40)]
        self.names = None
        self.ids = []

    def fill(self):
        self.names = {id(layer): str(idx) for idx, layer in enumerate(self.layers)}
        self.ids = [id(layer) for layer in self.layers]


def test_identities_are_those_of_the_new_process():
    """A cache by `id(...)` would know none of the objects, or others."""
    cache = Cache()
    objects = TrackedObjects({"cache": cache})
    cache.fill()
    other = Cache()

    TrackedObjects({"cache": other}).load_state_dict(objects.state_dict())

    assert other.names == {id(layer): str(idx) for idx, layer in enumerate(other.layers)}
    assert other.ids == [id(layer) for layer in other.layers]


def optimizer():
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def test_a_method_that_a_library_has_wrapped_in_the_run_is_not_lost():
    """A scheduler does so with its optimizer's `step`."""
    made = optimizer()
    objects = TrackedObjects({"optimizer": made})
    objects.state_dict()

    torch.optim.lr_scheduler.ConstantLR(made)

    assert "step" in vars(made)
    assert objects.state_dict()["lost"] == {}


def test_a_method_that_the_run_has_replaced_is_lost():
    """Training depends on it."""
    made = optimizer()
    objects = TrackedObjects({"optimizer": made})
    objects.state_dict()

    made.step = functools.wraps(type(made).step)(lambda: None)

    assert list(objects.state_dict()["lost"]) == ["optimizer.step"]


def test_objects_that_only_this_process_has_exchanged_are_exchanged_back():
    """A data set that is told its epoch before its state is loaded may do so."""

    def make():
        return SimpleNamespace(first=torch.zeros(1), second=torch.ones(1))

    saved = make()
    objects = TrackedObjects({"root": saved})
    for _ in range(2):
        saved.first, saved.second = saved.second, saved.first
    saved.first += 5
    resumed = make()
    other_objects = TrackedObjects({"root": resumed})
    resumed.first, resumed.second = resumed.second, resumed.first

    other_objects.load_state_dict(objects.state_dict())

    assert (resumed.first, resumed.second) == (5, 1)
