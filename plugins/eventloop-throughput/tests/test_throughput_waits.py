"""Which data a run waited for, in its numbers and in a line at its end; the watch is moved by hand."""

import pytest
from torch.utils.data import DataLoader

from eventloop import hookimpl
from eventloop_testing import isolated_trainer, tiny_batches, tiny_task
from eventloop_throughput import Throughput
from eventloop_throughput.waits import TRAIN_DATA, Waits


class Watch:
    """Stands in for `time`."""

    now = 100.0

    def perf_counter(self):
        return self.now


class Slow(list):
    """Batches that take a time each."""

    def __init__(self, watch, seconds):
        super().__init__(tiny_batches(3))
        self.watch, self.seconds = watch, seconds

    def __iter__(self):
        for batch in list.__iter__(self):
            self.watch.now += self.seconds
            yield batch


class Steps:
    """An algorithm: a step of training takes a second, one of an evaluation half a second."""

    name = "steps"

    def __init__(self, watch):
        self.watch, self.rows = watch, {}

    @hookimpl
    def before_train_batch(self):
        self.watch.now += 1.0

    @hookimpl
    def eval_before_forward(self):
        self.watch.now += 0.5


class Logged:
    """A callback that keeps the shares."""

    name = "logged"

    def __init__(self):
        self.rows = {}

    @hookimpl
    def log(self, numbers, at):
        for name, value in numbers.items():
            if name.startswith("throughput/data_wait_frac"):
                self.rows.setdefault(name, []).append((at.batch, value))


def fit(folder, monkeypatch, train_s, slow_s):
    watch = Watch()
    monkeypatch.setattr("eventloop_throughput.plugin.time", watch)
    task = tiny_task(
        train_dataloader=Slow(watch, train_s),
        eval_dataloaders={"quick": tiny_batches(2), "slow": Slow(watch, slow_s)},
    )
    plugins = {"callbacks": [Throughput(), logged := Logged()], "algorithms": [Steps(watch)]}
    given = {"max_duration": "2ep", "log_interval": "1ba", "eval_interval": "1ep"}
    with isolated_trainer(folder, task, **plugins, **given) as trainer:
        trainer.fit()
    return logged.rows


def test_each_set_has_its_share(tmp_path, monkeypatch):
    """One that is read from a slow disk hides behind the others in their sum."""
    rows = fit(tmp_path, monkeypatch, 3.0, 1.5)

    assert rows["throughput/data_wait_frac/slow"] == [(3, 0.75), (6, 0.75)]
    assert rows["throughput/data_wait_frac/quick"] == [(3, 0.0), (6, 0.0)]
    assert {value for _, value in rows["throughput/data_wait_frac"]} == {0.75}


@pytest.mark.parametrize(
    ("train_s", "slow_s", "expected"),
    [
        (3.0, 1.5, "waited 15.0 s (75%) for train data and 9.0 s (75%) for slow; try to prepare"),
        (0.0, 1.5, "waited 9.0 s (75%) for slow; try to prepare"),
        (0.1, 0.0, ""),
    ],
)
def test_a_line_at_the_end_says_so(tmp_path, monkeypatch, capsys, train_s, slow_s, expected):
    """With the longest wait first; less than a tenth isn't worth a line."""
    fit(tmp_path, monkeypatch, train_s, slow_s)

    shown = capsys.readouterr().err.replace(", in which the device may have been busy", "")
    lines = [line for line in shown.splitlines() if "waited" in line]
    assert len(lines) == bool(expected)
    assert all(line.startswith(f"eventloop: {expected}") for line in lines)


@pytest.mark.parametrize(
    ("dataloader", "expected"),
    [
        (tiny_batches(3), "a DataLoader with num_workers"),
        (DataLoader([0]), "num_workers=2 or more"),
        (DataLoader([0], num_workers=2), "more workers than num_workers=2, prefetch_factor=4"),
    ],
)
def test_what_to_try_depends_on_the_data_loader(dataloader, expected):
    """Workers can't be added to a list."""
    waits = Waits()
    waits.add(TRAIN_DATA, 30.0, 100.0)

    line = waits.advice({TRAIN_DATA: dataloader}, is_host=True)

    assert "waited 30.0 s (30%) for train data; try " in line
    assert expected in line


def test_a_device_may_have_been_busy():
    """The host waits early while a GPU still has work: then nothing is lost."""
    waits = Waits()
    waits.add(TRAIN_DATA, 30.0, 100.0)

    assert "the device may have been busy" in waits.advice({}, is_host=False)
    assert "busy" not in waits.advice({}, is_host=True)


def test_a_short_run_gets_no_line():
    """Half of a tenth of a second is no loss."""
    waits = Waits()
    waits.add(TRAIN_DATA, 0.05, 0.1)

    assert waits.advice({}, is_host=True) == ""
