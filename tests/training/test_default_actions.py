"""The core's answers to actions: forward, loss, clipping, and steps that ask a closure."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from eventloop import hookimpl
from eventloop.errors import TaskError


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_lbfgs_trains_with_the_closure(microbatch_size, make_trainer, make_task, make_plugin):
    """It needs the loss several times a step; each time is the whole batch's."""
    losses = []

    def optimizer_step(state, optimizers, closure):
        losses.append(float(optimizers["lbfgs"].step(closure)))
        losses.append(float(closure()))
        return True

    task = make_task(optimizer=lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5))
    trainer = make_trainer(task, algorithms=[make_plugin(optimizer_step=optimizer_step)],
                           microbatch_size=microbatch_size)  # fmt: skip

    trainer.fit(until="1ba")

    assert losses[1] < losses[0] / 4


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_lbfgs_makes_no_pass_that_its_closure_does_not_ask_for(
    microbatch_size, make_trainer, make_task, make_batches
):
    """Its first question is of weights that haven't moved, whose loss and gradients are there."""
    num_passes = []

    def forward(model, inputs):
        if model.training:  # else the loss of halves is compared with that of the whole
            num_passes.append(len(inputs))
        return model(inputs)

    def optimizer(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    task = make_task(model=lambda: nn.Linear(3, 3), optimizer=optimizer, forward=forward)
    trainer = make_trainer(task, microbatch_size=microbatch_size)
    plain = copy.deepcopy(trainer.state.model)
    lbfgs, asked = optimizer(plain), []

    trainer.fit()
    for batch in make_batches():
        inputs, targets = (one.to(trainer.state.device) for one in batch)

        def closure(inputs=inputs, targets=targets):
            asked.append(len(inputs))
            lbfgs.zero_grad()
            loss = cross_entropy(plain(inputs), targets)
            loss.backward()
            return loss

        lbfgs.step(closure)

    assert sum(num_passes) == sum(asked)
    for one, other in zip(trainer.state.model.parameters(), plain.parameters(), strict=True):
        # LBFGS divides by small differences: how a CPU adds up shows in the fourth digit.
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        assert microbatch_size or torch.equal(one, other)


def test_a_closure_is_asked_anew_once_weights_have_moved(make_trainer, make_task):
    """Of an optimizer that isn't torch's it isn't known whether they have: each question is a pass."""
    seen = []

    class Moves(torch.optim.SGD):
        def step(self, closure):
            with torch.no_grad():
                for group in self.param_groups:
                    for param in group["params"]:
                        param.mul_(2.0)
            seen.append(float(closure()))
            return super().step()

    trainer = make_trainer(make_task(optimizer=lambda model: Moves(model.parameters(), lr=0.1)))
    losses = []
    trainer.state.model.register_forward_hook(lambda *_: losses.append(1))

    trainer.fit(until="1ba")

    assert len(losses) == 2


def test_the_norm_is_summed_in_the_order_of_the_model(make_trainer, make_task):
    """Its last bits, and so those of the weights, are a plain loop's, however parameters are grouped."""
    torch.manual_seed(0)
    sizes = [3, 40, 50, 60, 3]
    layers = [nn.Linear(one, other) for one, other in itertools.pairwise(sizes)]
    kept = nn.Sequential(*layers)

    def trained(order):
        def optimizer(model):
            params = list(model.parameters())
            return torch.optim.SGD([{"params": [params[idx]]} for idx in order], lr=0.1)

        task = make_task(model=lambda: copy.deepcopy(kept), optimizer=optimizer)
        trainer = make_trainer(task, clip_norm=0.01, max_duration="3ep")
        trainer.fit()
        return torch.cat([one.flatten() for one in trainer.state.model.parameters()])

    num = len(list(kept.parameters()))
    expected = trained(range(num))

    for seed in range(5):
        order = torch.randperm(num, generator=torch.Generator().manual_seed(seed)).tolist()
        assert torch.equal(trained(order), expected)


def test_a_group_that_is_added_in_mid_run_is_clipped_too(make_trainer, make_task, make_plugin):
    """The order is found anew."""
    norms = []

    def add(state):
        if state.clock.batch == 1:
            optimizer = state.optimizers["sgd"]
            optimizer.add_param_group({"params": [state.model.bias]})
        norms.append(state.model.bias.detach().clone())

    def optimizer(model):
        return torch.optim.SGD([model.weight], lr=0.1)

    task = make_task(model=lambda: nn.Linear(3, 3), optimizer=optimizer)
    trainer = make_trainer(task, algorithms=[make_plugin(batch_start=add)], clip_norm=1e-6)

    trainer.fit()

    assert torch.equal(norms[0], norms[1])
    assert 0 < float((trainer.state.model.bias - norms[1]).detach().abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        (lambda outputs, targets: cross_entropy(outputs, targets, reduction="none"), r"\(4,\)"),
        (lambda outputs, targets: cross_entropy(outputs, targets).item(), "a float"),
    ],
)
def test_a_loss_that_is_no_scalar_tensor_is_refused(loss, shown, make_trainer, make_task):
    """What to do with four losses is the task's decision."""
    with pytest.raises(TaskError, match=f"the loss is not a scalar but {shown}"):
        make_trainer(make_task(loss=loss)).fit()


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_a_loss_of_one_entry_in_a_row_is_no_scalar_either(microbatch_size, make_trainer, make_task):
    """Shape (1,) is what a forgotten squeeze leaves."""
    task = make_task(loss=lambda outputs, targets: cross_entropy(outputs, targets).reshape(1))

    with pytest.raises(TaskError, match=r"not a scalar but \(1,\)"):
        make_trainer(task, microbatch_size=microbatch_size).fit()


