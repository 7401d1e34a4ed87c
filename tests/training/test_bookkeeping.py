"""What every run logs by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR


@pytest.fixture
def heard(make_trainer, make_task, make_plugin):
    """Trains; gives what loggers were told: (batch, numbers), in order."""

    def heard(task=None, **given):
        rows = []
        watch = make_plugin("z", log=lambda numbers, at: rows.append((at.batch, numbers)))
        make_trainer(task, **{"callbacks": [watch]} | given).fit()
        return rows

    return heard


def test_every_batch_has_its_loss_and_learning_rate(heard):
    """Without any plugin that logs, and with a log interval that is longer than the run."""
    rows = heard(log_interval="1000ba")

    assert [batch for batch, _ in rows] == [1, 2, 3]
    assert [list(numbers) for _, numbers in rows] == [["train/loss", "lr/sgd"]] * 3


@pytest.mark.parametrize("make_rate", [float, lambda lr: torch.tensor(lr, dtype=torch.float64)])
def test_a_logged_learning_rate_is_that_of_its_step(make_rate, heard, make_task):
    """Schedulers write into a learning rate that is a tensor, after the batch that used it."""
    task = make_task(
        optimizer=lambda model: SGD(model.parameters(), lr=make_rate(0.1)),
        scheduler=lambda one: StepLR(one, step_size=1, gamma=0.5),
    )

    rates = [numbers["lr/sgd"] for _, numbers in heard(task)]

    assert rates == [0.1, 0.05, 0.025]


def test_the_learning_rate_of_a_skipped_step_is_logged_and_its_loss_too(heard, make_plugin):
    """The batch happened; whoever looks for the cause wants both."""
    skipper = make_plugin(should_skip_step=lambda state: True)

    rows = heard(algorithms=[skipper])

    assert all({"train/loss", "lr/sgd"} <= numbers.keys() for _, numbers in rows)


def test_a_skipped_batch_has_no_loss(heard, make_plugin):
    """It had no forward pass; the loss of the batch before would be a lie."""
    skipper = make_plugin(should_skip_batch=lambda state: state.clock.batch == 1)

    rows = heard(algorithms=[skipper])

    assert ["train/loss" in numbers for _, numbers in rows] == [True, False, True]


def test_every_parameter_group_has_a_rate(heard, make_task):
    """By its name, or its number: of two groups the first alone says little."""
    task = make_task(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)),
        optimizer=lambda model: SGD([{"params": model[0].parameters(), "name": "body"},
                                     {"params": model[1].parameters(), "lr": torch.tensor(1e-3)}],
                                    lr=1e-1),
    )  # fmt: skip

    _, numbers = heard(task)[0]

    assert {name: round(one, 6) for name, one in numbers.items() if name.startswith("lr/")} == {
        "lr/sgd/body": 0.1,
        "lr/sgd/1": 0.001,
    }


def test_every_optimizer_has_a_rate(heard, make_task):
    """By its name; one group needs no name of its own."""
    task = make_task(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)),
        optimizer=lambda model: {"a": SGD(model[0].parameters(), lr=1e-3),
                                 "b": SGD(model[1].parameters(), lr=1e-2)},
    )  # fmt: skip

    _, numbers = heard(task)[0]

    assert (numbers["lr/a"], numbers["lr/b"]) == (1e-3, 1e-2)


def test_numbers_are_told_before_the_fit_ends(make_trainer, make_recorder):
    """A logger that closes its file at `fit_end` has everything by then."""
    recorder = make_recorder(["log", "batch_end", "fit_end"])

    trainer = make_trainer(callbacks=[recorder], log_interval="2ba")
    trainer.fit()

    on_host = ["batch_end", "batch_end", "log", "log", "batch_end", "log", "fit_end"]
    later = ["batch_end", "batch_end", "batch_end", "log", "log", "log", "fit_end"]
    assert recorder.seen == (on_host if trainer.state.device.type == "cpu" else later)


def logger_into(rows):
    """Makes a `log` that adds to a list."""

    def log(numbers, at):
        rows.append((at, numbers))

    return log


def test_all_loggers_hear_the_same(make_trainer, make_plugin):
    """In the same order."""
    rows = {"a": [], "b": []}
    loggers = [make_plugin(name, log=logger_into(rows[name]))
               for name in rows]  # fmt: skip

    make_trainer(callbacks=loggers).fit()

    assert rows["a"] == rows["b"]
    assert len(rows["a"]) == 3


def test_a_fit_ends_with_an_evaluation(make_trainer, make_task, make_batches, make_plugin):
    """Wherever it ends: the numbers of a result are those of its weights."""
    seen = []
    watch = make_plugin(eval_after_all=lambda state: seen.append(state.clock.batch))
    trainer = make_trainer(
        make_task(eval_dataloaders=make_batches(1)), callbacks=[watch], eval_interval="2ba"
    )

    trainer.fit()

    assert seen == [2, 3]
