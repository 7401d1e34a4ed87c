"""Lines of epochs and the losses that come after them."""

import pytest

from eventloop_progress.reports import Report, Reports


def report(epoch_idx, results=None, samples_per_s=1234.4):
    return Report(epoch_idx, f"epoch {epoch_idx + 1}/10", results or {}, samples_per_s, 3.14)


def test_a_line_says_all_in_one():
    """The format of the README, which people grep for."""
    reports = Reports()
    for loss in (0.5, 0.324):
        reports.arrived(0, loss)

    lines = reports.epoch_end(report(0, {"test": {"accuracy": 0.951, "loss": 0.2}}))

    assert lines == [
        "epoch 1/10  loss 0.4120  test/accuracy 0.9510  test/loss 0.2000  1,234 samples/s  3.1 s"
    ]


def test_a_short_epoch_waits_for_its_losses():
    """With fewer batches than the log interval, a line without a loss would be all there is."""
    reports = Reports()
    at_the_end = reports.epoch_end(report(0))
    too_early = reports.arrived(0, 1.0) + reports.arrived(0, 3.0)

    lines = reports.arrived(1, 9.0)

    assert at_the_end == too_early == []
    assert lines == ["epoch 1/10  loss 2.000  1,234 samples/s  3.1 s"]


def test_several_short_epochs_come_in_order():
    """One delivery can bring the losses of many epochs."""
    reports = Reports()
    for idx in range(3):
        reports.epoch_end(report(idx))

    lines = [line for idx in range(3) for line in reports.arrived(idx, idx + 0.5)]

    assert [line.split("  ")[:2] for line in lines + reports.rest()] == [
        ["epoch 1/10", "loss 0.5000"],
        ["epoch 2/10", "loss 1.500"],
        ["epoch 3/10", "loss 2.500"],
    ]


def test_a_run_without_losses_is_reported_too():
    """A task with its own loop may log other numbers, or none."""
    reports = Reports()
    waiting = reports.epoch_end(report(0)) + reports.epoch_end(report(1, samples_per_s=None))

    lines = reports.arrived(1, None) + reports.rest()

    assert waiting == []
    assert lines == ["epoch 1/10  1,234 samples/s  3.1 s", "epoch 2/10  3.1 s"]


def test_late_losses_stay_in_their_epoch():
    """The last batches of a long epoch are delivered when it has been reported."""
    reports = Reports()
    reports.arrived(0, 1.0)
    reports.epoch_end(report(0))
    for _ in range(5):
        reports.arrived(0, 100.0)
    reports.arrived(1, 3.0)

    (line,) = reports.epoch_end(report(1))

    assert "loss 3.000" in line


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_broken_loss_is_shown(loss):
    """A mean that left it out would hide it."""
    reports = Reports()
    for value in (1.0, loss, 2.0):
        reports.arrived(0, value)

    assert f"loss {loss}" in reports.epoch_end(report(0))[0]
