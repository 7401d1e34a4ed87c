"""The document's own examples, word for word, against loops written by hand."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR

from eventloop_orca import Callback, MainCallBack, MainCallback, Orca
from eventloop_testing import isolated_trainer, tiny_batches, tiny_task


class CustomMainCB(MainCallBack):
    def on_iter_forward(self, runner):
        # Forward features
        image, target = runner.batch
        runner.output = runner.model(image, target)
        # Compute loss
        runner.loss = sum(loss for loss in runner.output.values())


class DocumentsMain(MainCallback):
    def on_iter_forward(self, runner):
        inputs, targets = runner.batch
        runner.outputs = runner.model(inputs)
        inputs, targets = runner.batch
        runner.loss = runner.criterion(runner.outputs, targets)

    def on_iter_backward(self, runner):
        runner.optimizer.zero_grad()
        runner.loss.backward()
        runner.optimizer.step()

    def on_lr_adjust(self, runner):
        if runner.lr_scheduler is not None:
            runner.lr_scheduler.step()

    def on_train_forward(self, runner):  # By default it will call on_iter_forward.
        self.on_iter_forward(runner)

    def on_val_forward(self, runner):  # By default it will call on_iter_forward.
        self.on_iter_forward(runner)


class Adversarial(MainCallback):
    """Trains on the batch and on itself moved along the sign of its gradient: two forwards."""

    def on_iter_backward(self, runner):
        inputs, target = runner.batch
        runner.optimizer.zero_grad()
        runner.loss.backward(retain_graph=True)
        (gradient,) = torch.autograd.grad(runner.loss, inputs)
        moved = inputs.detach() + 0.1 * gradient.sign()
        runner.criterion(runner.model(moved), target).backward()
        runner.optimizer.step()

    def before_train_iter(self, runner):
        inputs, target = runner.batch
        runner.batch = inputs.detach().requires_grad_(), target


class AdversarialForward(MainCallback):
    """The same as a mean of two losses, all in the forward pass; eventloop makes the step."""

    def on_train_forward(self, runner):
        inputs, target = runner.batch
        inputs = inputs.detach().requires_grad_()
        loss = runner.criterion(runner.model(inputs), target)
        (gradient,) = torch.autograd.grad(loss, inputs, retain_graph=True)
        runner.output = runner.model(inputs.detach() + 0.1 * gradient.sign())
        runner.loss = (loss + runner.criterion(runner.output, target)) / 2


class Plain(Callback):
    """Clips the weights, and cools the rate down, where a plain loop would."""

    def after_train_iter(self, runner):
        assert runner.loss.ndim == 0
        with torch.no_grad():
            for param in runner.model.parameters():
                param.clamp_(-0.3, 0.3)

    def before_epoch(self, runner):
        if runner.epochs == 1 and runner.model.training:
            runner.optimizer.param_groups[0]["lr"] /= 2


class Detector(nn.Module):
    """Gives its losses by name, as detectors do in training."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, image, target):
        features = self.body(image).relu()
        return {"cls": cross_entropy(self.head(features), target), "reg": features.pow(2).mean()}


def make_net():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def orca_weights(folder, *callbacks, model=make_net, scheduler=True, **given):
    """Trains 3 epochs of 3 batches."""
    if scheduler:
        given |= {"scheduler": lambda optimizer: StepLR(optimizer, 1, 0.5)}
        given |= {"scheduler_interval": "ep"}
    task = tiny_task(
        model=model,
        optimizer=make_optimizer,
        metrics={},
        **given,
    )
    orca = Orca(callbacks=list(callbacks))
    with isolated_trainer(folder, task, algorithms=[orca], max_duration="3ep") as trainer:
        trainer.fit()
        return [param.detach().cpu().clone() for param in trainer.state.model.parameters()]


def plain_weights(step, *, model=make_net, scheduler=True, after_epoch=lambda *_: None):
    """Trains as a loop without eventloop: `step(model, optimizer, inputs, target)` does the rest."""
    torch.manual_seed(0)
    net = model()
    optimizer = make_optimizer(net)
    schedule = StepLR(optimizer, 1, 0.5) if scheduler else None
    for epoch in range(3):
        for inputs, target in tiny_batches():
            step(net, optimizer, inputs.clone(), target)
        if schedule is not None:
            schedule.step()
        after_epoch(epoch, optimizer)
    return list(net.parameters())


def step_on(loss_of):
    def step(net, optimizer, inputs, target):
        optimizer.zero_grad()
        loss_of(net, inputs, target).backward()
        optimizer.step()

    return step


def plain_loss(net, inputs, target):
    return cross_entropy(net(inputs), target)


def detector_loss(net, inputs, target):
    return sum(net(inputs, target).values())


def moved(net, inputs, loss):
    (gradient,) = torch.autograd.grad(loss, inputs, retain_graph=True)
    return inputs.detach() + 0.1 * gradient.sign()


def adversarial_step(net, optimizer, inputs, target):
    optimizer.zero_grad()
    inputs.requires_grad_()
    loss = cross_entropy(net(inputs), target)
    loss.backward(retain_graph=True)
    cross_entropy(net(moved(net, inputs, loss)), target).backward()
    optimizer.step()


def adversarial_loss(net, inputs, target):
    inputs.requires_grad_()
    loss = cross_entropy(net(inputs), target)
    return (loss + cross_entropy(net(moved(net, inputs, loss)), target)) / 2


def clipping_step(net, optimizer, inputs, target):
    step_on(plain_loss)(net, optimizer, inputs, target)
    with torch.no_grad():
        for param in net.parameters():
            param.clamp_(-0.3, 0.3)


def cool_down(epoch, optimizer):
    if epoch == 0:
        optimizer.param_groups[0]["lr"] /= 2


CASES = {
    "documents-main": (DocumentsMain, step_on(plain_loss), {}, {}),
    "default-main": (MainCallback, step_on(plain_loss), {}, {}),
    "custom-main": (
        CustomMainCB,
        step_on(detector_loss),
        {"model": Detector, "eval_dataloaders": None},
        {"model": Detector},
    ),
    "adversarial": (Adversarial, adversarial_step, {}, {}),
    "adversarial-forward": (AdversarialForward, step_on(adversarial_loss), {}, {}),
    "plain-callback": (
        Plain,
        clipping_step,
        {"scheduler": False},
        {"scheduler": False, "after_epoch": cool_down},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_example_gives_the_weights_of_a_plain_loop(name, tmp_path):
    """Bit by bit: an adapter that computes something else would be of no use."""
    callback, step, orca_given, plain_given = CASES[name]

    actual = orca_weights(tmp_path, callback(), **orca_given)

    expected = plain_weights(step, **plain_given)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_the_adversarial_step_is_another_one(tmp_path):
    """Control: the second forward pass matters, and the comparison sees it."""
    actual = orca_weights(tmp_path, Adversarial())

    expected = plain_weights(step_on(plain_loss))
    assert not torch.equal(actual[0], expected[0])
