"""A companion: a second model that only computes."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from eventloop import Allowed, EventloopError, PluginError, hookimpl
from eventloop_testing import isolated_trainer, run_ranks, tiny_task


def reference(value=0.5):
    model = nn.Sequential(nn.Dropout(), nn.Linear(3, 3), nn.BatchNorm1d(3))
    nn.init.constant_(model[1].weight, value)
    nn.init.zeros_(model[1].bias)
    return model


@pytest.fixture
def with_companion(make_plugin):
    """Makes an algorithm that has a companion, and adds its mean output to the loss."""

    def make(build=reference, hook="init"):
        made = []

        def loss(state):
            value = yield
            return value + made[0](state.inputs).mean() * state.outputs.mean()

        plugin = make_plugin(
            "refers", **{hook: lambda state: made.append(state.companion("base", build))}
        )
        type(plugin).loss = staticmethod(hookimpl(wrapper=True)(loss))
        plugin.made = made
        return plugin

    return make


def test_a_companion_is_frozen_and_belongs_to_nothing_else(make_trainer, with_companion):
    """Neither in the model, nor an optimizer, nor a checkpoint; and evaluation mode from the start."""
    plugin = with_companion()
    trainer = make_trainer(algorithms=[plugin])
    trainer.fit()
    (companion,) = plugin.made
    own = {id(one) for one in companion.parameters()}
    groups = trainer.state.optimizers["sgd"].param_groups

    assert not companion.training
    assert not companion[0].training
    assert not any(one.requires_grad for one in companion.parameters())
    assert all(one.grad is None for one in companion.parameters())
    assert not own & {id(one) for group in groups for one in group["params"]}
    assert trainer.state.model.state_dict().keys() == {"weight", "bias"}
    assert trainer.state.capture().parts["model"].keys() == {"weight", "bias"}
    torch.testing.assert_close(
        companion.cpu().state_dict(), reference().state_dict(), rtol=0, atol=0
    )


def test_a_companion_draws_no_random_numbers_of_others(make_trainer, make_plugin):
    """The model's dropout and the order of samples must not depend on a reference."""
    plain = make_trainer()

    def init(state):
        state.companion("base", lambda: nn.Linear(3, 3))

    made = make_plugin(init=init)
    before = torch.get_rng_state()
    trainer = make_trainer(algorithms=[made])

    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(trainer.state.model.weight, plain.state.model.weight)


def fit(folder, plugin, **given):
    with isolated_trainer(
        folder, tiny_task(), algorithms=[plugin], checkpoint_interval="1ba", **given
    ) as trainer:
        trainer.fit()
        return [*trainer.state.model.parameters()]


def test_a_run_goes_on_with_the_same_companion_only(tmp_path, with_companion, make_plugin):
    """Its weights are in no checkpoint, so that a digest has to prove that they are the same."""
    expected = fit(tmp_path / "one", with_companion(), max_duration="2ep")
    fit(tmp_path / "two", with_companion(), max_duration="1ep")
    longer = {"max_duration": "2ep", "allowed": Allowed(config_change=True)}

    with pytest.raises(EventloopError, match=r"companions\.base: weights \w{16} -> weights \w{16}"):
        fit(tmp_path / "two", with_companion(lambda: reference(0.7)), max_duration="1ep")
    with pytest.raises(EventloopError, match=r"companions\.base: weights \w{16} -> none"):
        fit(tmp_path / "two", make_plugin("refers"))
    actual = fit(tmp_path / "two", with_companion(), **longer)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("are_alike", [True, False])
def test_two_ranks_have_the_same_companion(tmp_path, with_companion, are_alike):
    """Weights that differ would go unseen: each rank would learn from another."""

    def train():
        rank = 0 if are_alike else int(os.environ["RANK"])
        plugin = with_companion(lambda: reference(rank + 0.5))
        try:
            fit(tmp_path / "run", plugin)
        except PluginError as error:
            return str(error)
        return plugin.made[0].state_dict()

    first, second = run_ranks(train)

    if are_alike:
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    else:
        assert "the companion 'base' has other weights on each rank" in first
        assert first == second


WRONG = {
    "a copy": lambda state: state.companion("base", lambda: nn.Sequential(state.model)),
    "an nn.Module": lambda state: state.companion("base", lambda: 3),
    "is a Sequential, not a function that builds it": lambda state: state.companion(
        "base", reference()
    ),
    "is a str, not a function that builds it": lambda state: state.companion(state.model, "base"),
    "exists already": lambda state: [state.companion("base", reference) for _ in range(2)],
}


@pytest.mark.parametrize("shown", WRONG)
def test_what_is_not_a_companion_is_refused(shown, make_trainer, make_plugin):
    """Each before the first batch, with what to do."""
    with pytest.raises(PluginError, match=shown):
        make_trainer(algorithms=[make_plugin(init=WRONG[shown])])


def test_a_companion_that_comes_too_late_is_refused(make_trainer, with_companion):
    """A resumed run couldn't compare it."""
    with pytest.raises(PluginError, match="requested after the run was built"):
        make_trainer(algorithms=[with_companion(hook="after_load")])
