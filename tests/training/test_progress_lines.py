"""Lines of progress."""

import pytest

from eventloop import Time, Trainer
from eventloop.clock import Clock
from eventloop.toolbox import EpochLine, ProgressLines


def line(loss=0.412, results=None, samples=3875):
    clock = Clock()
    epoch = EpochLine(clock, Time("10ep"), 0.0, 1)
    clock.end_batch(samples, 0, 3.0)
    clock.end_epoch()
    epoch.results = results or {}
    return epoch.text(3.14, loss, with_results=True)


def test_a_line_says_all_in_one():
    """The format of the README, which people grep for."""
    assert line(results={"test": {"accuracy": 0.951, "loss": 0.2}}) == (
        "epoch 1/10  loss 0.4120  test/accuracy 0.9510  test/loss 0.2000  1,234 samples/s  3.1 s"
    )


def test_an_eval_set_that_is_called_train_is_not_mixed_up():
    """Its numbers have the name that history and log have for them."""
    assert "  eval/train/loss 0.2000  " in line(results={"train": {"loss": 0.2}})


def test_a_run_without_losses_is_reported_too():
    """A task with its own loop may log other numbers, or none."""
    assert line(None) == "epoch 1/10  1,234 samples/s  3.1 s"
    assert line(None, samples=0) == "epoch 1/10  3.1 s"


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_broken_loss_is_shown(loss):
    """A mean that left it out would hide it."""
    assert f"loss {loss}" in line(loss)


@pytest.fixture
def written(make_task):
    """Trains with lines, and returns them."""

    def written(duration="2ep", interval_s=60.0, **given):
        lines = []
        callbacks = [ProgressLines(interval_s=interval_s, write=lines.append)]
        with Trainer(
            make_task(**given), callbacks=callbacks, autoload=False, max_duration=duration
        ) as trainer:
            trainer.fit()
        return lines

    return written


def test_each_epoch_is_a_line_with_the_results_of_its_evaluation(written, make_batches):
    """Without eval data the loss alone shows whether a run learns."""
    bare = written()
    evaluated = written(eval_dataloaders={"test": make_batches()})

    assert [one.split("  ")[0] for one in bare] == ["epoch 1/2", "epoch 2/2"]
    assert all("  loss " in one and " samples/s  " in one for one in bare)
    assert ["  test/loss " in one for one in evaluated] == [True, True]


def test_a_run_in_batches_says_how_many_are_done(written):
    """An epoch may be longer than the run: a line comes with its time."""
    lines = written("2ba", interval_s=1e-9)

    assert lines[0].startswith("epoch 1  batch 1/2")
