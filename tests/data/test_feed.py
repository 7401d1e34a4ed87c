"""The feed: how batches are taken from a loader, in one process."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from eventloop.data import cycled
from eventloop.data.feed import Feed
from eventloop.distributed.processes import Processes
from eventloop.errors import TaskError


def feed_of(dataloader):
    return Feed(dataloader, Processes())


class Stream(IterableDataset):
    """An iterable data set that promises more than it gives, as those of several workers do."""

    def __len__(self):
        return 100

    def __iter__(self):
        return iter(range(3))


class Lazy:
    def __iter__(self):
        return iter("abc")


LOADERS = {
    "list": lambda: ["a", "b", "c"],
    "loader": lambda: DataLoader(TensorDataset(torch.arange(3))),
    "stream": lambda: DataLoader(Stream(), batch_size=1),
    "iterable": Lazy,
    "generator": lambda: (one for one in "abc"),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_feed_gives_every_batch_once(make):
    """Whether the loader knows its length or not."""
    feed, given = feed_of(make()), 0
    feed.start_epoch(0)

    while feed.has_next():
        feed.next()
        given += 1
    feed.end_epoch()

    assert given == 3
    assert not feed.under_way


@pytest.mark.parametrize("name", ["list", "loader", "stream", "iterable"])
def test_a_feed_begins_anew_each_epoch(name):
    """Also after one that was left in the middle."""
    feed, first = feed_of(LOADERS[name]()), []

    for epoch in range(2):
        feed.start_epoch(epoch)
        first.append(feed.next())
        feed.end_epoch()

    assert first[0] == first[1]


def test_a_length_that_can_be_relied_on_is_known():
    """An iterable data set may break its word; `len` of it is a guess."""
    known = {name: feed_of(make()).num_batches for name, make in LOADERS.items()}

    assert known == {"list": 3, "loader": 3, "stream": None, "iterable": None, "generator": None}


class Growing(Sampler):
    """Batches whose number depends on the epoch."""

    def __init__(self, numbers):
        self.numbers, self.epoch = numbers, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.numbers[self.epoch]

    def __iter__(self):
        return ([idx, idx + 1] for idx in range(len(self)))


@pytest.mark.parametrize("numbers", [(3, 5, 2), (6, 4, 4)])
def test_a_sampler_may_have_more_or_fewer_batches_in_each_epoch(numbers):
    """By the length of the first, some would be left out, or missed."""
    feed, taken = feed_of(DataLoader(torch.arange(9), batch_sampler=Growing(numbers))), []

    for epoch in range(3):
        feed.start_epoch(epoch)
        taken.append(0)
        while feed.has_next():
            feed.next()
            taken[-1] += 1
        feed.end_epoch()

    assert tuple(taken) == numbers


def test_a_loader_that_knows_its_length_is_asked_when_a_batch_is_wanted():
    """Not before: what is fetched ahead is the loader's business."""
    taken = []

    class Watched(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, idx):
            taken.append(idx)
            return idx

    feed = feed_of(DataLoader(Watched(), batch_size=None))
    feed.start_epoch(0)

    assert feed.has_next()
    assert taken == []
    feed.next()
    assert taken == [0]


def test_a_loader_shorter_than_it_said_is_named():
    """Rather than a StopIteration from the depths."""

    class Wrong(Lazy, list):
        def __len__(self):
            return 5

        __iter__ = Lazy.__iter__

    feed = feed_of(Wrong())
    feed.start_epoch(0)
    for _ in range(3):
        feed.next()

    with pytest.raises(TaskError, match="yielded 3 batches, but its length is 5"):
        feed.next()


def test_a_sampler_is_told_the_epoch():
    """A distributed sampler shuffles by it."""
    epochs = []
    loader = DataLoader(TensorDataset(torch.arange(3)))
    loader.sampler.set_epoch = epochs.append

    feed = feed_of(loader)
    for epoch in (0, 7):
        feed.start_epoch(epoch)

    assert epochs == [0, 7]


@pytest.mark.parametrize("empty", [[], iter([])])
def test_an_epoch_without_a_batch_is_refused(empty):
    """A generator that is used up would let epochs pass untrained, or for ever."""
    with pytest.raises(
        TaskError, match=r"yielded no batch in epoch 3[\s\S]*a generator is used up"
    ):
        feed_of(empty).start_epoch(2)


