"""Loaders of other libraries, whose states are made complete."""

from __future__ import annotations

import numpy as np
import pytest

from eventloop import TaskError
from eventloop_streaming import IteratorState, LitdataState


class LikeLitdata:
    """A loader that forgets its epoch when it goes on, and is reset by an iterator that is exhausted."""

    def __init__(self):
        self.current_epoch = self.num = 0
        self.restore = False
        self.dataset = self
        self.state = {}

    def __len__(self):
        return 6

    def __iter__(self):
        if not self.restore:
            self.loader_epoch = getattr(self, "loader_epoch", 0) + 1
            self.current_epoch, self.num = self.loader_epoch, 0
        # Workers know the epoch that was loaded; this process doesn't.
        epoch = self.loaded_epoch if self.restore else self.loader_epoch
        for idx in range(self.num, len(self)):
            self.num += 1
            yield 100 * epoch + idx
        self.restore = False

    def state_dict(self):
        self.state |= {
            "dataset": {"current_epoch": self.current_epoch},
            "current_epoch": getattr(self, "loader_epoch", 0),
            "num": self.num,
        }
        return self.state

    def load_state_dict(self, state):
        self.loader_epoch, self.num = state["current_epoch"], state["num"]
        self.loaded_epoch = state["dataset"]["current_epoch"]
        self.restore = 0 < self.num < len(self)


def taken(loader, num):
    """Returns as many batches, epoch after epoch, as the trainer takes them: no iterator is exhausted."""
    batches = []
    while len(batches) < num:
        iterator = iter(loader)
        for _ in range(min(num - len(batches), len(loader) - loader.state_dict()["num"] % 6)):
            batches.append(next(iterator))
    return batches


@pytest.mark.parametrize("stops", [(2, 3, 30), (8, 1, 30), (9, 2, 9, 30), (6, 6, 30)])
def test_a_loader_of_litdata_goes_on_after_each_stop(stops):
    """In the first epoch, in later ones, and behind one."""
    whole = taken(LitdataState(LikeLitdata()), sum(stops))

    batches, state = [], None
    for num in stops:
        loader = LitdataState(LikeLitdata())
        if state is not None:
            loader.load_state_dict(state)
        batches += taken(loader, num)
        state = loader.state_dict()

    assert batches == whole
    assert len({*whole}) == len(whole)


@pytest.mark.parametrize("missing", ["restore", "current_epoch"])
def test_another_version_of_litdata_is_an_error_that_names_the_one_that_is_known(missing):
    """What its state has isn't documented."""
    loader = LikeLitdata()
    if missing == "restore":
        del loader.restore
    else:
        loader.state_dict = lambda: {"dataset": {}, "current_epoch": 0}

    with pytest.raises(
        TaskError, match=r"of a LikeLitdata over a LikeLitdata[^$]*litdata 0\.2\.76"
    ):
        LitdataState(loader)


class Shared(np.ndarray):
    """An array of a class of its own, such as grain's workers send."""


class Iterator:
    def __init__(self):
        self.num = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.num += 1
        if self.num > 3:
            raise StopIteration
        return {"inputs": np.full(2, self.num).view(Shared), "names": ("a", [1.5])}

    def get_state(self):
        return self.num

    def set_state(self, num):
        self.num = num


class Batches:
    def __iter__(self):
        return Iterator()


def test_arrays_of_iterators_become_tensors():
    """Those of derived classes, too, in any nest; and what was taken isn't yielded again."""
    first = IteratorState(Batches())
    next(iter(first))
    second = IteratorState(Batches())
    second.load_state_dict(first.state_dict())

    batches = [*second]

    assert [batch["inputs"].tolist() for batch in batches] == [[2, 2], [3, 3]]
    assert batches[0]["names"] == ["a", [1.5]]
