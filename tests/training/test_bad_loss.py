"""A loss that is NaN or infinite stops the run, without a wait in the loop."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD

from eventloop import hookimpl
from eventloop.errors import NonFiniteError
from eventloop_testing import isolated_trainer, run_ranks


@pytest.fixture
def make_spoilt(make_trainer, make_task, make_plugin):
    """Builds trainers whose loss is `loss` in the third batch, counted from 1."""

    def make_spoilt(loss: float = math.nan, *, spoils_weights: bool = False, **given):
        def spoil(state):
            if state.clock.batch == 2:
                factor = loss if spoils_weights else 0
                state.loss = state.loss * factor + loss

        plugin = make_plugin("spoiler", after_loss=spoil)
        values = {"algorithms": [plugin], "max_duration": "20ba"} | given
        task = make_task(model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))
        return make_trainer(task, **values)

    return make_spoilt


def num_late(trainer):
    """How many batches later the host has a number of a device, for whose copy no step waits."""
    return 0 if trainer.state.device.type == "cpu" else 1


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_first_bad_loss_is_named(precision, loss, make_spoilt):
    """Ten batches late at most, with its moment as loggers know it, and the ways out."""
    trainer = make_spoilt(loss, precision=precision)

    with pytest.raises(NonFiniteError) as caught:
        trainer.fit()

    found = trainer.state.clock.batch
    assert str(caught.value) == (
        f"the loss is {loss} at epoch 1, batch 3\n"
        f"  found       at batch {found}; all steps since batch 3 are lost\n"
        "  parameters  all are finite: the loss or the data is to blame, or the step was skipped\n"
        "  fix         check the inputs and targets of that batch, and the loss; with "
        'on_bad_loss="ignore" the run continues'
    )
    assert found in (10, 10 + num_late(trainer))  # a GPU may be as fast as the host


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_data_come_first_where_weights_broke(value, make_trainer, make_task, make_batches):
    """Every weight is NaN after such a batch; a lower learning rate alone wouldn't help."""
    batches = make_batches()
    batches[1][0][0, 0] = value

    with pytest.raises(NonFiniteError, match=r"fix +check the inputs and targets of that batch"):
        make_trainer(make_task(train_dataloader=batches)).fit()


def test_the_first_batch_is_not_blamed_on_the_learning_rate(make_trainer, make_task, make_batches):
    """No step has been made before it."""
    batches = make_batches()
    batches[0][0][0, 0] = math.nan

    with pytest.raises(NonFiniteError, match=r"fix +check the inputs and targets of that batch"):
        make_trainer(make_task(train_dataloader=batches)).fit()


def test_the_first_parameter_that_isnt_finite_is_named(make_spoilt):
    """It tells a model that broke from a batch that did."""
    trainer = make_spoilt(spoils_weights=True)
    trainer.state.model[0].requires_grad_(False)

    with pytest.raises(NonFiniteError, match=r"parameters  '1\.weight' is the first that isn't"):
        trainer.fit()


@pytest.mark.parametrize(
    ("scale", "fp16"),
    [
        (1e6, "its limit is 65,504, and '0.weight' reaches 1e+06: the weights exploded"),
        (
            6e4,
            "its limit is 65,504; the weights reach only 6e+04, in '0.weight', so an output",
        ),
    ],
)
def test_in_fp16_it_says_whether_weights_or_outputs_exploded(scale, fp16, make_trainer, make_task):
    """Both are finite in float32, so that nothing else would tell why the loss isn't."""

    def large():
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        nn.init.constant_(model[0].weight, scale)
        return model

    with pytest.raises(NonFiniteError) as caught:
        make_trainer(make_task(model=large), precision="fp16").fit()

    text = str(caught.value)
    assert "parameters  all are finite" in text
    assert f"fp16        {fp16}" in text
    assert "fix         set precision to bf16 or fp32, which have a larger range; or" in text


