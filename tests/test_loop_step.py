"""One step: what the State holds, which optimizers move, what a closure repeats."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from eventloop.errors import PluginError


def test_the_state_holds_what_each_event_promises(make_trainer, make_plugin):
    """The contracts name it, and plugins read it there."""
    held = {}

    def note(state):
        names = ("batch", "microbatch", "outputs", "loss")
        return [name for name in names if getattr(state, name) is not None]

    hooks = ("before_dataloader", "after_dataloader", "before_forward", "after_forward",
             "before_loss", "after_loss", "after_backward", "after_train_batch", "batch_end",
             "batch_checkpoint")  # fmt: skip

    def noting(hook):
        return lambda state: held.update({hook: note(state)})

    watch = make_plugin(**{hook: noting(hook) for hook in hooks})

    make_trainer(callbacks=[watch]).fit()

    assert held == {
        "before_dataloader": [],
        "after_dataloader": ["batch"],
        "before_forward": ["batch", "microbatch"],
        "after_forward": ["batch", "microbatch", "outputs"],
        "before_loss": ["batch", "microbatch", "outputs"],
        "after_loss": ["batch", "microbatch", "outputs", "loss"],
        "after_backward": ["batch", "microbatch", "outputs", "loss"],
        "after_train_batch": ["batch", "loss"],
        "batch_end": ["batch", "loss"],
        "batch_checkpoint": [],
    }


def test_the_loss_of_the_batch_is_the_weighted_mean(make_trainer, make_plugin):
    """Three samples and one: the mean over four, without a graph."""
    losses, expected = [], []
    watch = make_plugin(
        batch_start=lambda state: expected.append(
            cross_entropy(state.model(state.inputs), state.targets)
        ),
        batch_end=lambda state: losses.append(state.loss),
    )

    make_trainer(callbacks=[watch], microbatch_size=3).fit()

    torch.testing.assert_close(torch.stack(losses), torch.stack(expected).detach())
    assert not any(loss.requires_grad for loss in losses)


def test_a_given_weight_replaces_the_number_of_samples(make_trainer, make_task, make_plugin):
    """Tokens that count differ from sample to sample; the mean is over what counts."""
    mean_losses = []
    task = make_task(
        loss=lambda outputs, targets: outputs.sum() * 0 + targets.float().mean(),
        train_dataloader=[(torch.randn(4, 3), torch.tensor([0, 0, 0, 4]))],
        loss_weight=lambda targets: targets.sum() + 1,
    )
    watch = make_plugin(batch_end=lambda state: mean_losses.append(state.loss))

    make_trainer(task, callbacks=[watch], microbatch_size=2).fit()

    torch.testing.assert_close(mean_losses[0].cpu(), torch.tensor((0 * 1 + 2 * 5) / 6))


def test_what_an_algorithm_puts_into_the_state_is_trained_on(
    make_trainer, make_plugin, make_batches
):
    """Augmentation, label smoothing and penalties write there."""
    seen = []
    zeros = make_plugin(before_forward=lambda state: setattr(state, "inputs", state.inputs * 0))
    watch = make_plugin("watch", after_forward=lambda state: seen.append(state.outputs))
    trainer = make_trainer(algorithms=[zeros], callbacks=[watch])
    bias = trainer.state.model.bias.clone()

    trainer.fit(until="1ba")

    assert torch.equal(seen[0], bias.expand(4, 3))


def test_a_penalty_added_to_the_loss_reaches_the_gradient(make_trainer, make_plugin):
    """`after_loss` may replace the loss; backward uses what stands there."""

    def penalise(state):
        state.loss = state.loss * 0 + state.model.bias.sum()

    trainer = make_trainer(algorithms=[make_plugin(after_loss=penalise)])
    before = trainer.state.model.bias.detach().clone()

    trainer.fit(until="1ba")

    torch.testing.assert_close(trainer.state.model.bias.detach(), before - 0.1)


def two_optimizers(model):
    return {"body": torch.optim.SGD(model[0].parameters(), lr=0.1),
            "head": torch.optim.SGD(model[1].parameters(), lr=0.2)}  # fmt: skip


def test_several_optimizers_step_together(make_trainer, make_task, make_plugin):
    """One batch, all parameters: as one optimizer with two groups."""
    rates = {}
    task = make_task(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)),
        optimizer=two_optimizers,
        scheduler={"head": lambda one: torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5)},
    )
    watch = make_plugin(log=lambda numbers: rates.update(numbers))
    trainer = make_trainer(task, callbacks=[watch])
    before = [param.clone() for param in trainer.state.model.parameters()]

    trainer.fit()

    pairs = zip(before, trainer.state.model.parameters(), strict=True)
    assert not any(torch.equal(old, new) for old, new in pairs)
    assert (rates["lr/body"], rates["lr/head"]) == (0.1, 0.05)


def test_the_closure_repeats_without_events(make_trainer, make_plugin, make_recorder):
    """A microbatch happens once for whoever counts; a closure is the optimizer's own business."""
    calls = []

    def optimizer_step(state, optimizers, closure):
        calls.extend([closure(), closure(), state.loss])
        grads.append([param.grad.clone() for param in state.model.parameters()])
        return True

    grads = []
    recorder = make_recorder(["before_forward", "after_loss", "after_backward",
                              "after_train_batch"])  # fmt: skip
    stepper = make_plugin(
        optimizer_step=optimizer_step,
        after_train_batch=lambda state: grads.append(
            [param.grad.clone() for param in state.model.parameters()]
        ),
    )

    make_trainer(algorithms=[recorder, stepper], microbatch_size=2).fit(until="1ba")

    microbatch = ["before_forward", "after_loss", "after_backward"]
    assert recorder.seen == [*microbatch * 2, "after_train_batch"]
    assert calls[0] == calls[1] == calls[2]
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


def test_an_owner_that_returns_nothing_is_named(make_trainer, make_plugin):
    """A step that maybe happened is worse than none."""
    owner = make_plugin("forgetful", optimizer_step=lambda state, optimizers, closure: None)

    with pytest.raises(PluginError, match=r"optimizer_step returned nothing[\s\S]*forgetful"):
        make_trainer(algorithms=[owner]).fit()


def test_clipped_norms_are_logged_as_they_were_before_clipping(make_trainer, make_plugin):
    """Whoever watches wants to see what was clipped."""
    norms = []
    watch = make_plugin(log=lambda numbers: norms.append(numbers["train/grad_norm"]))

    make_trainer(callbacks=[watch], clip_norm=1e-3).fit()

    assert len(norms) == 3
    assert min(norms) > 1e-3