@pytest.mark.parametrize("batch", [torch.zeros(4, 3), (torch.zeros(4, 3),) * 3, [torch.zeros(4)]])
def test_a_batch_that_is_no_pair_is_refused_by_the_default_forward(batch, make_trainer, make_task):
    """Which of three tensors the model wants is the task's knowledge."""
    trainer = make_trainer(make_task(train_dataloader=[batch]))

    with pytest.raises(TaskError, match=r"can't be split into inputs and targets[\s\S]*forward="):
        trainer.fit()


def test_a_task_without_a_loss_needs_a_model_that_has_one(make_trainer, make_task):
    """The message names both ways."""
    with pytest.raises(
        TaskError, match=r"no loss, and the model's \w*Tensor has no .loss[\s\S]*loss="
    ):
        make_trainer(make_task(loss=None)).fit()


class Around:
    """Looks at the outputs when the backward pass is done."""

    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def backward(self, state):
        done = yield
        self.seen.append(state.outputs.shape)
        return done


@pytest.fixture
def outputs_kept(make_trainer, make_task):
    """Trains on three batches; gives whether the outputs were there while gradients were computed."""

    def outputs_kept(*algorithms):
        kept = []

        def loss(outputs, targets):
            outputs.register_hook(lambda _: kept.append(trainer.state.outputs is not None))
            return cross_entropy(outputs, targets)

        trainer = make_trainer(make_task(loss=loss), algorithms=algorithms)
        trainer.fit()
        return kept

    return outputs_kept


def test_outputs_are_dropped_before_the_backward_pass(outputs_kept, make_plugin):
    """Large ones, a language model's logits; a plugin that acts before the loss or after the batch needs none."""
    seen = []
    early = make_plugin("early", after_forward=lambda state: seen.append(state.outputs.shape))
    late = make_plugin("late", after_train_batch=lambda state: seen.append(state.outputs))

    assert outputs_kept() == outputs_kept(early, late) == [False] * 3
    assert seen == [(4, 3), None] * 3


@pytest.mark.parametrize("hook", ["before_loss", "after_loss", "before_backward", "after_backward"])
def test_a_plugin_of_the_loss_or_the_backward_pass_has_the_outputs(hook, outputs_kept, make_plugin):
    """It may have hung a hook on a tensor, which reads them in the backward pass."""
    seen = []
    plugin = make_plugin(**{hook: lambda state: seen.append(state.outputs.shape)})

    assert outputs_kept(plugin) == [True] * 3
    assert seen == [(4, 3)] * 3


def test_a_wrapper_of_the_backward_pass_has_the_outputs_after_it(outputs_kept):
    """As before the pass."""
    around = Around()

    assert outputs_kept(around) == [True] * 3
    assert around.seen == [(4, 3)] * 3