class Numbers(IterableDataset):
    """An endless stream; each of several workers gives its share."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in itertools.count(start, step):
            yield torch.full((3,), float(number)), torch.tensor(number % 3)


def in_triples(pairs):
    inputs, targets = zip(*pairs, strict=True)
    return {"x": [torch.stack(inputs)], "extra": ("text", None), "labels": torch.stack(targets)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_endless_loader_trains_for_a_duration_in_batches(num_workers, make_trainer, make_task):
    """An epoch never ends, the run does; workers or not."""
    loader = DataLoader(Numbers(), batch_size=4, num_workers=num_workers)
    trainer = make_trainer(make_task(train_dataloader=loader), max_duration="5ba")

    trainer.fit()

    assert (trainer.state.clock.epoch, trainer.state.clock.batch) == (0, 5)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_draw_what_a_plain_loop_draws(num_workers, make_trainer, make_task, make_plugin):
    """Shuffling takes its seeds from the global generator, at the same moments."""
    data = TensorDataset(torch.arange(24.0).reshape(8, 3), torch.arange(8) % 3)
    loader = DataLoader(data, 2, shuffle=True, num_workers=num_workers)
    seen = []
    watch = make_plugin("watch", batch_start=lambda state: seen.append(state.inputs.clone().cpu()))
    task = make_task(model=torch.nn.Linear(3, 3), train_dataloader=loader)

    make_trainer(task, callbacks=[watch], max_duration="2ep", seed=5).fit()

    torch.manual_seed(5)
    expected = [inputs for _ in range(2) for inputs, _ in loader]
    assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True))


class Noisy(Dataset):
    """Each sample has a number from torch's generator."""

    def __len__(self):
        return 8

    def __getitem__(self, idx):
        return torch.full((3,), idx + torch.rand(()).item()), idx % 3


@pytest.mark.parametrize("seed_samples", [False, True])
def test_a_data_set_draws_as_in_a_plain_loop_where_that_is_asked_for(
    seed_samples, make_trainer, make_task, make_plugin
):
    """Otherwise its draws are tied to the index, and a run that is stopped can draw them again."""
    loader = DataLoader(Noisy(), 2, shuffle=True)
    seen = []
    watch = make_plugin("watch", batch_start=lambda state: seen.append(state.inputs.clone().cpu()))
    task = make_task(model=torch.nn.Linear(3, 3), train_dataloader=loader)
    settings = {"max_duration": "2ep", "seed": 5, "seed_samples": seed_samples}

    make_trainer(task, callbacks=[watch], **settings).fit()

    torch.manual_seed(5)
    expected = [inputs for _ in range(2) for inputs, _ in loader]
    same = [torch.equal(one, other) for one, other in zip(seen, expected, strict=True)]
    assert all(same) is not seed_samples
    assert any(same) is not seed_samples


def test_any_nest_trains_in_microbatches(make_trainer, make_task):
    """Lists in mappings, words in tuples: what a collate function makes."""
    loader = DataLoader(Numbers(), batch_size=4, collate_fn=in_triples)
    task = make_task(
        train_dataloader=loader,
        forward=lambda model, batch: model(batch["x"][0]),
    )
    trainer = make_trainer(task, max_duration="3ba", microbatch_size=3)

    trainer.fit()

    assert trainer.state.clock.sample == 12


class EndsEarly(Dataset):
    """40 samples, the fifth of which raises StopIteration, as `next` on an empty iterator does."""

    def __len__(self):
        return 40

    def __getitem__(self, idx):
        if idx == 4:
            next(iter(()))
        return torch.randn(3), 0


def end_at_two(samples):
    if samples[0] == 2:
        next(iter(()))
    return torch.ones(len(samples), 3), torch.tensor(samples)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("how", "num_workers"), [("fit", 0), ("eval", 0), ("eval", 1), ("predict", 0)]
)
def test_a_data_set_cannot_end_the_data_early(make_trainer, make_task, how, num_workers):
    """A StopIteration of `__getitem__` ends a for loop over a DataLoader without a word."""
    loader = DataLoader(EndsEarly(), batch_size=2, num_workers=num_workers)
    task = make_task(train_dataloader=loader, eval_dataloaders=loader)
    trainer = make_trainer(task, eval_interval=None)
    given = [loader] if how == "predict" else []

    with pytest.raises(TaskError, match=r"StopIteration|yielded 2 batches, but its length is 20"):
        getattr(trainer, how)(*given)


