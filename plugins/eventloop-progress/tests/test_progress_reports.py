"""Lines of epochs."""

import pytest

from eventloop_progress.reports import Report


def line(loss=0.412, results=None, samples_per_s=1234.4):
    return Report("epoch 1/10", loss, results or {}, samples_per_s, 3.14).line()


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
    assert line(None, samples_per_s=None) == "epoch 1/10  3.1 s"


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_broken_loss_is_shown(loss):
    """A mean that left it out would hide it."""
    assert f"loss {loss}" in line(loss)
