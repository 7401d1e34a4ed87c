"""What can be known of an optimizer by looking at it."""

from __future__ import annotations

import pytest
import torch
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from eventloop.training.optimizers import could_be_fused, drop_gradients, wants_closure

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def params():
    """One parameter."""
    return [torch.nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_an_optimizer_that_nobody_decided_about_could_be_fused_on_a_gpu(kind, params):
    """It is one argument, and a kernel instead of dozens."""
    assert could_be_fused(kind(params, lr=0.1), GPU)
    assert not could_be_fused(kind(params, lr=0.1), CPU)


@pytest.mark.parametrize("given", [{"fused": True}, {"fused": False}, {"foreach": True},
                                   {"differentiable": True}], ids=str)  # fmt: skip
def test_who_decided_gets_no_advice(given, params):
    """Nobody is told twice."""
    assert not could_be_fused(SGD(params, lr=0.1, **given), GPU)


class OwnAdam(Adam):
    """Whose step torch knows nothing of."""


@pytest.mark.parametrize("kind", [Adagrad, LBFGS, OwnAdam])
def test_what_has_no_fused_step_on_a_gpu_gets_no_advice(kind, params):
    """It would be an error."""
    assert not could_be_fused(kind(params, lr=0.1), GPU)


def test_only_a_step_that_cant_do_without_wants_a_closure(params):
    """Also once a scheduler has put another function in its place."""
    optimizers = [LBFGS(params), SGD(params, lr=0.1), Adam(params)]
    for one in optimizers:
        StepLR(one, step_size=1)

    assert [wants_closure(one) for one in optimizers] == [True, False, False]


def test_gradients_are_dropped_as_torch_does():
    """Of all groups, and where there is none as well."""
    first, second, third = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    optimizer = SGD([{"params": [first, second]}, {"params": [third]}], lr=0.1)
    first.grad = third.grad = torch.ones(2)

    drop_gradients(optimizer)

    assert [first.grad, second.grad, third.grad] == [None, None, None]


class Zeroing(SGD):
    """Whose gradients stay where they are in memory."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)


def test_an_optimizer_with_a_way_of_its_own_is_asked(params):
    """It may have more to do, as a wrapper of another optimizer has."""
    params[0].grad = torch.ones(2)

    drop_gradients(Zeroing(params, lr=0.1))

    assert params[0].grad.tolist() == [0, 0]


def test_a_way_put_into_an_optimizer_is_asked(params, monkeypatch):
    """As schedulers do with `step`."""
    optimizer, asked = SGD(params, lr=0.1), []
    monkeypatch.setattr(optimizer, "zero_grad", lambda: asked.append("zero_grad"))

    drop_gradients(optimizer)

    assert asked == ["zero_grad"]


class WithoutRate(torch.optim.Optimizer):
    """Finds its own steps, as optimizers without learning rates do."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param -= param.grad.sign() * 0.01


def test_an_optimizer_may_have_no_learning_rate(make_trainer, make_task, make_plugin, tmp_path):
    """Then there is none to log, nor one to warn of where a run goes on."""
    names = set()
    listens = make_plugin(log=lambda state, numbers: names.update(numbers))
    task = make_task(optimizer=lambda model: WithoutRate(model.parameters()))

    for until in ("1ep", "2ep"):
        settings = {"run_dir": tmp_path, "max_duration": "2ep"}
        with make_trainer(task, callbacks=[listens], **settings) as trainer:
            trainer.fit(until=until)

    assert names == {"train/loss"}
