"""When the waiting ends, without a run."""

import math

import pytest
import torch

from eventloop import Moment, Time
from eventloop_early_stopping import Waiting


def epochs(waiting, values):
    """Returns after how many epochs the waiting is over; None if it isn't."""
    waiting.begin(Moment(0, 0, 0, 0, 0.0))
    for epoch, value in enumerate(values, start=1):
        waiting.take(value, Moment(epoch, 10 * epoch, 80 * epoch, 0, 2.0 * epoch))
        if waiting.reason is not None:
            return epoch
    return None


def epochs_by_torch(values, *, is_higher, patience, min_delta):
    """Returns in which epoch torch's plateau scheduler, which counts bad epochs, would act."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer,
        "max" if is_higher else "min",
        patience=patience - 1,
        threshold=min_delta,
        threshold_mode="abs",
    )
    for epoch, value in enumerate(values, start=1):
        plateau.step(value)
        if optimizer.param_groups[0]["lr"] < 1.0:
            return epoch
    return None


def random_walk(seed):
    steps = torch.randn(60, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return steps.cumsum(0).tolist()


@pytest.mark.parametrize("is_higher", [False, True])
@pytest.mark.parametrize(("patience", "min_delta"), [(1, 0.0), (3, 0.0), (3, 0.5), (8, 0.1)])
def test_it_ends_where_torchs_plateau_scheduler_would_act(is_higher, patience, min_delta):
    """An independent count of epochs without improvement must come to the same end."""
    given = {"is_higher": is_higher, "min_delta": min_delta}
    ends = []
    for seed in range(30):
        waiting = Waiting("x", patience=Time(patience, "ep"), **given)
        ends.append(epochs(waiting, random_walk(seed)))

    by_torch = [epochs_by_torch(random_walk(s), patience=patience, **given) for s in range(30)]
    longer = [epochs_by_torch(random_walk(s), patience=patience + 1, **given) for s in range(30)]

    assert ends == by_torch
    assert ends != longer


@pytest.mark.parametrize(
    ("patience", "end"),
    [("2ep", 4), ("20ba", 4), ("21ba", 5), ("160sp", 4), ("4sec", 4), ("4.5sec", 5), ("1ep", 3)],
)
def test_patience_is_counted_in_its_own_unit(patience, end):
    """An epoch here has 10 batches of 8 samples and takes 2 seconds; the best is the second."""
    waiting = Waiting("x", is_higher=False, patience=Time(patience))

    assert epochs(waiting, [2.0, 1.0, 1.5, 1.5, 1.5, 1.5]) == end


@pytest.mark.parametrize(("stops_at_nan", "end"), [(False, 4), (True, 3)])
def test_a_nan_is_no_better_value_or_the_end(stops_at_nan, end):
    """A comparison with NaN is neither true nor false; the policy has to be said."""
    waiting = Waiting("x", is_higher=False, patience=Time("2ep"), stops_at_nan=stops_at_nan)

    assert epochs(waiting, [2.0, 1.0, math.nan, math.nan, 0.5]) is not None
    assert epochs(Waiting("x", is_higher=True, patience=Time("9ep")), [math.nan] * 8) is None
    waiting = Waiting("x", is_higher=False, patience=Time("2ep"), stops_at_nan=stops_at_nan)
    assert epochs(waiting, [2.0, 1.0, math.nan, math.nan, 0.5]) == end


def test_nothing_but_nan_ends_it_when_the_patience_does():
    """There is no best value to be compared with, but waiting for ever helps nobody."""
    waiting = Waiting("eval/x/y", is_higher=False, patience=Time("3ep"))

    assert epochs(waiting, [math.nan] * 9) == 3
    assert waiting.reason == "eval/x/y gave no number in 3ep"


def test_the_reason_says_what_was_waited_for():
    """It is all that whoever finds the run stopped gets to read."""
    waiting = Waiting("eval/test/loss", is_higher=False, patience=Time("20ba"), min_delta=0.25)

    epochs(waiting, [2.0, 1.5, 1.4, 1.3])

    assert waiting.reason == (
        "eval/test/loss hasn't improved by 0.25 on 1.5 (epoch 2, batch 20) in 20ba"
    )


def test_a_wait_that_is_begun_again_keeps_the_best():
    """Whoever prolongs a run wants to know whether it gets better than it was."""
    waiting = Waiting("x", is_higher=True, patience=Time("1ep"))
    epochs(waiting, [0.5, 0.4])

    waiting.begin(Moment(2, 20, 0, 0, 0.0))

    assert (waiting.best, waiting.reason, waiting.since.epoch) == (0.5, None, 2)


def test_its_state_is_all_of_it():
    """What is waited for in one process is waited for in the next."""
    whole = Waiting("x", is_higher=False, patience=Time("3ep"))
    whole.begin(Moment(0, 0, 0, 0, 0.0))
    whole.take(1.0, Moment(1, 10, 80, 0, 2.0))
    other = Waiting("x", is_higher=False, patience=Time("3ep"))

    other.load_state_dict(whole.state_dict())
    other.take(2.0, Moment(4, 40, 320, 0, 8.0))

    assert other.reason == "x hasn't improved on 1 (epoch 1, batch 10) in 3ep"
