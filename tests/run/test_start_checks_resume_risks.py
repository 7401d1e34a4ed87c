"""What a run says at its start of data that may not go on exactly when it is resumed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from eventloop.data import cycled, zipped
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(batch[0], target[0]) for batch, target in tiny_batches(3)])


class Wrapper:
    """A stranger's."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class Living(Wrapper):
    """Holds a generator, which lives across epochs."""

    def __init__(self, batches):
        super().__init__(batches)
        self.parts = {"a": (batch for batch in batches)}


class Stateful(Wrapper):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def said(folder, make, **given):
    """Builds a trainer; returns what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = {"checkpoint_interval": "1ba"} | given
        with isolated_trainer(folder, tiny_task(train_dataloader=make()), **settings):
            pass
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Wrapper(tiny_batches()), "the train data loader is a Wrapper: a resumed run"),
        (lambda: DataLoader(Stream(), 2), "the train data loader is a Stream: a resumed run"),
        (
            lambda: Living(tiny_batches()),
            "is a Living that holds `parts['a']`, whose position isn't saved: a resumed",
        ),
        (lambda: zipped(Wrapper([1]), [1]), "the train data loader is a Wrapper: a resumed run"),
    ],
)
def test_a_run_says_once_that_it_may_not_resume_exactly(tmp_path, make, words):
    """With the two methods that make it exact, before hours are trained."""
    (message,) = said(tmp_path, make)

    assert words in message
    assert message.endswith(
        "other batches than before (then it loses and repeats up to as many as its epoch has had); "
        "for an exact resume, the loader needs state_dict and load_state_dict, or must be made by `zipped` and `cycled`"
    )


@pytest.mark.parametrize(
    "make",
    [
        tiny_batches,
        lambda: DataLoader(torch.utils.data.TensorDataset(*tiny_batches(1)[0]), 2, shuffle=True),
        lambda: zipped(tiny_batches(), cycled(tiny_batches(2))),
        lambda: Stateful(tiny_batches()),
    ],
)
def test_what_resumes_exactly_is_not_worth_a_word(tmp_path, make):
    """A warning at each start would soon not be read."""
    assert said(tmp_path, make) == []


def test_a_run_that_keeps_nothing_has_nothing_to_resume(tmp_path):
    """It says nothing of it."""
    assert said(tmp_path, lambda: Wrapper(tiny_batches()), checkpoint_interval=None) == []


def test_one_rank_speaks_for_all(tmp_path):
    """Two ranks would say it twice."""
    found = run_ranks(said, tmp_path, lambda: Wrapper(tiny_batches()))

    assert [sum("loses and repeats" in message for message in messages) for messages in found] == [
        1,
        0,
    ]
