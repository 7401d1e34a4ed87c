"""A run with callbacks that was stopped and resumed is one run."""

import pytest
import torch

from eventloop import hookimpl
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop_orca import Callback, MainCallback, Orca
from eventloop_testing import differences, isolated_trainer, tiny_batches, tiny_task


class Noisy(MainCallback):
    """Trains with noise that fades with what it has counted; its count is its state."""

    def __init__(self):
        self.num_steps = 0

    def on_train_forward(self, runner):
        inputs, target = runner.batch
        scale = runner.get("scale") / (1 + self.num_steps)
        noise = torch.randn(inputs.shape).to(inputs.device)
        runner.output = runner.model(inputs + scale * noise)
        runner.loss = runner.criterion(runner.output, target)

    def on_iter_backward(self, runner):
        super().on_iter_backward(runner)
        self.num_steps += 1
        runner.update("scale", runner.get("scale") + 0.1)

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.num_steps = state["num_steps"]


class Forgetful(Noisy):
    """The same without a state."""

    load_state_dict = None


class Scale(Callback):
    """Puts what the main callback gets, once."""

    def before_run(self, runner):
        if runner.global_step == 0:
            runner.put("scale", 0.5)


class Fails:
    """An algorithm that ends the run after a batch."""

    name = "fails"
    free_options = ("batch",)

    def __init__(self, batch=-1):
        self.batch = batch

    @hookimpl
    def batch_end(self, state):
        if state.clock.batch == self.batch:
            raise EOFError


def fit(folder, main, batch=-1):
    task = tiny_task(train_dataloader=tiny_batches(5), metrics={})
    orca = Orca(callbacks=[main(), Scale()])
    given = {"max_duration": "2ep", "checkpoint_interval": "2ba"}
    with isolated_trainer(folder, task, algorithms=[orca, Fails(batch)], **given) as trainer:
        trainer.fit()
        assert trainer.state.clock.batch == 10


def differing(folder, other):
    """Returns what differs between the last checkpoints."""
    return list(differences(*(
        read_checkpoint(max((one / "run" / "checkpoints").glob("ba*"))).parts for one in (folder, other)
    )))  # fmt: skip


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-go")
    fit(folder, Noisy)
    return folder


@pytest.mark.parametrize("batches", [[3], [5, 8]])
def test_stopped_in_mid_epoch_and_resumed_it_ends_with_the_same_bits(batches, tmp_path, in_one_go):
    """With what the callback counted, and what callbacks share."""
    for batch in batches:
        with pytest.raises(EOFError):
            fit(tmp_path, Noisy, batch)
    fit(tmp_path, Noisy)

    assert differing(tmp_path, in_one_go) == []


def test_a_callback_that_keeps_nothing_begins_anew(tmp_path, in_one_go):
    """Control: without its state the comparison fails."""
    with pytest.raises(EOFError):
        fit(tmp_path, Forgetful, 5)
    fit(tmp_path, Forgetful)

    assert differing(tmp_path, in_one_go) != []


def test_what_can_not_be_saved_is_named(tmp_path):
    """The run goes on: in Orca nothing of the store is saved at all."""

    class Puts(Callback):
        def before_run(self, runner):
            runner.put("model", runner.model)
            runner.put("best", 1)

    orca = Orca(callbacks=[Puts()])
    with isolated_trainer(tmp_path, algorithms=[orca]) as trainer:
        trainer.fit()

        with pytest.warns(UserWarning, match=r"put as 'model' isn't saved"):
            state = orca.state_dict()

    assert state["kept"] == {"best": 1}