@pytest.mark.parametrize(("how", "num_workers"), [("fit", 0), ("fit", 1), ("eval", 0)])
def test_a_collate_function_cannot_end_the_data_early(make_trainer, make_task, how, num_workers):
    """An iterable data set has no length that would show that batches are missing."""
    loader = DataLoader(Stream(), 2, collate_fn=end_at_two, num_workers=num_workers)
    task = make_task(train_dataloader=loader, eval_dataloaders=loader)
    trainer = make_trainer(task, eval_interval=None)

    with pytest.raises(TaskError, match="collate_fn end_at_two raised StopIteration"):
        getattr(trainer, how)()


def pid_of_worker(samples):
    return torch.tensor(os.getpid())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["fit", "eval", "predict"])
def test_nor_can_it_where_workers_stay(make_trainer, make_task, how):
    """Their loader is no copy that is made for each evaluation."""
    loader = DataLoader(Stream(), 2, collate_fn=end_at_two, num_workers=1, persistent_workers=True)
    task = make_task(train_dataloader=loader, eval_dataloaders=loader)
    trainer = make_trainer(task, eval_interval=None)
    given = [loader] if how == "predict" else []

    with pytest.raises(TaskError, match="collate_fn end_at_two raised StopIteration"):
        getattr(trainer, how)(*given)


def test_workers_that_stay_are_started_once(make_trainer, make_task):
    """An evaluation may be due every few batches."""
    loader = DataLoader(
        Stream(), 2, collate_fn=pid_of_worker, num_workers=1, persistent_workers=True
    )
    trainer = make_trainer(make_task(forward=lambda model, batch: batch))

    first, second = (trainer.predict(loader) for _ in range(2))

    assert first[0].item() == second[0].item() != os.getpid()


def test_the_error_of_a_cycled_loader_is_not_its_end(make_trainer, make_task):
    """What begins anew after a StopIteration would train on the first samples alone."""
    task = make_task(train_dataloader=cycled(DataLoader(EndsEarly(), batch_size=2)))

    with pytest.raises(TaskError, match="EndsEarly raised StopIteration"):
        make_trainer(task, max_duration="5ba").fit()


class FailsOnce(Dataset):
    """Raises at its third sample, the first time."""

    has_failed = False

    def __len__(self):
        return 6

    def __getitem__(self, idx):
        if idx == 2 and not self.has_failed:
            self.has_failed = True
            raise OSError("network")
        return torch.tensor([float(idx)])


class StreamsOnce(FailsOnce, IterableDataset):
    __len__ = None

    def __iter__(self):
        return (self[idx] for idx in range(6))


FAILING = {
    "loader": lambda: DataLoader(FailsOnce()),
    "stream": lambda: DataLoader(StreamsOnce()),
    "iterable": StreamsOnce,
    "cycled": lambda: cycled(DataLoader(FailsOnce())),
}


@pytest.mark.filterwarnings("ignore:.* batches were read again")
@pytest.mark.parametrize("make", FAILING.values(), ids=FAILING)
def test_a_batch_that_could_not_be_read_is_read_again(make):
    """A fit after the failure neither misses it nor takes the epoch for complete."""
    feed, seen = feed_of(make()), []
    feed.start_epoch(0)

    for _ in range(7):
        try:
            if feed.has_next():
                seen.append(int(feed.next()))
        except OSError:
            seen.append("failed")

    assert seen == [0, 1, "failed", 2, 3, 4, 5]


def test_a_generator_that_failed_is_used_up():
    """An epoch that ended there would pass for a complete one."""

    def batches():
        yield 0
        raise OSError("network")

    feed = feed_of(batches())
    feed.start_epoch(0)
    feed.next()
    with pytest.raises(OSError, match="network"):
        feed.has_next()

    with pytest.raises(TaskError, match="yielded 0 batches, of which 1 had been taken"):
        feed.has_next()
