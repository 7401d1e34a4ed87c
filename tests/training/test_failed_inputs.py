"""A trial tells what a model can't take, and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from eventloop.toolbox import refusal

SMALL, WHOLE = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 8, 8)


def make_model(*head):
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(), *head)


def pooled():
    return make_model(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))


def fixed():
    return make_model(nn.Flatten(), nn.Linear(3 * 6 * 6, 2))


def test_a_model_that_takes_it_refuses_nothing():
    """One sample will do, even for a batch norm that is in training mode."""
    assert refusal(pooled(), SMALL, WHOLE) is None
    assert refusal(pooled(), {"input": SMALL}, {"input": WHOLE}) is None


@pytest.mark.parametrize("last", [nn.Linear(3 * 6 * 6, 2), nn.LazyLinear(2)], ids=["fixed", "lazy"])
def test_what_a_model_raises_is_given(last):
    """Lazy modules, too, that small inputs would make too small for whole ones later."""
    error = refusal(make_model(nn.Flatten(), last), SMALL, WHOLE)

    assert isinstance(error, RuntimeError)


def test_a_model_that_takes_no_whole_inputs_is_not_judged():
    """The task calls it with other arguments; a failure says nothing of sizes."""
    assert refusal(nn.Bilinear(1, 1, 1), SMALL, WHOLE) is None


def test_lazy_modules_stay_lazy():
    """They would have the shapes and weights of a trial, not of the training."""
    model = nn.Sequential(nn.LazyConv2d(3, 3), nn.LazyBatchNorm2d(), nn.AdaptiveAvgPool2d(1))

    assert refusal(model, SMALL, WHOLE) is None
    assert all(map(is_lazy, model.parameters()))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("make", [pooled, fixed])
def test_nothing_is_left_of_a_trial(make):
    """Modes, statistics, gradients and random numbers are as they were, also after an error."""
    model, before = make(), torch.get_rng_state()
    model[0].eval()
    kept = {name: one.clone() for name, one in model.state_dict().items()}

    refusal(model, SMALL, WHOLE)

    assert [one.training for one in model] == [False, *[True] * (len(model) - 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(kept[name], one) for name, one in model.state_dict().items())
    assert model[-1].weight.grad is None


class Recurrent(nn.Module):
    """Returns its outputs and its hidden state, as `nn.GRU` does."""

    def __init__(self, as_mapping):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.as_mapping = as_mapping

    def forward(self, inputs):
        outputs = self.layer(inputs)
        return {"state": inputs, "logits": outputs} if self.as_mapping else (outputs, inputs)


@pytest.mark.parametrize(
    ("as_mapping", "line"), [(False, "model(inputs)[0])"), (True, "model(inputs)['logits'])")]
)
def test_a_loss_that_is_given_several_outputs_names_the_line_to_write(
    as_mapping, line, make_trainer, make_task
):
    """PyTorch says only that it wants a Tensor."""
    trainer = make_trainer(make_task(model=lambda: Recurrent(as_mapping)))

    with pytest.raises(TypeError, match="must be Tensor") as caught:
        trainer.fit()

    assert any(
        f"Task(forward=lambda model, inputs: {line}" in note for note in caught.value.__notes__
    )


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_a_loss_that_fails_on_something_else_gets_no_such_line(
    is_recurrent, make_trainer, make_task
):
    """Control: the outputs are of the kind that it takes."""

    def loss(outputs, targets):
        outputs = outputs[0] if is_recurrent else outputs
        return torch.nn.functional.cross_entropy(outputs, targets + 7)

    model = Recurrent(as_mapping=False) if is_recurrent else nn.Linear(3, 3)
    trainer = make_trainer(make_task(model=lambda: model, loss=loss))

    with pytest.raises(IndexError) as caught:
        trainer.fit()

    assert not any("Task(forward=" in note for note in caught.value.__notes__)
