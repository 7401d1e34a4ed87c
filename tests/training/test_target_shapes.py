"""Shapes that torch broadcasts without a word: an error in a loss or metric of one's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.optim import SGD

from eventloop import Task, TaskError, hookimpl
from eventloop_testing import run_ranks

TARGETS = torch.tensor([0.0, 1.0, 0.0, 1.0])
PAIRS = [(torch.ones(4, 3), TARGETS)] * 2


def squared(outputs, targets):
    return ((outputs - targets) ** 2).mean()


def pinball(outputs, targets):
    error = targets.float() * 1.0 - outputs / 1.0
    return torch.maximum(0.1 * error, -0.9 * error).mean()


def weighted(outputs, targets):
    return (torch.sigmoid(outputs).mul(targets)).sum()


WRONG = (
    squared,
    pinball,
    weighted,
    lambda outputs, targets: (outputs == targets).float().mean() + outputs.mean(),
    lambda outputs, targets: torch.sub(targets, other=outputs).abs().mean(),
)


def task(loss, pairs=PAIRS, **given):
    return Task(
        model=lambda: nn.Linear(3, 1),
        loss=loss,
        train_dataloader=pairs,
        optimizer=lambda model: SGD(model.parameters(), lr=0.1),
        **given,
    )


@pytest.mark.parametrize("loss", WRONG)
def test_a_loss_of_ones_own_is_watched_at_its_first_batch(make_trainer, loss):
    """(4, 1) against (4,) is a mean over 16 pairs, 12 of them of different samples."""
    with pytest.raises(TaskError, match=r"the loss received shapes.*became \(4, 4\)[\s\S]*squeeze"):
        make_trainer(task(loss)).fit()


def test_so_is_a_metric_of_ones_own(make_trainer):
    """Its mean would be as wrong, and the loss right."""
    made = task(
        lambda outputs, targets: squared(outputs.squeeze(1), targets),
        eval_dataloaders=PAIRS,
        metrics={"error": lambda outputs, targets: (outputs - targets).abs().mean()},
    )

    with pytest.raises(TaskError, match=r"metric 'error' received shapes"):
        make_trainer(made).fit()


@pytest.mark.parametrize("may", [False, True])
def test_a_task_of_hooks_may_say_that_its_loss_broadcasts(make_trainer, may):
    """Torch warns, as the user's filters say; else it is an error."""

    class Broadcasts:
        loss_may_broadcast = may
        build_model = hookimpl(lambda self, state: nn.Linear(3, 1).to(state.device))
        build_optimizers = hookimpl(
            lambda self, state: {"sgd": SGD(state.model.parameters(), lr=0.1)}
        )
        build_train_dataloader = hookimpl(lambda self, state: PAIRS)
        forward = hookimpl(lambda self, state: state.active_model(state.batch[0]))
        loss = hookimpl(lambda self, state: mse_loss(state.outputs, state.batch[1]))

    kind, words = (UserWarning, "Using a target size") if may else (TaskError, "squeeze")
    with pytest.raises(kind, match=words):  # pytest's filter makes an error of it
        make_trainer(Broadcasts()).fit()


def ranked(outputs, targets):
    """Compares all outputs with each other, and all targets: of one origin."""
    outputs = outputs.squeeze(1)
    higher = targets.unsqueeze(1) > targets
    return ((outputs.unsqueeze(1) - outputs) * higher).square().mean()


RIGHT = (
    lambda outputs, targets: squared(outputs.squeeze(1), targets),
    lambda outputs, targets: squared(outputs[:, 0], targets),
    lambda outputs, targets: squared(outputs, targets.unsqueeze(1)),
    lambda outputs, targets: squared(*torch.broadcast_tensors(outputs, targets)),
    lambda outputs, targets: squared(outputs, targets[None]),
    lambda outputs, targets: squared(outputs.mean(), targets),
    lambda outputs, targets: squared(outputs, targets.mean()),
    lambda outputs, targets: binary_cross_entropy_with_logits(outputs.flatten(), targets),
    lambda outputs, targets: cross_entropy(outputs.expand(-1, 4), targets.long()),
    lambda outputs, targets: outputs.expand(-1, 4).gather(1, targets.long()[:, None]).mean(),
    lambda outputs, targets: outputs[targets.long()].mean(),
    lambda outputs, targets: (outputs * torch.ones(4).to(outputs.device)).mean() + targets.mean(),
    ranked,
)


@pytest.mark.parametrize("loss", RIGHT)
def test_what_is_written_on_purpose_passes(make_trainer, loss):
    """Shapes of as many dimensions, one number against many, and pairs of one origin."""
    make_trainer(task(loss)).fit()


def test_a_batch_of_one_sample_has_nothing_to_compare_with(make_trainer):
    """(1, 1) against (1,) is one number."""
    make_trainer(task(squared, [(torch.ones(1, 3), torch.zeros(1))])).fit()


def test_only_the_first_call_is_watched(make_trainer):
    """A step costs what it did: the function itself is called."""
    modes = []

    def loss(outputs, targets):
        modes.append(torch._C._len_torch_function_stack())
        return squared(outputs.squeeze(1), targets)

    make_trainer(task(loss, PAIRS * 2)).fit()

    assert modes == [1, 0, 0, 0]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # asked for by torch's compiler
def test_a_loss_with_weights_of_its_own_passes(make_trainer):
    """A module that learns its scale."""

    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, outputs, targets):
            return squared(outputs.squeeze(1) * self.scale, targets)

    make_trainer(task(Learned())).fit()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # asked for by torch's compiler
def test_a_loss_that_is_compiled_passes(make_trainer):
    """What torch compiles is called as it was."""
    compiled = torch.compile(RIGHT[0], backend="eager")

    make_trainer(task(compiled)).fit()


def test_two_ranks_are_told_alike(make_trainer):
    """Each sees shapes of its own part."""

    def train():
        with pytest.raises(TaskError, match=r"became \(4, 4\)"):
            make_trainer(task(squared)).fit()
        return True

    assert run_ranks(train) == [True, True]
