"""Who makes the step: precision, microbatches, clipping, closures and ranks with main callbacks."""

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from eventloop import PluginError, hookimpl
from eventloop.actions import ACTIONS
from eventloop_orca import MainCallback, Orca
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task


class Forward(MainCallback):
    """Has a forward pass of its own; the step is eventloop's."""

    def on_iter_forward(self, runner):
        inputs, target = runner.batch
        runner.output = runner.model(inputs)
        runner.loss = runner.criterion(runner.output, target)


class Steps(Forward):
    """Makes the step itself."""

    def on_iter_backward(self, runner):
        super().on_iter_backward(runner)


class Adjusts(Forward):
    """Moves the schedulers itself."""

    def on_lr_adjust(self, runner):
        super().on_lr_adjust(runner)


def loader(batch_size=4):
    inputs, targets = map(torch.cat, zip(*tiny_batches(4), strict=True))
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch_size)


def fit(folder, *callbacks, algorithms=(), task=None, **given):
    """Trains 2 epochs of 16 samples; gives the weights."""
    task = tiny_task(train_dataloader=loader, metrics={}) if task is None else task
    algorithms = [*algorithms, *([Orca(callbacks=list(callbacks))] if callbacks else [])]
    with isolated_trainer(
        folder, task, algorithms=algorithms, max_duration="2ep", **given
    ) as trainer:
        trainer.fit()
        return torch.cat([one.detach().flatten() for one in trainer.state.model.parameters()])


@pytest.mark.parametrize(
    "given",
    [
        {"precision": "bf16"},
        {"precision": "fp16", "microbatch_size": 2, "clip_norm": 0.2},
        {"microbatch_size": "auto", "clip_value": 0.01},
    ],
    ids=str,
)
def test_with_its_own_forward_alone_everything_else_is_eventloops(given, tmp_path):
    """Precision, accumulation and clipping work as with the task's own forward and loss."""
    expected = fit(tmp_path / "task", **given)

    assert torch.equal(fit(tmp_path / "orca", Forward(), **given), expected)
    assert not torch.equal(fit(tmp_path / "plain"), expected)


class Twice:
    """An algorithm that wants the batch's loss a second time."""

    def __init__(self):
        self.losses = []

    @hookimpl(wrapper=True)
    def optimizer_step(self, state, optimizers, closure):
        self.losses.append((state.loss.clone(), closure()))
        return (yield)


def test_the_closure_of_a_step_runs_its_forward_again(tmp_path):
    """Methods with two gradients a step see what the callback computes, microbatches included."""
    twice = Twice()

    fit(tmp_path, Forward(), algorithms=[twice], microbatch_size=2)

    assert len(twice.losses) == 8
    for first, again in twice.losses:
        torch.testing.assert_close(again, first)


class Halves:
    """An algorithm that changes the loss, as one with a penalty does."""

    @hookimpl(wrapper=True)
    def loss(self, state):
        return (yield) / 2


@pytest.mark.parametrize("main", [Forward, Steps])
def test_a_loss_that_a_plugin_changes_is_the_one_that_counts(main, tmp_path):
    """A term added by another plugin must not be lost because a callback makes the step."""
    expected = fit(tmp_path / "task", algorithms=[Halves()])

    assert torch.equal(fit(tmp_path / "orca", main(), algorithms=[Halves()]), expected)


@pytest.mark.parametrize("main", [Forward, Steps])
def test_two_ranks_end_with_the_weights_of_one(main, tmp_path):
    """Gradients are averaged by the model that the callback calls."""

    def train(folder, batch_size):
        return fit(folder, main(), task=tiny_task(train_dataloader=loader(batch_size), metrics={}))

    expected = train(tmp_path / "one", 4)

    one, other = run_ranks(train, tmp_path / "two", 2)

    assert torch.equal(one, other)
    torch.testing.assert_close(one, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("main", "given", "says"),
    [
        (Steps, {"precision": "bf16"}, "isn't made for precision bf16; without its on_iter_back"),
        (Steps, {"precision": "fp16"}, "isn't made for precision fp16"),
        (Steps, {"microbatch_size": 2}, "a step for each microbatch of microbatch_size=2"),
        (Steps, {"microbatch_size": "auto"}, "microbatch_size='auto'"),
        (Steps, {"clip_norm": 1.0}, "clip_norm would have no effect"),
        (Steps, {"clip_value": 1.0}, "clip_value would have no effect"),
    ],
)
def test_what_a_main_callback_can_not_do_is_refused_before_the_run(main, given, says, tmp_path):
    """Done wrong in silence it would be found in the results, if at all."""
    orca = Orca(callbacks=[main()])

    with pytest.raises(PluginError, match=says):
        isolated_trainer(tmp_path, algorithms=[orca], **given)


