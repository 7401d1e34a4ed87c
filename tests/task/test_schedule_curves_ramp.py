"""A ramp is a function of the clock, in whatever unit."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from eventloop.errors import SettingError
from eventloop.toolbox import Ramp

NUM_STEPS = 20  # in 4 epochs


class Unmeasured(IterableDataset):
    def __iter__(self):
        yield from [(torch.zeros(3), 0)] * 8


@pytest.fixture
def fracs_of(make_trainer, make_task, make_batches, make_plugin):
    """Trains; gives the share at each step."""

    def fracs_of(start, end, max_duration="4ep", loader=None, until=None):
        seen = []
        ramps = []
        plugin = make_plugin(
            after_load=lambda state: ramps.append(Ramp.between(start, end, state)),
            after_dataloader=lambda state: seen.append(ramps[0].frac(state)),
        )
        task = make_task(
            train_dataloader=make_batches(5) if loader is None else loader,
            num_tokens=lambda inputs: inputs.numel(),
        )
        make_trainer(task, max_duration=max_duration, algorithms=[plugin]).fit(until)
        return seen

    return fracs_of


def line(start, end, num=NUM_STEPS):
    return [min(1.0, max(0.0, (step - start) / (end - start))) for step in range(num)]


@pytest.mark.parametrize(
    ("start", "end", "first", "last"),
    [
        (None, "1dur", 0, 20), ("0.5dur", "0.75dur", 10, 15), ("1ep", "3ep", 5, 15),
        ("5ba", "2ep", 5, 10), ("1ep", "10ba", 5, 10), (None, "1ba", 0, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("max_duration", ["4ep", "20ba"])
def test_a_ramp_rises_in_a_straight_line(start, end, first, last, max_duration, fracs_of):
    """From 0 at the start to 1 at the end, whatever the two are counted in."""
    fracs = fracs_of(start, end, max_duration)

    assert fracs == pytest.approx(line(first, last))


@pytest.mark.parametrize(("max_duration", "end"), [("80sp", "40sp"), ("240tok", "0.5dur")])
def test_a_ramp_may_be_counted_in_samples_and_tokens(max_duration, end, fracs_of):
    """4 samples and 12 tokens a step."""
    assert fracs_of(None, end, max_duration) == pytest.approx(line(0, 10))


def test_beyond_its_end_a_ramp_stays_at_one(fracs_of):
    """Also where the run is longer than it was to be."""
    assert fracs_of(None, "1dur", "2ep", until="4ep") == pytest.approx(line(0, 10))


def test_without_a_length_whole_epochs_count(fracs_of):
    """An iterable data set of 2 batches, which doesn't say so."""
    fracs = fracs_of(None, "4ep", loader=DataLoader(Unmeasured(), batch_size=4))

    assert fracs == [0.0, 0.0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75]


@pytest.mark.parametrize(
    ("start", "end", "max_duration", "shown"),
    [
        ("2ep", "1ep", "4ep", "start=2ep isn't before end=1ep"),
        ("0.5dur", "10ba", "20ba", "start=0.5dur isn't before end=10ba"),
        (None, "0.5dur", None, "0.5dur is a fraction of the run, whose max_duration isn't set"),
        ("100tok", "1ep", "4ep", "start=100tok can't be compared"),
    ],
)
def test_times_without_a_ramp_are_refused(start, end, max_duration, shown, fracs_of):
    """When the trainer is built."""
    with pytest.raises(SettingError, match=shown):
        fracs_of(start, end, max_duration)


def test_without_a_length_epochs_and_batches_cannot_be_compared(fracs_of):
    """The message is about the plugin's own option, and not a scheduler that there isn't."""
    shown = r"start=4ba can't be compared with the end, .* in epochs, and .* has no length"

    with pytest.raises(SettingError, match=shown) as raised:
        fracs_of("4ba", "0.9dur", loader=DataLoader(Unmeasured(), batch_size=4))

    assert "scheduler" not in str(raised.value)
