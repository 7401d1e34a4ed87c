"""Training without a data set: who may do without, how it is counted, and what is refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD

from eventloop import SettingError, Task, TaskError, hookimpl, schedules
from eventloop.batch_limits import LimitBatches
from eventloop.data import cycled, zipped
from eventloop.data.batches import describe, num_samples
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task


def without_data(**given):
    """Makes a task that draws its own batches."""

    def forward(model, state):
        generator = state.generator("world")
        inputs = torch.randn(4, 3, device=state.device, generator=generator)
        return {"loss": model(inputs).square().mean()}

    values = {
        "model": lambda: nn.Linear(3, 3),
        "forward": forward,
        "optimizer": lambda model: SGD(model.parameters(), lr=0.1),
    }
    return Task(**values | given)


def fit(folder, task=None, untils=(None,), **given):
    settings = {"max_duration": "6ba", "checkpoint_interval": "1ba"} | given
    for until in untils:
        with isolated_trainer(folder, task or without_data(), **settings) as trainer:
            trainer.fit(until=until)
    return trainer.state


class Owner:
    """A plugin that makes the batches of an update."""

    name = "owner"

    @hookimpl
    def train_batch(self, state):
        state.batch = torch.ones(4, 3, device=state.device)
        return state.update(lambda state: state.model(state.microbatch).square().mean())


def test_a_task_that_owns_forward_needs_no_data(tmp_path):
    """A batch counts as one, an epoch has no end."""
    state = fit(tmp_path)

    assert (state.clock.batch, state.clock.sample, state.clock.epoch) == (6, 6, 0)
    assert state.num_batches is None


def test_a_plugin_that_owns_train_batch_needs_none_either(tmp_path):
    """What it puts into the batch is what the passes see, in microbatches too."""
    task = without_data(forward=None)
    settings = {"max_duration": "6ba"}

    with isolated_trainer(tmp_path / "a", task, algorithms=[Owner()], **settings) as trainer:
        trainer.fit()
    with isolated_trainer(
        tmp_path / "b", task, algorithms=[Owner()], microbatch_size=1, **settings
    ) as sliced:
        sliced.fit()

    assert trainer.state.clock.batch == 6
    torch.testing.assert_close(trainer.state.model.weight, sliced.state.model.weight)


def test_a_run_without_data_goes_on_to_the_bit(tmp_path):
    """Its generators are in the checkpoint, and there is nothing else."""
    whole = fit(tmp_path / "whole")

    stopped = fit(tmp_path / "stopped", untils=("2ba", "3ba", None))

    assert torch.equal(whole.model.weight, stopped.model.weight)


def test_two_ranks_train_one_model_without_data(tmp_path):
    """Each from draws of its own; no word of data that can't be split."""

    def on_ranks():
        settings = {"max_duration": "3ba"}
        with isolated_trainer(tmp_path, without_data(), **settings) as trainer:
            trainer.fit()
            return trainer.state.model.weight.detach().clone(), trainer.notes

    (one, notes), (other, _) = run_ranks(on_ranks)

    assert torch.equal(one, other)
    assert not any("can't split" in note for note in notes)


@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        (
            lambda: without_data(forward=None),
            {},
            "the task has no train data loader.*can be left out if",
        ),
        (without_data, {"max_duration": "2ep"}, "the task has no train data loader.*in batches"),
    ],
)
def test_a_run_that_lacks_data_is_refused(tmp_path, task, settings, words):
    """Where nothing makes batches, and where nothing would end an epoch."""
    with pytest.raises(TaskError, match=f"(?s){words}"):
        fit(tmp_path, task(), **settings)


def test_until_an_epoch_that_has_no_end_is_refused(tmp_path):
    """It would train forever."""
    with isolated_trainer(tmp_path, without_data(), max_duration=None) as trainer:
        with pytest.raises(TaskError, match="after 1ep, but without a train data loader"):
            trainer.fit(until="1ep")


def test_a_checkpoint_an_epoch_is_warned_of_where_none_ends(tmp_path):
    """A run of days would be saved at its end."""
    with pytest.warns(
        UserWarning, match="checkpoint_interval is 1ep, but an epoch of this run has no"
    ):
        fit(tmp_path, checkpoint_interval="auto")