def two_optimizers(model):
    half = len(list(model.parameters())) // 2
    params = list(model.parameters())
    return {
        "one": torch.optim.SGD(params[:half], lr=0.1),
        "two": torch.optim.SGD(params[half:], lr=0.1),
    }


@pytest.mark.parametrize(
    ("main", "task", "says"),
    [
        (Steps, {"optimizer": two_optimizers}, "knows one optimizer, and the run has one, two"),
        (MainCallback, {"loss": None}, r"no loss for the default on_iter_forward, Task\(loss="),
        (
            Adjusts,
            {"scheduler": lambda optimizer: StepLR(optimizer, 1)},
            'counted in batches; give Task\\(scheduler_interval="ep"\\)',
        ),
    ],
)
def test_a_task_that_does_not_fit_is_refused_before_the_run(main, task, says, tmp_path):
    """With what to write instead."""
    orca = Orca(callbacks=[main()])

    with pytest.raises(PluginError, match=says):
        isolated_trainer(tmp_path, tiny_task(**task), algorithms=[orca])


class NoLoss(MainCallback):
    def on_iter_forward(self, runner):
        runner.output = runner.model(runner.batch[0])


class NoOutput(MainCallback):
    def on_iter_forward(self, runner):
        runner.loss = runner.criterion(runner.model(runner.batch[0]), runner.batch[1])


@pytest.mark.parametrize(
    ("main", "says"),
    [(NoLoss, "on_train_forward left no loss"), (NoOutput, "on_train_forward left no output")],
)
def test_a_forward_pass_that_leaves_nothing_is_named(main, says, tmp_path):
    """The line to write stands in the message."""
    with pytest.raises(PluginError, match=f"{main.__name__}.*{says}[\\s\\S]*let it assign runner"):
        fit(tmp_path, main())


def test_schedules_of_batches_move_where_the_callback_leaves_them_out(tmp_path):
    """A main callback without on_lr_adjust changes nothing about them."""

    def task():
        return tiny_task(scheduler=lambda optimizer: StepLR(optimizer, 2, 0.5), metrics={})

    expected = fit(tmp_path / "task", task=task())

    assert torch.equal(fit(tmp_path / "orca", Forward(), task=task()), expected)


def test_conflicts_depend_on_what_the_main_callback_does():
    """Who needs the task's loss, or changes the step, can't work with one who computes it."""
    conflicts = [
        set(Orca(callbacks=[one]).conflicts)
        for one in (type("Plain", (), {"after_run": print})(), Forward(), Steps())
    ]

    assert conflicts[0] == set()
    assert conflicts[1] == {"cutmix", "label-smoothing", "mixup", "selective-backprop"}
    assert conflicts[2] == conflicts[1] | {"agc", "sam"}


@pytest.mark.parametrize(
    ("main", "owned"),
    [
        (Forward, {"forward", "loss", "eval_forward", "predict_forward"}),
        (
            Steps,
            {"forward", "loss", "eval_forward", "predict_forward", "backward", "clip_gradients",
             "optimizer_step", "zero_grad"},
        ),
        (Adjusts, {"forward", "loss", "eval_forward", "predict_forward", "scheduler_step"}),
    ],
)  # fmt: skip
def test_a_main_callback_owns_what_it_has_methods_for(main, owned, tmp_path):
    """A second owner is then refused by name, and the header tells of this one."""
    with isolated_trainer(tmp_path, algorithms=[Orca(callbacks=[main()])]) as trainer:
        mine = {name for name in ACTIONS if trainer.owner(name).name == "orca"}
        notes = trainer.notes

    assert mine == owned
    assert any(f"the main callback {main.__name__} owns forward" in note for note in notes)
