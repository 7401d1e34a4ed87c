"""The plugin in a training."""

import io
import itertools
import re
import sys
import threading
from collections.abc import Iterable

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric

from eventloop import Task, Trainer, hookimpl
from eventloop_progress import Progress

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Mean(MeanMetric):
    def update(self, outputs, targets):
        super().update(outputs)


BATCH = torch.ones(4, 2), torch.zeros(4, 1)


def tiny_task(*, loader=(BATCH,) * 12, model=None, metrics=None, **values):
    return Task(
        model=model or torch.nn.Linear(2, 1),
        loss=torch.nn.functional.mse_loss,
        train_dataloader=loader,
        eval_dataloaders={"test": [BATCH] * 2},
        metrics=metrics or {"mean": Mean()},
        num_tokens=lambda inputs: inputs.numel(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        **values,
    )


def progress_on(*, terminal, width=100):
    """Returns a Progress that prints into memory, and draws at every chance."""
    progress = Progress(refresh_per_s=1e9)
    progress.console = Console(
        file=io.StringIO(), force_terminal=terminal, width=width, color_system=None
    )
    return progress


def trainer_with(progress, *algorithms, task=None, **settings):
    settings = {"max_duration": "2ep", "autoload": False, "device": "cpu"} | settings
    return Trainer(task or tiny_task(), algorithms=algorithms, callbacks=[progress], **settings)


def fit(progress, *algorithms, **settings):
    with trainer_with(progress, *algorithms, **settings) as trainer:
        trainer.fit()
    return progress.console.file.getvalue()


def frames(text):
    """Returns every line as it was drawn, one after the other."""
    return [re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", part) for part in re.split("[\r\n]+", text)]


def test_a_file_gets_a_line_an_epoch():
    """Logs are read later, line by line, so nothing else may be in them."""
    lines = fit(progress_on(terminal=False), log_interval="5ba").splitlines()

    pattern = r"epoch {}/2  loss \S+  test/mean \S+  test/loss \S+  \S+ samples/s  \d+\.\d s"
    assert len(lines) == 2
    assert all(re.fullmatch(pattern.format(idx), line) for idx, line in enumerate(lines, 1))


def test_a_table_has_the_loss_in_training_too():
    """Above that of the eval sets, in the same column."""
    trainer = trainer_with(progress := progress_on(terminal=True))
    with trainer:
        history = trainer.fit().history

    shown = [frame.split() for frame in frames(progress.console.file.getvalue())]
    losses = [float(words[3]) for words in shown if words[2:3] == ["train"]]
    tests = [float(words[1]) for words in shown if words[:1] == ["test"] and len(words) == 3]
    assert losses == pytest.approx([row["train/loss"] for row in history], rel=1e-3)
    assert tests == pytest.approx([row["test/loss"] for row in history], rel=1e-3)


def test_each_evaluation_within_an_epoch_is_a_line():
    """An epoch may take days; at its end, its own line has the numbers."""
    lines = fit(progress_on(terminal=False), eval_interval="5ba", max_duration="1ep").splitlines()

    assert [line.split("  ")[:2] for line in lines[:2]] == [
        ["epoch 1/1", "batch 5/12"], ["epoch 1/1", "batch 10/12"]
    ]  # fmt: skip
    assert all("loss " in line and "test/loss " in line for line in lines)
    assert len(lines) == 3


def endless():
    """An epoch without an end."""
    while True:
        yield BATCH


@pytest.mark.parametrize(("interval_s", "num"), [(1e-9, 20), (1e9, 1)])
def test_there_is_a_line_now_and_then_within_an_endless_epoch(interval_s, num):
    """A log in which nothing has stood for hours looks like a run that hangs."""
    progress = Progress(interval_s=interval_s)
    progress.console = Console(file=io.StringIO(), force_terminal=False)
    given = {"max_duration": "20ba", "log_interval": "1ba", "eval_interval": None}

    lines = fit(progress, task=tiny_task(loader=endless()), **given).splitlines()

    assert len(lines) >= num
    assert lines[-1].startswith("epoch 1  batch 20/20  loss ")
    if num > 1:
        assert lines[5].startswith("epoch 1  batch 6/20  loss ")
        assert "test/" not in lines[5]


@pytest.mark.parametrize("name", ["interval_s", "refresh_per_s"])
def test_an_interval_that_is_none_is_refused(name):
    """At 0 seconds each batch would be a line."""
    with pytest.raises(ValueError, match=f"{name}=0 isn't a positive number"):
        Progress(**{name: 0})


def test_a_line_is_never_broken():
    """Whoever parses a log expects an epoch on one line, however narrow the console."""
    lines = fit(progress_on(terminal=False, width=20)).splitlines()

    assert [line[:9] for line in lines] == ["epoch 1/2", "epoch 2/2"]


def test_the_loss_is_the_mean_of_its_epoch():
    """The numbers of one batch are noise."""
    losses = []

    class Records:
        @hookimpl
        def batch_end(self, state):
            losses.append(state.loss.item())

    lines = fit(progress_on(terminal=False), Records(), log_interval="1ba").splitlines()

    for idx, line in enumerate(lines):
        shown = float(re.search(r"loss (\S+)", line)[1])
        assert shown == pytest.approx(sum(losses[12 * idx : 12 * idx + 12]) / 12, rel=1e-2)


def test_epochs_shorter_than_the_log_interval_have_their_loss():
    """Their losses arrive epochs later, and belong to the lines all the same."""
    progress = progress_on(terminal=False)

    lines = fit(progress, task=tiny_task(loader=[BATCH]), max_duration="25ep").splitlines()

    assert [line.split()[1] for line in lines] == [f"{idx}/25" for idx in range(1, 26)]
    assert all("loss" in line for line in lines)


@pytest.mark.parametrize(
    ("duration", "last"),
    [
        ("18ba", "epoch 2  batch 18/18"),
        ("72sp", "epoch 2  sample 72/72"),
        ("144tok", "epoch 2  token 144/144"),
        ("0.5ep", "epoch 1  batch 6/6"),
        ("2ep", "epoch 2/2  loss"),
        ("0.000001sec", "epoch 1  time 0:00/0:00"),
    ],
)
def test_a_run_may_end_in_any_unit(duration, last):
    """Not every run is counted in epochs."""
    lines = fit(progress_on(terminal=False), max_duration=duration).splitlines()
    drawn = fit(progress_on(terminal=True), max_duration=duration)

    assert lines[-1].startswith(last)
    assert all(part in drawn for part in last.removesuffix("  loss").split("  "))


def test_a_terminal_gets_a_bar_and_a_table():
    """Everything that a person waits for stands in the last frame; results stay above it."""
    text = fit(progress_on(terminal=True))

    table = [frame.split()[:3] for frame in frames(text) if re.match(" +[12] ", frame)]
    assert table == [["1", "12", "train"], ["2", "24", "train"]]
    last = [frame for frame in frames(text) if frame.startswith("epoch 2/2")][-1]
    assert re.fullmatch(r"epoch 2/2  batch 12/12  \u2501+  loss \S+  \S+ samples/s  0:\d\d *", last)
    assert any("test 1/2" in frame for frame in frames(text))
    assert text.count(HIDE) == text.count(SHOW) == 1


def test_a_narrow_terminal_gets_lines_that_fit():
    """At 40 columns a line that wraps would stay behind at every step."""
    text = fit(progress_on(terminal=True, width=40))

    assert max(len(frame) for frame in frames(text)) <= 40


@pytest.mark.parametrize("terminal", [True, False])
def test_a_second_fit_goes_on_in_mid_epoch(terminal):
    """The epoch that a fit stopped in is the one that the next begins with."""
    progress = progress_on(terminal=terminal)
    with trainer_with(progress) as trainer:
        trainer.fit(until="6ba")
        trainer.fit()

    text = progress.console.file.getvalue()
    assert text.count(HIDE) == text.count(SHOW) == (2 if terminal else 0)
    starts = [line[:20] for line in frames(text) if "loss" in line]
    expected = ["epoch 1  batch 6/6  ", "epoch 1/2  ", "epoch 2/2  "]
    for start in expected:
        assert any(line.startswith(start) for line in starts)
    if terminal:
        assert any(line.startswith("epoch 1/2  batch 7/12") for line in frames(text))
    else:
        assert len(starts) == 3


def test_a_stopped_epoch_says_where_it_stopped():
    """Else half an epoch would look like a whole one."""

    class Stops:
        @hookimpl
        def should_stop(self, state):
            return state.clock.batch == 15

    lines = fit(progress_on(terminal=False), Stops(), log_interval="1ba").splitlines()

    assert lines[-1].startswith("epoch 2/2  batch 3/12  loss")


class Raises:
    def __init__(self, error, event):
        self.error = error

        @hookimpl(specname=event)
        def raises(state):
            if state.clock.batch == 7 or event.startswith("eval"):
                raise error

        self.raises = raises


@pytest.mark.parametrize("error", [ArithmeticError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("event", ["after_loss", "eval_batch_start"])
def test_a_failure_gives_the_terminal_back(error, event):
    """A hidden cursor and a stolen stdout would outlive the run."""
    progress, stdout = progress_on(terminal=True), sys.stdout

    trainer = trainer_with(progress, Raises(error, event))
    with pytest.raises(type(error)):
        trainer.fit()
    restored = sys.stdout is stdout
    text = progress.console.file.getvalue()
    trainer.close()

    assert restored
    assert text.count(HIDE) == text.count(SHOW) == 1
    assert text.endswith(SHOW)
    assert progress.console.file.getvalue() == text


def test_a_failure_reports_the_epochs_that_are_done():
    """Their losses were on the way; the lines must come all the same."""
    progress = progress_on(terminal=False)

    with pytest.raises(ArithmeticError):
        fit(
            progress, Raises(ArithmeticError(), "after_loss"), task=tiny_task(loader=[BATCH] * 2),
            max_duration="9ep",
        )  # fmt: skip

    lines = progress.console.file.getvalue().splitlines()
    assert [line[:9] for line in lines] == ["epoch 1/9", "epoch 2/9", "epoch 3/9"]


def test_an_evaluation_outside_of_a_fit_draws_a_bar_alone():
    """Who asked for it has the results; in a file there is no epoch to report."""
    texts = {}
    for terminal in (True, False):
        progress = progress_on(terminal=terminal)
        with trainer_with(progress) as trainer:
            trainer.eval()
        texts[terminal] = progress.console.file.getvalue()

    assert texts[False] == ""
    assert texts[True].count(HIDE) == texts[True].count(SHOW) == 1
    assert "evaluation  test 1/2" in texts[True]
    assert frames(texts[True])[-1].strip() == ""


def test_what_others_print_stays_above_the_bar():
    """A print in a hook must not break the bar, nor be lost."""

    class Prints:
        @hookimpl
        def batch_end(self, state):
            if state.clock.batch == 5:
                print("hello from batch 5")

    text = fit(progress_on(terminal=True), Prints())

    assert "hello from batch 5" in frames(text)


class Endless(Iterable):
    def __iter__(self):
        return itertools.repeat(BATCH)


class Unsized(Iterable):
    def __iter__(self):
        return iter([BATCH] * 5)


def test_a_data_loader_without_a_length_is_counted():
    """The first epoch shows what is done; the second knows how long the first was."""
    text = fit(progress_on(terminal=True), task=tiny_task(loader=Unsized()))

    drawn = frames(text)
    assert any(frame.startswith("epoch 1/2  batch 3  ") for frame in drawn)
    assert any(frame.startswith("epoch 2/2  batch 3/5") for frame in drawn)


def test_an_endless_data_loader_ends_in_batches():
    """Some data never ends; the run does."""
    text = fit(
        progress_on(terminal=True), task=tiny_task(loader=Endless()), max_duration="20ba",
        eval_interval="10ba",
    )  # fmt: skip

    assert any(frame.startswith("epoch 1  batch 20/20") for frame in frames(text))


def test_results_that_are_no_single_number_are_left_out():
    """A confusion matrix has no place in a line."""

    class Rows(MeanMetric):
        def update(self, outputs, targets):
            super().update(outputs)

        def compute(self):
            return super().compute().expand(3)

    task = tiny_task()
    task.metrics = {"rows": Rows(), "mean": Mean()}

    assert "rows" not in fit(progress_on(terminal=False), task=task)


class HostReads(TorchDispatchMode):
    """Counts what reads a number from a tensor."""

    num_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_reads += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing_from_the_device():
    """A bar that waits for the device makes the run slower than it shows."""
    counted = []

    class Counting:
        @hookimpl
        def after_dataloader(self, state):
            self.reads = HostReads()
            self.reads.__enter__()

        @hookimpl
        def batch_checkpoint(self, state):
            self.reads.__exit__(None, None, None)
            counted.append(self.reads.num_reads)

    with HostReads() as control:
        torch.ones(()).item()
    fit(progress_on(terminal=True), Counting(), eval_interval=None)

    assert control.num_reads == 1
    assert counted == [0] * 24


def test_no_thread_draws():
    """A thread could hold the terminal's lock while a data loader forks its workers."""
    numbers = []

    class Counts:
        @hookimpl
        def batch_end(self, state):
            numbers.append(threading.active_count())

    before = threading.active_count()
    fit(progress_on(terminal=True), Counts())

    assert set(numbers) == {before}


def test_a_forced_colour_makes_no_file_a_terminal(monkeypatch, capsys):
    """Continuous integration sets FORCE_COLOR, and a bar would fill its log."""
    monkeypatch.setenv("FORCE_COLOR", "1")

    with trainer_with(Progress()) as trainer:
        trainer.fit()

    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_that_never_or_always_draws_is_refused(rate):
    """The interval between two frames is its inverse."""
    with pytest.raises(ValueError, match="positive number"):
        Progress(refresh_per_s=rate)


@pytest.mark.parametrize("terminal", [True, False])
def test_names_that_are_long_or_command_a_terminal_do_no_harm(terminal):
    """Ten megabytes, ends of lines, and codes that would clear the screen."""
    hostile = "a\x1b[2J\x1b]0;owned\x07\nb"
    names = {f"{hostile}{'x' * 10_000_000}": Mean(), hostile: Mean()}
    task = tiny_task(metrics=names)
    task.eval_dataloaders = {hostile * 1000: [BATCH] * 2}

    text = fit(progress_on(terminal=terminal), task=task)

    assert "\x1b[2J" not in text
    assert "\x1b]" not in text
    assert "\x07" not in text
    assert len(text) < 100_000
    assert "a?[2J?]0;owned??b" in text
