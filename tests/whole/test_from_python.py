"""From Python as good as from the shell: what a run says of itself, keeps and compares."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import huber_loss, l1_loss, mse_loss, smooth_l1_loss
from torch.optim import SGD

import eventloop
from eventloop import (
    Allowed,
    Clock,
    ResumeError,
    SettingError,
    Task,
    TaskError,
    Trainer,
    TrainerBuilder,
    hookimpl,
)
from eventloop_testing import tiny_task

PAIRS = [(torch.ones(4, 3), torch.zeros(4, 1))] * 2


class Scale:
    """Scales gradients.

    Args:
        factor: what they are multiplied by.
        steps: the batches at which they are.
        label: how it is called in files.
        watch: what looks on.
    """

    free_options = ("label",)

    def __init__(self, factor=1.0, *, steps=(), label="", watch=None) -> None:
        self.factor = factor
        self._steps = list(steps)
        self.label = label
        self.watch = watch

    @hookimpl
    def after_backward(self, state):
        for param in state.model.parameters():
            param.grad.mul_(self.factor)


def regression(loss=mse_loss, pairs=PAIRS):
    return Task(
        model=lambda: nn.Linear(3, 1),
        loss=loss,
        train_dataloader=pairs,
        optimizer=lambda model: SGD(model.parameters(), lr=0.1),
    )


def test_a_trainer_says_where_it_is_and_what_it_trains(make_trainer):
    """In a notebook it is the first thing to be looked at."""
    trainer = make_trainer(regression(), callbacks=[Scale()], max_duration="2ep")
    before = repr(trainer)
    result = trainer.fit()
    trainer.close()

    assert before.startswith("<Trainer: 0 epochs, 0 batches of 2ep; cpu, fp32; plugins: scale; ")
    assert "2 epochs, 4 batches of 2ep" in repr(trainer)
    assert repr(trainer).endswith(", closed>")
    assert str(trainer.state.run_dir) in repr(result)


def test_a_task_a_clock_and_a_result_are_printed_in_a_line(make_trainer):
    """Whatever the size of the model and of the data."""
    task = regression()
    clock = Clock()
    clock.end_batch(8, 100, 1.5)
    result = make_trainer(tiny_task()).fit()

    assert repr(task) == (
        "Task(model=<lambda>, loss=mse_loss, train_dataloader=[(Tensor, Tensor), ...], "
        "optimizer=<lambda>)"
    ) or repr(task).startswith("Task(model=<lambda>, loss=mse_loss, train_dataloader=[")
    assert repr(clock) == "Clock(epoch=0, batch=1, sample=8, token=100, seconds=1.5)"
    assert repr(result).startswith("Result({'")
    assert "rows of history" in repr(result) or "row of history" in repr(result)
    assert "\n" not in repr(task) + repr(result)


def test_a_model_isnt_printed_whole():
    """A large model has thousands of lines."""
    task = Task(model=nn.Sequential(*[nn.Linear(1, 1)] * 50), loss=nn.MSELoss())

    assert repr(task) == "Task(model=Sequential, loss=MSELoss)"


def test_a_folder_that_a_plugin_makes_has_a_manifest(make_trainer, make_plugin):
    """Without run_dir, too; what leaves no file makes no folder."""

    def write(state):
        state.run_dir.mkdir(parents=True, exist_ok=True)
        (state.run_dir / "notes.txt").write_text("seen")

    with_file = make_trainer(regression(), callbacks=[make_plugin("notes", epoch_end=write)])
    with_file.fit()
    without = make_trainer(regression())
    without.fit()

    found = json.loads((with_file.state.run_dir / "manifest.json").read_text())
    assert found["trained"]["parameters"] == {"model": "Linear", "total": 4, "trained": 4}
    assert found["trained"]["loss"] == "mse_loss"
    assert found["earlier_starts"] == []
    assert not without.state.run_dir.exists()


def test_a_run_that_fails_leaves_a_manifest(make_trainer, make_plugin):
    """Files of a run of which nobody knows what it was are of no use."""

    def write_and_fail(state):
        state.run_dir.mkdir(parents=True, exist_ok=True)
        raise RuntimeError("broken")

    trainer = make_trainer(regression(), callbacks=[make_plugin("bad", batch_end=write_and_fail)])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit()

    assert (trainer.state.run_dir / "manifest.json").is_file()


@pytest.mark.nightly
def test_the_script_is_kept_with_the_run(clean):
    """As the command keeps the task's file."""
    text = (
        "import torch\nfrom eventloop import Task, Trainer\n"
        "task = Task(model=torch.nn.Linear(1, 1), loss=torch.nn.functional.mse_loss,\n"
        "    train_dataloader=[(torch.ones(2, 1), torch.ones(2, 1))],\n"
        "    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "Trainer(task, max_duration='1ep', run_dir='run', device='cpu', autoload=False).fit()\n"
    )
    Path("train.py").write_bytes(text.replace("\n", "\r\n").encode())

    subprocess.run([sys.executable, "train.py"], check=True)

    script = json.loads(Path("run/manifest.json").read_text())["script"]
    assert script["path"].endswith("train.py")
    assert script["source"] == text


def test_options_of_an_instance_are_in_the_manifest(make_trainer):
    """Under the names of the constructor, defaults left out; what isn't a value stays out."""
    scale = Scale(0.5, steps=(1, 2), label="a", watch=object())

    trainer = make_trainer(regression(), algorithms=[scale])

    (plugin,) = trainer.state.manifest["plugins"]
    assert plugin["options"] == {"factor": "0.5", "steps": [1, 2], "label": "a"}
    assert plugin["free"] == ["label"]


