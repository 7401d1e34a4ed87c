"""Optimizers: what they are, what they hold, and how they step."""

from __future__ import annotations

from functools import wraps

import pytest
import torch
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from eventloop.errors import TaskError
from eventloop.training.optimizers import (
    could_be_fused,
    drop_gradients,
    require_optimizer,
    step,
    wants_closure,
)

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


def weighed(kind, steps, **given):
    """Returns a parameter's bytes and the optimizer's state after these steps."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(5))
    optimizer = kind([param], **given)
    for take in steps:
        param.grad = torch.randn(5)
        take(optimizer)
    return param.detach().numpy().tobytes(), repr(optimizer.state_dict())


@pytest.mark.parametrize(
    ("kind", "given"),
    [(SGD, {"lr": 0.1, "momentum": 0.9}), (AdamW, {"lr": 0.1}), (AdamW, {"lr": 0.1, "fused": True}),
     (SGD, {"lr": 0.1, "differentiable": False}), (Adagrad, {})],
)  # fmt: skip
def test_a_step_is_that_of_torch(kind, given):
    """To the bit, and without gradients of its own."""
    plain = weighed(kind, [lambda one: one.step()] * 3, **given)
    assert weighed(kind, [step] * 3, **given) == plain


@pytest.mark.parametrize(
    "of_all", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
)
def test_a_hook_of_all_optimizers_sees_a_step(of_all, params):
    """As without eventloop; removed, it sees none."""
    seen = []
    hook = of_all(lambda *_: seen.append("of all"))
    step(SGD(params, lr=0.1))
    hook.remove()
    step(SGD(params, lr=0.1))

    assert seen == ["of all"]


@pytest.mark.parametrize("kind", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_of_an_optimizer_sees_its_step(kind, params):
    """Each kind alone: the other doesn't make torch's way necessary for it."""
    seen, optimizer = [], SGD(params, lr=0.1)
    hook = getattr(optimizer, kind)(lambda *_: seen.append("its own"))
    step(optimizer)
    hook.remove()
    step(optimizer)

    assert seen == ["its own"]


def test_who_looks_at_a_step_sees_it(params):
    """A profiler, and a scheduler of torch's: each as without eventloop."""
    optimizer = SGD(params, lr=0.1)
    with torch.profiler.profile() as profile:
        step(optimizer)
    assert "Optimizer.step#SGD.step" in {one.key for one in profile.key_averages()}

    scheduler = StepLR(optimizer, 1)
    step(optimizer)
    scheduler.step()  # a warning if the optimizer seems not to have stepped


def test_what_was_put_around_a_step_is_called(params, monkeypatch):
    """Of a class, as `functools.wraps` leaves torch's marks on it, and of one optimizer."""
    seen, optimizer = [], SGD(params, lr=0.1)

    def around(function, name):
        @wraps(function)
        def stepped(*args, **kwargs):
            seen.append(name)
            return function(*args, **kwargs)

        return stepped

    monkeypatch.setattr(SGD, "step", around(SGD.step, "class"))
    step(optimizer)
    monkeypatch.setattr(optimizer, "step", around(optimizer.step, "one"))
    step(optimizer)

    assert seen == ["class", "one", "class"]


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


def test_a_group_that_was_added_in_training_is_named(params):
    """A resume builds the optimizer as it was at the start."""
    optimizer = SGD(params, lr=0.1)
    saved = optimizer.state_dict()
    saved["param_groups"] = [*saved["param_groups"], {**saved["param_groups"][0], "params": [9]}]

    with pytest.raises(ValueError, match="2 param_groups, not 1; add all at the start"):
        require_optimizer(optimizer, saved)


def test_an_optimizer_of_another_model_is_refused(make_trainer, make_task):
    """It would step for ten epochs and change nothing."""
    task = make_task(optimizer=lambda model: SGD(torch.nn.Linear(3, 3).parameters(), lr=0.1))

    with pytest.raises(TaskError, match="'sgd' holds no parameter of the model"):
        make_trainer(task)


def test_a_parameter_belongs_to_one_optimizer(make_trainer, make_task):
    """Two would each move it at every batch."""
    task = make_task(optimizer=lambda model: {"a": SGD(model.parameters(), lr=0.1),
                                              "b": Adam([model.bias], lr=0.1)})  # fmt: skip

    with pytest.raises(TaskError, match="'a' and 'b' share the parameter bias"):
        make_trainer(task)


def test_optimizers_that_divide_the_model_are_fine(make_trainer, make_task):
    """Control of both."""
    task = make_task(optimizer=lambda model: {"a": SGD([model.weight], lr=0.1),
                                              "b": Adam([model.bias], lr=0.1)})  # fmt: skip

    assert list(make_trainer(task).state.optimizers) == ["a", "b"]


def test_an_optimizer_that_needs_a_closure_gets_it(make_trainer, make_task, make_batches):
    """LBFGS as in a plain loop: the closure is called as often as its step wants."""
    (batch,) = make_batches(1)
    task = make_task(optimizer=lambda model: LBFGS(model.parameters()), train_dataloader=[batch])
    trainer = make_trainer(task, max_duration="3ep")
    model = torch.nn.Linear(3, 3)
    model.load_state_dict(trainer.state.model.state_dict())
    optimizer = LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    trainer.fit()

    expected, actual = (list(one.cpu().parameters()) for one in (model, trainer.state.model))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def only(*names):
    """Returns an optimizer of the parameters with these names."""
    return lambda model: SGD([dict(model.named_parameters())[name] for name in names], lr=0.1)


def test_the_notes_name_trainable_parameters_that_no_optimizer_has(make_trainer, make_task):
    """They keep their first values: a head that was forgotten looks like a model that learns badly."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    model[2].bias.requires_grad_(False)
    trainer = make_trainer(make_task(model=model, optimizer=only("0.weight")))

    (note,) = (note for note in trainer.notes if "in no optimizer" in note)

    assert "0.bias, 1.weight, 1.bias and 1 more (4 of 5 trainable parameters)" in note
    assert "2.bias" not in note


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: SGD(model.parameters(), lr=0.1),
        lambda model: {"a": SGD([model.weight], lr=0.1), "b": Adam([model.bias], lr=0.1)},
        lambda model: SGD([model.requires_grad_(False).weight, model.bias], lr=0.1),
    ],
    ids=["one", "two", "frozen"],
)
def test_nothing_is_noted_where_each_trainable_parameter_has_an_optimizer(
    optimizer, make_trainer, make_task
):
    """Each of several optimizers counts, and what is frozen needs none."""
    trainer = make_trainer(make_task(optimizer=optimizer))

    assert not any("in no optimizer" in note for note in trainer.notes)


def test_parameters_of_a_loss_are_noted_too(make_trainer, make_task):
    """A learnable temperature isn't part of the model, so `model.parameters()` leaves it out."""

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, outputs, targets):
            return torch.nn.functional.cross_entropy(outputs * self.scale, targets)

    trainer = make_trainer(make_task(loss=Scaled()))

    assert any("loss.scale (1 of 3 trainable parameters)" in note for note in trainer.notes)
