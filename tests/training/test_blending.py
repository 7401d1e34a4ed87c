"""Second targets, and the loss of both."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from eventloop import PluginError, TaskError, hookimpl
from eventloop.toolbox import SecondTargets, blended
from eventloop_testing import tiny_batches, tiny_task


class Backwards:
    """Takes a quarter of each sample for the one at the other end of the batch."""

    name = "backwards"

    def __init__(self):
        self.second = SecondTargets("backwards")

    @hookimpl
    def before_train_batch(self, state):
        self.second.give(state.targets.flip(0), 0.75)

    @hookimpl(wrapper=True)
    def train_batch(self, state):
        return (yield from self.second.train_batch(state))

    @hookimpl(wrapper=True)
    def split_batch(self, state):
        return (yield from self.second.split_batch(state))

    @hookimpl(wrapper=True)
    def loss(self, state):
        return (yield from self.second.loss(state))


def weights(trainer):
    trainer.fit()
    return torch.cat([one.detach().flatten() for one in trainer.state.model.parameters()])


def test_blended_losses_equal_the_loss_of_blended_one_hot_targets():
    """Cross-entropy is linear in its targets, which is why class indices suffice."""
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets, others = torch.tensor([0, 1, 2, 0]), torch.tensor([1, 1, 0, 2])
    soft = 0.7 * one_hot(targets, 3).double() + 0.3 * one_hot(others, 3).double()

    loss = blended(cross_entropy(logits, targets), cross_entropy(logits, others), 0.7)

    torch.testing.assert_close(loss, cross_entropy(logits, soft))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [None, 1, 3])
def test_a_run_ends_as_one_with_soft_targets(make_trainer, size):
    """Wherever the batch is cut, each sample keeps its second target."""
    soft = [
        (inputs, 0.75 * one_hot(targets, 3) + 0.25 * one_hot(targets.flip(0), 3))
        for inputs, targets in tiny_batches()
    ]
    task = tiny_task(train_dataloader=soft)
    expected = weights(make_trainer(task))

    actual = weights(make_trainer(tiny_task(), algorithms=[Backwards()], microbatch_size=size))

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(weights(make_trainer(tiny_task())), expected, atol=1e-4)


def test_they_are_forgotten_with_their_batch(make_trainer):
    """A loss between batches is nobody's blend."""
    plugin = Backwards()

    weights(make_trainer(tiny_task(), algorithms=[plugin]))

    assert not plugin.second.are_given


def test_a_loss_outside_of_the_passes_stays_as_it_is(make_trainer):
    """Who looks at a whole batch sees the targets that it has."""
    seen = []

    class Looks:
        name = "looks"

        @hookimpl(after="backwards")
        def before_train_batch(self, state):
            state.outputs = state.call("forward")
            seen.append((state.call("loss"), cross_entropy(state.outputs, state.targets)))

    make_trainer(tiny_task(), algorithms=[Backwards(), Looks()]).fit()

    assert len(seen) == 3
    assert all(torch.equal(found, expected) for found, expected in seen)


class WithLoss(torch.nn.Linear):
    def forward(self, inputs):
        logits = super().forward(inputs)
        return {"logits": logits, "loss": logits.square().mean()}


def test_a_loss_that_never_sees_targets_is_an_error(make_trainer):
    """Both halves would be the same, in silence; the message says whose second targets they are."""
    task = tiny_task(model=lambda: WithLoss(3, 3), loss=None)

    with pytest.raises(TaskError, match="backwards needs a loss of outputs") as raised:
        make_trainer(task, algorithms=[Backwards()]).fit()
    assert 'disable = ["backwards"]' in str(raised.value)


class MayPass:
    """Owns `train_batch` now and then, and computes its loss by itself."""

    name = "may-pass"

    @hookimpl(conditional=True)
    def train_batch(self, state):
        if state.clock.batch < 2:
            return None
        return state.update(lambda state: state.model(state.inputs).mean())


def test_a_batch_whose_loss_nobody_asks_for_is_an_error(make_trainer):
    """Who owns `train_batch` for some batches alone isn't known before."""
    trainer = make_trainer(tiny_task(), algorithms=[Backwards(), MayPass()])

    with pytest.raises(TaskError, match="train_batch asked for none"):
        trainer.fit()
    assert trainer.state.clock.batch == 2


class StandsOff(Backwards):
    """Says, as a plugin should, where it can't be used."""

    @hookimpl
    def unsuitable(self, state):
        return self.second.unsuitable(state)


class Compares:
    """Makes the loss one over all samples of a batch."""

    name = "compares"
    loss_splits = False

    @hookimpl
    def batch_end(self, state):
        pass


@pytest.mark.parametrize(
    ("plugins", "loss_splits", "reason"),
    [
        ([Compares()], True, "samples of a batch: compares has loss_splits=False"),
        ([], False, "split_batch is task's: the loss may be one over pairs of samples"),
    ],
    ids=["plugin", "task"],
)
def test_they_stand_off_where_the_loss_compares_samples(make_trainer, plugins, loss_splits, reason):
    """Such a loss is computed once for the whole batch, or has no targets: half of it would be wrong."""
    task = tiny_task(loss_splits=loss_splits)

    with pytest.raises(PluginError, match=reason):
        make_trainer(task, algorithms=[StandsOff(), *plugins])