def test_a_schedule_counts_batches_without_data(tmp_path):
    """Of the run's length; one in epochs is refused as of any loader without a length."""
    state = fit(tmp_path, without_data(scheduler=schedules.linear()))

    assert state.optimizers["sgd"].param_groups[0]["lr"] == 0.0


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_samples_are_counted_as_the_task_says(tmp_path, microbatch_size):
    """By any name that num_tokens may ask for, of a batch and of each microbatch."""
    seen = []

    def num_samples(inputs, targets):
        seen.append(len(inputs))
        return 10 * len(targets)

    task = tiny_task(num_samples=num_samples, num_tokens=lambda inputs: inputs.numel())

    state = fit(tmp_path, task, max_duration="3ba", microbatch_size=microbatch_size)

    assert (state.clock.sample, state.clock.token) == (120, 36)
    assert set(seen) == ({4} if microbatch_size is None else {4, 2})


def test_the_run_may_be_counted_in_such_samples(tmp_path):
    """As an agent's steps are."""
    state = fit(tmp_path, without_data(num_samples=lambda: 64), max_duration="200sp")

    assert (state.clock.batch, state.clock.sample) == (4, 256)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "num_samples returned 0, less than 1"), (2.0, "num_samples returned 2.0, a float, not an int"),
     (True, "num_samples returned True, a bool")],
)  # fmt: skip
def test_a_count_that_is_none_is_refused(tmp_path, count, words):
    """A mean over nothing isn't a number."""
    with pytest.raises(TaskError, match=words):
        fit(tmp_path, tiny_task(num_samples=lambda: count))
    with pytest.raises(
        TypeError, match=r"Task\(num_samples=...\) requires the unknown argument 'model'"
    ):
        isolated_trainer(tmp_path, tiny_task(num_samples=lambda model: 1))


def test_microbatches_weigh_as_many_samples_as_the_task_says(tmp_path):
    """The gradient is the mean over them, however the batch is sliced."""
    weights = torch.tensor([1, 2, 3, 4])

    def trained(name, microbatch_size):
        task = tiny_task(
            train_dataloader=[(inputs, weights) for inputs, _ in tiny_batches()],
            num_samples=lambda targets: int(targets.sum()),
            loss=lambda outputs, targets: (
                (outputs.square().mean(1) * targets).sum() / targets.sum()
            ),
            eval_dataloaders=None,
        )
        return fit(tmp_path / name, task, max_duration="3ba", microbatch_size=microbatch_size)

    whole, sliced = trained("whole", None), trained("sliced", 1)

    for one, other in zip(whole.model.parameters(), sliced.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_an_empty_batch_is_one_sample_and_is_called_what_it_is():
    """In messages, too."""
    assert num_samples({}) == 1
    assert describe({}) == "nothing: the run has no train data loader"


def test_an_evaluation_alone_needs_no_data_to_train(tmp_path):
    """Control: nothing warns of what isn't asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with isolated_trainer(tmp_path, tiny_task(train_dataloader=None)) as trainer:
            assert "test" in trainer.eval()


def test_tokens_of_a_run_without_data_have_to_be_counted(tmp_path):
    """As of any other."""
    with pytest.raises(SettingError, match="tokens aren't counted"):
        fit(tmp_path, max_duration="100tok")


def test_microbatches_of_nothing_are_refused(make_trainer):
    """The setting would have no effect; a batch that a plugin makes is split."""
    task = Task(
        model=lambda: nn.Linear(3, 1),
        forward=lambda model: {"loss": model(torch.ones_like(model.weight)).mean()},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        num_samples=lambda: 64,
    )

    with pytest.raises(TaskError, match=r"microbatch_size is 4, but without a train data loader"):
        make_trainer(task, max_duration="2ba", microbatch_size=4).fit()
    make_trainer(task, max_duration="2ba", microbatch_size="auto").fit()


@pytest.mark.parametrize("loader", [cycled, lambda one: zipped(cycled(one), cycled(one))])
def test_epochs_without_an_end_do_not_end_a_run(loader, make_trainer, make_task, make_batches):
    """It would go on for good, without a word."""
    task = make_task(
        train_dataloader=loader(make_batches()),
        forward=lambda model: {"loss": model.bias.sum()},
        loss=None,
    )

    with pytest.raises(TaskError, match="to end after 2ep, but an epoch of a data loader that is"):
        make_trainer(task, max_duration="2ep").fit()
    assert make_trainer(task, max_duration="4ba").fit().history[-1]["batch"] == 4
    limited = make_trainer(task, max_duration="2ep", algorithms=[LimitBatches(train_batches=2)])
    assert limited.fit().history[-1]["batch"] == 4
