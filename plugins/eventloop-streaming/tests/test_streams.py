"""Streams by themselves: each sample once, and the same ones after a state was loaded anywhere."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter

import pytest
from torch.utils.data import BatchSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from eventloop.data.sample_order import Order
from eventloop.data.sampling_state import SamplingState
from eventloop_streaming import Batches, Mixed, Permuted, Shards, Shuffled, Sliced, StreamState

SAMPLES = list(range(40))


class LikeDatasets:
    """A stream with a state that, loaded at the end of an epoch, yields nothing the next time."""

    def __init__(self, samples=SAMPLES):
        self.samples, self.num, self.is_loaded = samples, 0, False

    def __iter__(self):
        if not self.is_loaded:
            self.num = 0
        self.is_loaded = False
        for sample in self.samples[self.num :]:
            self.num += 1
            yield sample

    def state_dict(self):
        return {"num": self.num}

    def load_state_dict(self, state):
        self.num, self.is_loaded = state["num"], True


def shards():
    return Shards("abcde", lambda name: [f"{name}{idx}" for idx in range(3 + ord(name) % 4)])


MAKERS = {
    "shuffled list": lambda: Shuffled(SAMPLES, 7),
    "shuffled stream with a state": lambda: Shuffled(LikeDatasets(), 7),
    "shards": shards,
    "shuffled shards": lambda: Shuffled(shards(), 4, seed=1),
    "mixed, first": lambda: Mixed({"a": SAMPLES, "b": shards()}, {"a": 3, "b": 1}),
    "mixed, all": lambda: Mixed({"a": LikeDatasets(), "b": shards()}, stop="all"),
    "mixed, repeat": lambda: Mixed({"a": LikeDatasets(), "b": shards()}, stop="repeat"),
    "shuffled mixture": lambda: Shuffled(
        Mixed({"a": LikeDatasets(), "b": shards()}, stop="all"), 9
    ),
    "mixture of shuffled": lambda: Mixed({"a": Shuffled(shards(), 3), "b": SAMPLES}, stop="repeat"),
    "sliced": lambda: Sliced(LikeDatasets()),
    "batches": lambda: Batches(Shuffled(SAMPLES, 7), 6, collate_fn=list),
    "batches, last one dropped": lambda: Batches(
        LikeDatasets(), 7, collate_fn=list, drop_last=True
    ),
}
every_kind = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


@every_kind
def test_a_loaded_stream_goes_on_as_the_saved_one(make):
    """Behind each sample of an epoch, twice in a row, and for two epochs more."""
    whole = make()
    epochs = [list(whole) for _ in range(3)]
    for num in range(1, len(epochs[0])):
        saved = make()
        iterator = iter(saved)
        taken = list(itertools.islice(iterator, num))
        states = [pickle.dumps(saved.state_dict())]
        once = make()
        once.load_state_dict(pickle.loads(states[0]))
        more = list(itertools.islice(once, 1))
        twice = make()
        twice.load_state_dict(pickle.loads(pickle.dumps(once.state_dict())))

        rest = list(twice)

        assert taken + more + rest == epochs[0]
        assert [list(twice) for _ in range(2)] == epochs[1:]


@every_kind
def test_a_stream_that_was_saved_between_epochs_begins_the_next(make):
    """A mixture's sources and a buffer begin it, too."""
    saved = make()
    first, state = list(saved), pickle.dumps(saved.state_dict())
    loaded = make()
    loaded.load_state_dict(pickle.loads(state))

    assert first
    assert list(loaded) == list(saved)


def test_a_shuffled_stream_has_each_sample_once_in_another_order_each_epoch():
    stream = Shuffled(SAMPLES, 10)
    first, second = list(stream), list(stream)

    assert sorted(first) == sorted(second) == SAMPLES
    assert (
        len({tuple(one) for one in (SAMPLES, first, second, list(Shuffled(SAMPLES, 10, seed=1)))})
        == 4
    )


def test_each_place_of_the_buffer_is_drawn_alike():
    """The first sample of an epoch is each of the buffer's as often as any other."""
    stream = Shuffled(range(20), 8)
    firsts = Counter(next(iter([*stream])) for _ in range(1600))

    assert set(firsts) == set(range(8))
    assert all(120 < num < 280 for num in firsts.values())


def test_a_mixture_draws_by_weight():
    stream = Mixed({"a": ["a"] * 4000, "b": ["b"] * 4000}, {"a": 3, "b": 1})
    counted = Counter(itertools.islice(stream, 4000))

    assert 2850 < counted["a"] < 3150


@pytest.mark.parametrize(
    ("stop", "of_a", "of_b"), [("first", None, 5), ("all", 40, 5), ("repeat", 40, None)]
)
def test_a_mixture_ends_as_it_is_told(stop, of_a, of_b):
    """First: some are left of the longer; all: each once; repeat: some of the shorter come again."""
    stream = Mixed({"a": ["a"] * 40, "b": ["b"] * 5}, stop=stop)
    counted = Counter(stream)

    assert of_a is None or counted["a"] >= of_a
    assert (counted["b"] == of_b) if of_b else (counted["b"] > 5)
    assert stop != "first" or counted["a"] < 40
    assert stop != "all" or counted == {"a": 40, "b": 5}