@pytest.mark.parametrize("change", [{"factor": 0.25}, {"factor": 0.5, "steps": [3]}])
def test_another_option_of_an_instance_is_refused(make_trainer, change, clean):
    """As the flag of an installed plugin is."""
    given = {"run_dir": "run", "max_duration": "1ep"}
    make_trainer(regression(), algorithms=[Scale(0.5)], **given).fit()

    with pytest.raises(ResumeError, match="scale"):
        make_trainer(regression(), algorithms=[Scale(**change)], **given)
    builder = TrainerBuilder(allowed=Allowed(config_change=True))
    with builder.build(
        regression(), algorithms=[Scale(**change)], device="cpu", autoload=False, **given
    ) as allowed:
        assert any("scale" in note for note in allowed.notes)


def test_an_option_that_is_free_may_change(make_trainer, clean):
    """A name of a file, or what a test hands over; the class declares it."""
    given = {"run_dir": "run", "max_duration": "1ep"}
    make_trainer(regression(), algorithms=[Scale(0.5, label="a")], **given).fit()

    trainer = make_trainer(
        regression(), algorithms=[Scale(0.5, label="b", watch=object())], **given
    )

    assert trainer.state.clock.batch == 2


def test_a_second_fit_says_how_to_train_longer(make_trainer):
    """Called again by habit, as in other libraries, it would train for longer."""
    trainer = make_trainer(regression(), max_duration="1ep")
    trainer.fit()

    with pytest.warns(UserWarning, match=r"1ep is done .*; `fit\(until='2ep'\)` goes further"):
        trainer.fit()
    trainer.fit(until="2ep")

    assert trainer.state.clock.epoch == 2


def test_fit_is_a_trainer_in_one_call(clean):
    """The same bits, plugins and files."""
    given = {"max_duration": "2ep", "device": "cpu", "autoload": False, "clip_norm": 1.0}
    with Trainer(regression(), algorithms=[Scale(0.5)], **given) as trainer:
        expected = trainer.fit()

    result = eventloop.fit(
        lambda: nn.Linear(3, 1),
        PAIRS,
        loss=mse_loss,
        optimizer=lambda model: SGD(model.parameters(), lr=0.1),
        eval_dataloaders={"valid": PAIRS},
        algorithms=[Scale(0.5)],
        **given,
    )

    assert torch.equal(result.model.weight, expected.model.weight)
    assert "loss" in result.metrics["valid"]


def test_fit_names_what_was_meant():
    """An argument that it doesn't have is one of the trainer's that isn't there."""
    given = {"optimizer": lambda model: SGD(model.parameters(), lr=0.1), "max_duration": "1ep"}

    with pytest.raises(SettingError, match='here it is max_duration="10ep"'):
        eventloop.fit(nn.Linear(1, 1), PAIRS, max_epochs=3, **given)
    with pytest.raises(SettingError, match=r"no argument 'criterion'; here it is loss=\.\.\."):
        eventloop.fit(nn.Linear(1, 1), PAIRS, criterion=mse_loss, **given)
    with pytest.raises(SettingError, match="no argument 'metric'; the closest is 'metrics'"):
        eventloop.fit(nn.Linear(1, 1), PAIRS, metric={}, **given)
    with pytest.raises(SettingError, match="settings are keywords here"):
        eventloop.fit(nn.Linear(1, 1), PAIRS, settings={"seed": 1}, **given)


@pytest.mark.parametrize("loss", [mse_loss, l1_loss, smooth_l1_loss, huber_loss, nn.MSELoss()])
def test_shapes_that_would_be_broadcast_are_an_error(make_trainer, loss):
    """(4, 1) against (4,): each output would be compared with all targets; torch only warns."""
    pairs = [(inputs, targets.squeeze(1)) for inputs, targets in PAIRS]

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with pytest.raises(TaskError, match=r"\(torch.Size\(\[4\]\)\).*\(torch.Size\(\[4, 1\]\)\)"):
            make_trainer(regression(loss, pairs)).fit()
        wrapped = regression(lambda outputs, targets: loss(outputs, targets), pairs)
        with pytest.raises(TaskError, match="would be broadcast"):
            make_trainer(wrapped).fit()


def test_broadcasting_that_is_meant_and_other_warnings_pass(make_trainer):
    """The message names the way; a filter of the caller's stays as it was."""
    pairs = [(inputs, targets.squeeze(1)) for inputs, targets in PAIRS]

    def meant(outputs, targets):
        warnings.warn("something else", UserWarning, stacklevel=2)
        return mse_loss(*torch.broadcast_tensors(outputs, targets))

    filters = list(warnings.filters)
    with pytest.warns(UserWarning, match="something else"):
        make_trainer(regression(meant, pairs)).fit()

    assert [one[0] for one in warnings.filters] == [one[0] for one in filters]


@pytest.mark.parametrize("other", [[1.0, 3.0], [[1.0, 2.0]]], ids=["values", "shape"])
def test_a_tensor_among_options_is_compared(make_trainer, tmp_path, other):
    """Weights of classes, say: a run that went on with others would be another run."""

    def run(steps, until=None):
        watch = torch.tensor(steps)
        settings = {"max_duration": "4ba", "run_dir": tmp_path / "run"}
        with make_trainer(regression(), algorithms=[Scale(watch=watch)], **settings) as trainer:
            trainer.fit(until=until)

    run([1.0, 2.0], until="2ba")

    with pytest.raises(ResumeError, match=r"scale\.watch: tensor of shape \(2,\), torch\.float32"):
        run(other)
    run([1.0, 2.0])
