"""Plugins are told of checkpoints that are on the disk."""

from __future__ import annotations

import gc
import signal
import threading

import pytest
import torch
from torch import nn

from eventloop import hookimpl
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.files import disk
from eventloop_testing import last_checkpoint, run_ranks
from eventloop_testing.case import isolated_trainer, tiny_batches, tiny_task


class Watches:
    """A callback that verifies what it is told of at once."""

    name = "watches"

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.events: list[str] = []

    @hookimpl
    def checkpoint_saved(self, state, path):
        read_checkpoint(path)
        self.seen.append((path.name, state.clock.batch))
        self.events.append(path.name)

    @hookimpl
    def fit_end(self, state):
        self.events.append("fit_end")


def fit(folder, *plugins, **given):
    given = {"checkpoint_interval": "2ba", "max_duration": "2ep"} | given
    with isolated_trainer(folder, callbacks=plugins, **given) as trainer:
        trainer.fit()


def test_every_checkpoint_is_told_of_when_it_verifies(tmp_path):
    """Whoever uploads one needs it whole; retention may delete it later."""
    watches = Watches()

    fit(tmp_path, watches, checkpoint_keep=1)

    # The one before the end of the last epoch is written once more, as that of a complete run.
    names = [f"ba{batch:08}" for batch in (0, 2, 4, 6, 6)]
    assert [name for name, _ in watches.seen] == names
    assert all(int(name[2:]) <= batch for name, batch in watches.seen)
    assert watches.events == [*names, "fit_end"]


@pytest.mark.parametrize("given", [{"max_duration": "6ba"}, {"checkpoint_interval": "1ep"}])
def test_the_last_batch_is_saved_once_when_the_fit_is_over(tmp_path, given):
    """To write all weights twice would double the wait at the end of a run."""
    watches = Watches()

    fit(tmp_path, watches, **given)

    assert [name for name, _ in watches.seen].count("ba00000006") == 1
    assert last_checkpoint(tmp_path).parts["training"]["loop"]["is_finished"] is True


@pytest.mark.parametrize(
    ("interval", "order"),
    [("1ba", "as ea esa esa ea as"), ("2ba", "as ea ea esa ea as"), ("3ba", "as ea ea ea ea as")],
)
def test_success_is_told_in_the_event_before_the_question(tmp_path, interval, order):
    """A question only answers: however often `should_checkpoint` is asked, nothing happens."""
    assert order_of(tmp_path, interval, max_duration="3ba") == order.replace(" ", "")


def test_after_an_epoch_it_is_told_in_its_event(tmp_path):
    """The last batch of an epoch may be saved long before the next one ends."""
    order = "as ea ea ea esa ea ea ea ea as"

    assert order_of(tmp_path, "3ba", max_duration="6ba") == order.replace(" ", "")


def order_of(folder, interval, **given):
    """Trains with a plugin that waits for the writer; gives events, saved ones and asked ones."""
    order = []

    class Waits:
        name = "waits"

        @hookimpl
        def batch_checkpoint(self, state):
            for thread in threading.enumerate():
                if thread.name == "eventloop-checkpoint":
                    thread.join()
            order.append("e")

        epoch_checkpoint = batch_checkpoint

        @hookimpl
        def should_checkpoint(self, state):
            order.append("a")

        @hookimpl
        def checkpoint_saved(self, state, path):
            order.append("s")

    fit(folder, Waits(), checkpoint_interval=interval, **given)
    return "".join(order)


@pytest.mark.nightly
@pytest.mark.about_cpu
def test_what_is_written_is_not_kept_in_memory(tmp_path):
    """On the host the copy is as large as the run: parameters and states would be held twice."""
    shape = (1013, 3)  # no other test has tensors of this shape, which may live on in this process

    class Counts:
        name = "counts"

        @hookimpl
        def fit_end(self, state):
            gc.collect()
            tensors = (one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter))
            self.num = sum(one.shape == shape for one in tensors)

    counts = Counts()
    task = tiny_task(
        model=lambda: nn.Sequential(nn.Linear(3, 1013), nn.Linear(1013, 3)),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    )
    with isolated_trainer(tmp_path, task, callbacks=[counts], checkpoint_interval="2ba") as trainer:
        trainer.fit()

    assert counts.num == 3  # a parameter and its two averages


def test_before_the_test_sets_the_last_batch_is_saved_too(tmp_path):
    """They may take hours, or fail: what was trained would be lost with them."""
    watches = Watches()
    task = tiny_task(test_dataloaders={"last": tiny_batches(1)})

    with isolated_trainer(
        tmp_path, task, callbacks=[watches], checkpoint_interval="2ba", max_duration="2ep"
    ) as trainer:
        trainer.fit()

    assert [name for name, _ in watches.seen][-2:] == ["ba00000006"] * 2
    assert list(trainer.state.eval_metrics) == ["test", "last"]


def test_a_run_that_a_signal_stops_is_saved_once(tmp_path):
    """It isn't over: there is nothing else to say of it at its end."""
    watches = Watches()

    class Stops:
        name = "stops"

        @hookimpl
        def batch_start(self, state):
            if state.clock.batch == 1:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(tmp_path, watches, Stops())

    assert [name for name, _ in watches.seen] == ["ba00000000", "ba00000002"]


def test_one_that_could_not_be_written_is_not_told_of(tmp_path, monkeypatch):
    """What isn't there can't be uploaded."""
    watches = Watches()

    class Breaks:
        name = "breaks"

        @hookimpl
        def batch_start(self, state):
            if state.clock.batch == 1:
                monkeypatch.setattr(disk, "write", refuse)

    def refuse(descriptor, data):
        raise OSError("broken")

    with (
        pytest.warns(UserWarning, match="the end of the run isn't recorded"),
        pytest.warns(UserWarning, match="a checkpoint wasn't saved"),
    ):
        fit(tmp_path, watches, Breaks(), on_save_error="continue")

    assert [name for name, _ in watches.seen] == ["ba00000000"]


def test_rank_zero_alone_is_told(tmp_path):
    """The others would have to wait for it; and who uploads does it once."""

    def seen():
        watches = Watches()
        fit(tmp_path, watches)
        return [name for name, _ in watches.seen]

    zero, one = run_ranks(seen)

    assert zero[0] == "ba00000000"
    assert one == []
