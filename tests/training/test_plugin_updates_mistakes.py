"""What can be wrong with `state.update`: where it is called, and what it is given."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from eventloop import Task, hookimpl
from eventloop.errors import PluginError, SettingError


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, inputs):
        return self.second(self.first(inputs))


@pytest.fixture
def make_halves(make_batches, make_trainer):
    """Builds trainers of a model of two halves, each with its optimizer."""

    def make_halves(*algorithms, **settings):
        task = Task(
            model=Halves,
            loss=nn.functional.cross_entropy,
            train_dataloader=make_batches(),
            optimizer=lambda model: {
                "first": torch.optim.SGD(model.first.parameters(), lr=0.1),
                "second": torch.optim.SGD(model.second.parameters(), lr=0.1),
            },
        )
        return make_trainer(task, algorithms=algorithms, max_duration="1ep", **settings)

    return make_halves


def loss_first(state):
    return mse_loss(state.model.first(state.inputs), state.inputs)


def updates(state):
    state.update(loss_first, ["first"])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "event",
    ["fit_start", "batch_start", "before_train_batch", "after_loss", "after_train_batch",
     "batch_end", "epoch_end"],
)  # fmt: skip
def test_an_update_has_its_place_in_train_batch(event, precision, make_halves, make_plugin):
    """Elsewhere there is no batch, or one whose scaling and clock are done, or no end of it."""
    trainer = make_halves(make_plugin(**{event: updates}), precision=precision)

    with pytest.raises(PluginError, match=r"state\.update was called outside of train_batch"):
        trainer.fit()


def test_an_update_in_an_update_is_an_error(make_halves, make_plugin):
    """The inner one would zero the gradients of the outer one."""

    def nested(state):
        updates(state)
        return loss_first(state)

    trainer = make_halves(make_plugin(train_batch=lambda state: state.update(nested)))

    with pytest.raises(PluginError, match="or within another update"):
        trainer.fit()


@pytest.mark.parametrize(
    ("loss_fn", "names", "message"),
    [
        (lambda state: None, ["first"], "the loss function returned None\n  fix  return the loss"),
        (loss_first, ["second"], "the loss depends on no parameter of 'second'"),
        (loss_first, [], "no optimizer is named\n  fix  omit `optimizers` to step all of them"),
        (
            loss_first,
            "first",
            r"'first' is not a list of names\n  fix  write optimizers=\['first'\]",
        ),
    ],
)
def test_an_update_of_nothing_is_an_error(loss_fn, names, message, make_halves, make_plugin):
    """It would pass in silence, or as an update of everything."""
    trainer = make_halves(make_plugin(train_batch=lambda state: state.update(loss_fn, names)))

    with pytest.raises(PluginError, match=f"update: .*{message}"):
        trainer.fit()


def test_compile_that_no_update_makes_use_of_is_an_error(make_halves, make_plugin):
    """The model is compiled as a whole; what calls its parts is seen in the first batch."""
    owner = make_plugin("owner", train_batch=lambda state: state.update(loss_first, ["first"]))

    with pytest.raises(SettingError, match=r"compile has no effect: train_batch[^$]*owner"):
        make_halves(owner, compile={"backend": "aot_eager"}).fit()


class Before:
    """Updates one half by a loss of its own, before the batch is trained on as always."""

    name = "before"

    @hookimpl(wrapper=True)
    def train_batch(self, state):
        updates(state)
        return (yield)


@pytest.mark.parametrize("compile", [False, {"backend": "eager"}])
def test_a_wrapper_may_update_beside_the_default(compile, make_halves, make_batches):
    """The default's gradients are its own; a plain loop ends with the same weights."""
    trainer = make_halves(Before(), compile=compile)
    torch.manual_seed(0)
    model = Halves()
    both = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in make_batches():
        for loss in (
            lambda x=inputs: mse_loss(model.first(x), x),
            lambda x=inputs, y=targets: nn.functional.cross_entropy(model(x), y),
        ):
            both.zero_grad()
            loss().backward()
            both.step()

    trainer.fit()

    actual = trainer.state.model.state_dict()
    expected = model.state_dict()
    assert all(torch.equal(actual[name].cpu(), tensor) for name, tensor in expected.items())
