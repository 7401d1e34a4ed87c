"""A run that is killed after its last save and before its end: the end is done when it goes on."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from eventloop import hookimpl
from eventloop.checkpoint.part_differences import differences
from eventloop.run.differences import Allowed
from eventloop_testing import isolated_trainer, last_checkpoint, tiny_batches, tiny_task


class Draws:
    """An algorithm that draws at each end of an epoch and each start of a fit, and may fail there.

    Args:
        fails_at: the batch count of the end of an epoch at which it raises.
    """

    name = "draws"
    free_options = ("fails_at",)

    def __init__(self, fails_at=None):
        self.fails_at = fails_at
        self.ends = []

    @hookimpl
    def fit_start(self, state):
        torch.rand(1)

    @hookimpl
    def epoch_end(self, state):
        if state.clock.batch == self.fails_at:
            raise EOFError
        torch.rand(1, generator=state.generator("draws"))
        self.ends.append(state.clock.batch)


def trainer(folder, draws, until):
    """Builds a trainer of 5 batches an epoch with dropout, which saves every second batch.

    With a test set, the last batch is saved before the end of the fit, too.
    """
    task = tiny_task(
        model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
        train_dataloader=tiny_batches(5),
        test_dataloaders={"last": tiny_batches(1)},
    )
    return isolated_trainer(
        folder,
        task,
        algorithms=[draws],
        allowed=Allowed(config_change=True),
        max_duration=until,
        checkpoint_interval="2ba",
        gc_interval=None,
    )


def fit(folder, until, fails_at=None):
    draws = Draws(fails_at)
    with contextlib.suppress(EOFError), trainer(folder, draws, until) as one:
        one.fit()
    return draws.ends


@pytest.mark.parametrize("end", ["8ba", "10ba"], ids=["in mid-epoch", "at the end of an epoch"])
def test_killed_between_its_last_save_and_its_end_a_run_can_be_extended(tmp_path, end):
    """The end of the epoch and of the fit come with the generators that the last batch left."""
    last = int(end.removesuffix("ba"))
    for folder, fails_at in ((tmp_path / "whole", None), (tmp_path / "killed", last)):
        fit(folder, end, fails_at)
        assert last_checkpoint(folder).batch == last

    assert fit(tmp_path / "killed", end) == [last]

    for until in (end, "13ba"):
        if until != end:
            for name in ("whole", "killed"):
                fit(tmp_path / name, until)
        whole, killed = (last_checkpoint(tmp_path / name).parts for name in ("whole", "killed"))
        assert [str(one) for one in differences(whole, killed)] == []


def test_a_fit_that_ended_before_the_kill_is_not_ended_again(tmp_path):
    """A script of several fits is started again: the first of them was done at its own end."""
    draws = Draws()
    fit(tmp_path, "10ba", fails_at=10)

    with trainer(tmp_path, draws, "10ba") as one:
        with pytest.warns(UserWarning, match="nothing to train: 3ba is done .epoch 2, batch 10"):
            one.fit("3ba")
        one.fit()

    assert draws.ends == [10]


def test_what_is_saved_before_the_run_goes_on_has_its_generators(tmp_path):
    """Events of the entry may draw, and a plugin may capture the run there."""

    class Captures(Draws):
        @hookimpl(trylast=True)
        def fit_start(self, state):
            torch.rand(1)
            self.captured = state.capture().parts

    fit(tmp_path, "8ba")
    expected = last_checkpoint(tmp_path).parts["rank0"]["generators"]
    captures = Captures()

    with trainer(tmp_path, captures, "9ba") as one:
        torch.rand(1)
        one.fit()

    captured = captures.captured["rank0"]["generators"]
    assert [str(one) for one in differences(expected, captured)] == []
