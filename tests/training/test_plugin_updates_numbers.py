"""Numbers that are logged in several updates of a batch: the mean of theirs, not the last one."""

from __future__ import annotations

import pytest
import torch

from eventloop import hookimpl
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task

# Of each batch: the samples of each of its updates, by number.
UPDATES = ((0.0, 1.0, 2.0, 3.0), (10.0, 11.0), (20.0,))


class Updates:
    """Makes an update of each of several minibatches, and logs their mean number.

    Args:
        reduce: see `State.log`.
        first_rank: what is added to the numbers of rank 0.
    """

    name = "updates"
    free_options = ("shift",)

    def __init__(self, reduce=None, *, shift=0.0):
        self.reduce = reduce
        self.shift = shift

    @hookimpl
    def train_batch(self, state):
        for numbers in UPDATES:
            state.batch = {"numbers": torch.tensor(numbers).unsqueeze(1) + self.shift}
            stepped = state.update(self.loss_of)
        return stepped

    def loss_of(self, state):
        numbers = state.microbatch["numbers"]
        state.log("number", numbers.mean(), self.reduce)
        state.log("seen", len(numbers), "sum")
        return sum(one.square().sum() for one in state.model.parameters()) * 0 + numbers.mean()


class Log:
    """Keeps what is logged."""

    name = "z"

    def __init__(self):
        self.rows = []

    @hookimpl
    def log(self, state, numbers):
        self.rows.append(dict(numbers))


def logged(folder, *plugins, **given):
    """Trains for two batches; returns the rows that were logged."""
    log = Log()
    task = tiny_task(train_dataloader=tiny_batches(4), eval_dataloaders=None, metrics=None)
    settings = {"max_duration": "2ba", "microbatch_size": None} | given
    with isolated_trainer(folder, task, algorithms=plugins, callbacks=[log], **settings) as trainer:
        trainer.fit()
    return log.rows


@pytest.mark.parametrize("size", [None, 1, 3])
def test_a_number_is_the_mean_of_all_updates(tmp_path, size):
    """However they are sliced: 1.5, 10.5 and 20; the last one stood there. A sum adds up all of them."""
    for row in logged(tmp_path, Updates(), microbatch_size=size):
        assert row["number"] == pytest.approx((1.5 + 10.5 + 20) / 3, rel=1e-12)
        assert row["seen"] == 7


@pytest.mark.parametrize("size", [None, 3])
def test_so_is_the_loss_of_updates_with_one_name(tmp_path, size):
    """train/loss stays that of the last one, as it always was."""
    for row in logged(tmp_path, Updates(), microbatch_size=size):
        assert row["train/loss.sgd"] == pytest.approx((1.5 + 10.5 + 20) / 3, rel=1e-6)
        assert row["train/loss"] == 20.0


class Beside:
    """Makes an update beside the default's, before it or after it."""

    name = "beside"

    def __init__(self, *, is_first):
        self.is_first = is_first

    @hookimpl(wrapper=True)
    def train_batch(self, state):
        if self.is_first:
            state.update(self.loss_of)
        stepped = yield
        if not self.is_first:
            state.update(self.loss_of)
        return stepped

    def loss_of(self, state):
        state.log("number", 5.0)
        return state.model(state.inputs).square().mean()

    @hookimpl
    def after_forward(self, state):
        if state.outputs is not None:  # not of an update
            state.log("number", 1.0)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("size", [None, 1])
def test_an_update_beside_the_default_is_one_of_two(tmp_path, is_first, size):
    """Whichever comes first, in one piece or in several."""
    rows = logged(tmp_path, Beside(is_first=is_first), microbatch_size=size)

    assert [row["number"] for row in rows] == [3.0, 3.0]


def test_a_batch_after_one_with_updates_counts_for_itself(tmp_path):
    """What was logged once in it isn't averaged with the batch before."""

    class Once:
        name = "once"

        @hookimpl(wrapper=True)
        def train_batch(self, state):
            state.log("batch", float(state.clock.batch))
            if not state.clock.batch:
                state.update(lambda state: state.model(state.inputs).square().mean())
            return (yield)

        @hookimpl
        def after_forward(self, state):
            state.log("number", float(state.clock.batch))

    rows = logged(tmp_path, Once(), max_duration="3ba")

    assert [row["number"] for row in rows] == [0.0, 1.0, 2.0]
    assert [row["batch"] for row in rows] == [0.0, 1.0, 2.0]


@pytest.mark.filterwarnings("ignore:out of memory")
def test_an_attempt_that_ran_out_of_memory_counts_for_nothing(tmp_path):
    """Of each update the one that was made is left."""

    class Large(Updates):
        name = "large"

        def loss_of(self, state):
            loss = super().loss_of(state)
            if len(state.microbatch["numbers"]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return loss

    for row in logged(tmp_path, Large(), microbatch_size="auto"):
        assert row["number"] == pytest.approx((1.5 + 10.5 + 20) / 3, rel=1e-12)
        assert row["seen"] == 7


@pytest.mark.nightly
@pytest.mark.parametrize("size", [None, 3])
def test_ranks_log_the_mean_of_their_updates(tmp_path, size):
    """Each update over all ranks first; rank 1 has numbers that are 100 higher."""

    def train(reduce):
        import os

        shift = 100.0 * int(os.environ["RANK"])
        return logged(tmp_path / str(reduce), Updates(reduce, shift=shift), microbatch_size=size)

    (rows, _), (own, _) = (run_ranks(train, reduce) for reduce in ("mean", None))

    for row in rows:
        assert row["number"] == pytest.approx((1.5 + 10.5 + 20) / 3 + 50, rel=1e-12)
        assert row["seen"] == 14
    assert [row["number"] for row in own] == pytest.approx([(1.5 + 10.5 + 20) / 3] * 2, rel=1e-12)
