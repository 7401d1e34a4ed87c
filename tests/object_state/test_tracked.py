"""What a run has changed in objects is saved and put back in place; what can't be saved is named."""

from __future__ import annotations

import collections
import re
import threading
import warnings
from types import SimpleNamespace

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


@pytest.mark.parametrize(
    "late",
    [
        lambda: (number for number in range(3)),
        lambda: threading.Lock(),
        lambda: SimpleNamespace(),
        lambda: [open],
        lambda: print,
    ],
)
def test_what_is_made_in_the_run_and_can_not_be_saved_is_named(late):
    """By its path, with its type."""
    root = SimpleNamespace(parts=[SimpleNamespace(handle=None)])
    objects = TrackedObjects({"root": root})

    root.parts[0].handle = late()

    state = objects.state_dict()
    assert state["lost"].keys() == {"root.parts[0].handle"}
    assert re.match("it holds a|the position", state["lost"]["root.parts[0].handle"])


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

    with pytest.warns(UserWarning, match=r"root\.counts has the shape \(5,\), and had \(3,\)"):
        TrackedObjects({"root": new}).load_state_dict(objects.state_dict())

    assert new.counts.tolist() == [0] * 5


def test_code_is_not_replaced_by_a_value():
    """A file could switch off what it likes."""
    root = SimpleNamespace(transform=print, rate=0.1)
    state = {"contents": {}, "values": {"root.transform": 1}, "gone": ["root.rate"], "lost": {}}

    with pytest.warns(UserWarning, match="root.transform is a"):
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