def test_ranks_and_workers_have_shards_of_their_own(monkeypatch):
    """Together each shard once."""
    seen = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        seen += [*shards()]

    monkeypatch.undo()
    assert sorted(seen) == sorted(shards())


def test_slices_of_a_stream_are_as_long_on_each_rank(monkeypatch):
    """What is left over is nobody's."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    slices = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        slices.append([*Sliced(SAMPLES)])

    assert slices == [SAMPLES[rank:39:3] for rank in range(3)]


def test_ranks_that_share_their_samples_are_told_apart_by_their_data(monkeypatch):
    """Four processes, two by two."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    slices = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        slices.append([*Sliced(SAMPLES, ranks=(rank // 2, 2))])

    assert slices == [SAMPLES[rank // 2 : 40 : 2] for rank in range(4)]


def test_shards_go_on_with_the_ranks_that_they_had(monkeypatch):
    saved = shards()
    next(iter(saved))
    state = saved.state_dict()
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(ValueError, match="ranks times workers were 1 and are 2"):
        shards().load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shuffled(iter(SAMPLES), 3), "list_iterator can be iterated over only once"),
        (lambda: Shuffled(SAMPLES, 0), "buffer_size=0 is not an int of 1 or more"),
        (lambda: Batches(SAMPLES, True), "batch_size=True is not"),
        (lambda: Mixed({}), r"streams are \[\]"),
        (lambda: Mixed({"a": []}, {"b": 1}), r"streams are \['a'\], weights are of \['b'\]"),
        (lambda: Mixed({"a": []}, {"a": 0}), "aren't all more than 0"),
        (lambda: Mixed({"a": []}, stop="later"), "is none of first, all, repeat"),
        (lambda: list(Mixed({"a": [], "b": [1]}, stop="repeat")), "'a' has no sample to repeat"),
    ],
)
def test_what_can_not_work_is_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.parametrize("num", [1, 2, 3, 64, 1000, 4097, 10_000])
def test_a_permutation_has_each_index_once(num):
    order = Permuted(num, seed=5)
    first = list(order)
    order.set_epoch(1)
    second = list(order)

    assert len(order) == num
    assert sorted(first) == sorted(second) == list(range(num))
    assert num < 64 or (first != second and first != sorted(first))


def test_a_permutation_holds_nothing():
    """Of a billion samples the first are there at once."""
    first = list(itertools.islice(Permuted(10**9), 10_000))

    assert len(set(first)) == 10_000
    assert 0.45 < sum(first) / len(first) / 10**9 < 0.55


def test_a_permutation_begins_anywhere():
    """At the same samples as one that was gone through."""
    whole, skipped = Permuted(10_000, seed=3), Permuted(10_000, seed=3)
    skipped.start_at(7_001)

    assert list(skipped) == list(whole)[7_001:]
    assert list(skipped) == list(whole)


def test_a_run_in_the_middle_of_a_permutation_computes_none_of_what_was_taken(monkeypatch):
    """Half of a hundred million takes minutes, and an order that is remembered takes gigabytes."""
    num_computed = 0
    encrypted = Permuted._encrypted

    def counted(self, indices):
        nonlocal num_computed
        num_computed += len(indices)
        return encrypted(self, indices)

    monkeypatch.setattr(Permuted, "_encrypted", counted)
    order = Order(BatchSampler(Permuted(10**9), 1_000, drop_last=False), None, SamplingState({}))
    start = order.state.state_dict(with_global=True)

    order.seek(start, 500_000, None)

    assert len(next(iter(order))) == 1_000
    assert num_computed < 100_000


class LateState(LikeDatasets):
    """Loaded, it has the state of the start until it yields, as streams of `datasets` do."""

    def state_dict(self):
        return {"num": 0} if self.is_loaded else super().state_dict()


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("make", [StreamState, lambda stream: Shuffled(stream, 4)])
def test_workers_that_have_yielded_nothing_since_a_resume_keep_their_place(make):
    """The run stops again after one batch, which is the other worker's."""

    def loader():
        return StatefulDataLoader(make(LateState()), 4, num_workers=2)

    whole = [batch.tolist() for batch in loader()]
    taken, state = [], None
    for num_taken in (3, 1, 100):
        resumed = loader()
        if state is not None:
            resumed.load_state_dict(state)
        taken += [batch.tolist() for batch in itertools.islice(resumed, num_taken)]
        state = resumed.state_dict()

    assert taken == whole


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("num_taken", [16, 17, 18])
def test_a_worker_that_is_done_waits_for_the_others(num_taken):
    """One is done with its last batch, which isn't full, before the other: the epoch isn't over."""

    def loader():
        return StatefulDataLoader(Sliced(range(68)), 4, num_workers=2)

    whole = [batch.tolist() for batch in loader()]
    stopped = loader()
    taken = [batch.tolist() for batch in itertools.islice(stopped, num_taken)]
    resumed = loader()
    resumed.load_state_dict(stopped.state_dict())

    assert taken + [batch.tolist() for batch in resumed] == whole
