"""A resumed run is shown from where it goes on."""

import io
import re

import pytest
from rich.console import Console

from eventloop import hookimpl
from eventloop_progress import Progress
from eventloop_testing import isolated_trainer, tiny_batches, tiny_task


class Ends:
    """An algorithm that ends a run before a batch."""

    name = "ends"
    free_options = ("batch",)

    def __init__(self, batch=-1):
        self.batch = batch

    @hookimpl
    def batch_start(self, state):
        if state.clock.batch == self.batch:
            raise EOFError


def fit(folder, *, ends=-1, terminal=True, **given):
    """Trains 2 epochs of 12 batches, with a checkpoint every 5; gives what is shown."""
    progress = Progress(refresh_per_s=1e9)
    progress.console = Console(
        file=io.StringIO(), force_terminal=terminal, width=100, color_system=None
    )
    given = {"max_duration": "2ep", "checkpoint_interval": "5ba", "log_interval": "1ba"} | given
    task = tiny_task(train_dataloader=tiny_batches(12), eval_dataloaders=None)
    plugins = {"algorithms": [Ends(ends)], "callbacks": [progress]}
    with isolated_trainer(folder, task, **plugins, **given) as trainer:
        trainer.fit()
    return progress.console.file.getvalue()


def frames(text):
    """Returns every line as it was drawn, one after the other."""
    shown = [re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", part) for part in re.split("[\r\n]+", text)]
    return [line.rstrip() for line in shown if line.strip()]


@pytest.fixture
def killed(tmp_path):
    """A run of which 17 batches were done, 15 of them saved."""
    with pytest.raises(EOFError):
        fit(tmp_path, ends=17)
    return tmp_path


def test_the_bar_starts_where_the_run_goes_on(killed):
    """At batch 3 of the second epoch: 15 of 24, not at 0 of what is left."""
    shown = frames(fit(killed))

    bars = [line for line in shown if line.startswith("epoch 2/2  batch")]
    assert shown[0] == "resumed at epoch 2/2, batch 3/12"
    assert bars[0].startswith("epoch 2/2  batch 3/12  \u2501")
    assert "left" not in bars[0]
    assert not any(line.startswith(("epoch 1/2", "epoch 2/2  batch 2/")) for line in shown)
    assert bars[-1].startswith("epoch 2/2  batch 12/12")


@pytest.mark.parametrize(
    ("duration", "first"),
    [
        ("20ba", "epoch 2  batch 15/20  \u2501"),
        ("80sp", "epoch 2  batch 3/12  sample 60/80  \u2501"),
    ],
)
def test_a_bar_of_any_unit_counts_on(tmp_path, duration, first):
    """A run of 20 batches that goes on at 15 has three quarters of its bar at once."""
    with pytest.raises(EOFError):
        fit(tmp_path, ends=17, max_duration=duration)

    shown = frames(fit(tmp_path, max_duration=duration))

    assert next(line for line in shown if "\u2501" in line).startswith(first)


def test_a_file_is_told_once_where_it_goes_on_and_where_it_is_saved(killed):
    """Whoever reads the log of a job that was started ten times wonders at the first line."""
    first, *lines = frames(fit(killed, terminal=False))

    # The second is told of when one is on the disk, before the fit ends.
    saved, epoch = sorted(lines)
    assert first == "resumed at epoch 2/2, batch 3/12"
    assert saved == f"checkpoints are saved in {killed}/run/checkpoints"
    assert epoch.startswith("epoch 2/2  loss")


def test_a_terminal_shows_it_above_the_bar(tmp_path):
    """Where it stays when the bar moves on."""
    shown = frames(fit(tmp_path))

    assert shown.count(f"checkpoints are saved in {tmp_path}/run/checkpoints") == 1
    assert not any("resumed" in line for line in shown)


def test_nothing_is_said_where_nothing_is_saved(tmp_path):
    """Control."""
    text = fit(tmp_path, checkpoint_interval=None)

    assert "checkpoints" not in text