def test_a_listener_hears_of_it_before_the_run_stops(make_spoilt, make_plugin):
    """Whoever reads the log finds the loss there."""
    heard = []
    listener = make_plugin(log=lambda numbers: heard.append(numbers["train/loss"]))

    trainer = make_spoilt(callbacks=[listener])

    with pytest.raises(NonFiniteError, match="batch 3"):
        trainer.fit()

    assert len(heard) == 10 + num_late(trainer)
    assert [idx for idx, loss in enumerate(heard, 1) if math.isnan(loss)] == [3]


@pytest.mark.parametrize("until", ["3ba", "4ba"])
def test_it_is_found_when_the_fit_ends_at_the_latest(until, make_spoilt):
    """Also where fewer batches were trained on than are looked at in one go."""
    trainer = make_spoilt()

    with pytest.raises(NonFiniteError, match="at epoch 1, batch 3"):
        trainer.fit(until=until)


def test_it_is_found_before_a_checkpoint_is_saved(make_spoilt, make_plugin, tmp_path):
    """A run that goes on from spoilt weights would be as lost."""
    saved = []

    def save_checkpoint(state):
        saved.append(state.clock.batch)
        return tmp_path

    saver = make_plugin(
        "saver",
        save_checkpoint=save_checkpoint,
        batch_end=lambda state: state.request_checkpoint(),
    )
    trainer = make_spoilt()
    trainer = make_spoilt(algorithms=[*(one.target for one in trainer.plugins[1:]), saver])

    with pytest.raises(NonFiniteError, match="batch 3"):
        trainer.fit()

    assert saved == [1, 2]


def test_it_doesnt_wait_for_a_long_log_interval(make_spoilt):
    """How often numbers are wanted says nothing of how long to train on for nothing."""
    trainer = make_spoilt(log_interval="1000ba", max_duration="2000ba")
    trainer.state.train_dataloader *= 1000

    found = 10 + num_late(trainer)
    with pytest.raises(NonFiniteError, match=f"found       at batch {found}"):
        trainer.fit()


def test_a_skipped_batch_has_no_loss_to_look_at(make_spoilt, make_plugin):
    """What is named is a batch that was trained on."""
    skipper = make_plugin("skipper", should_skip_batch=lambda state: state.clock.batch < 2)
    spoiler = make_plugin("spoiler", after_loss=lambda state: setattr(state, "loss", nan(state)))

    with pytest.raises(NonFiniteError, match="at epoch 1, batch 3"):
        make_spoilt(algorithms=[skipper, spoiler]).fit()


def nan(state) -> torch.Tensor:
    return state.loss * math.nan


def test_a_run_may_ignore_it(make_spoilt):
    """Whoever skips such batches by a plugin, or knows better."""
    trainer = make_spoilt(on_bad_loss="ignore")

    trainer.fit()

    assert trainer.state.clock.batch == 20


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_finite_loss_is_left_alone(precision, make_spoilt):
    """Control: a loss that overflows when it is scaled is finite, and its step is skipped."""
    trainer = make_spoilt(1e38, precision=precision)

    trainer.fit()

    assert trainer.state.clock.batch == 20


def test_a_trainer_that_is_dropped_is_still_closed(make_task, make_plugin, clean):
    """Nothing that the core registers holds the trainer itself."""
    from eventloop import Trainer

    closed = []
    trainer = Trainer(
        make_task(optimizer=lambda model: SGD(model.parameters(), lr=0.1)),
        callbacks=[make_plugin(close=lambda: closed.append(True))],
        autoload=False,
        device="cpu",
    )
    dropped = weakref.ref(trainer)

    del trainer
    gc.collect()

    assert dropped() is None
    assert closed == [True]


def test_no_rank_ends_well_where_another_s_loss_is_bad(tmp_path):
    """The gradients of all are spoilt by it; a checkpoint or an export would hold them."""

    class Spoiler:
        name = "spoiler"

        @hookimpl
        def after_loss(self, state):
            if state.rank == 1:
                state.loss = state.loss + math.nan

    def train():
        with isolated_trainer(tmp_path, algorithms=[Spoiler()], max_duration="1ba") as trainer:
            try:
                trainer.fit()
            except NonFiniteError as error:
                return error.what
        return "nothing"

    assert run_ranks(train) == ["rank 1: the loss is nan at epoch 1, batch 1"] * 2
