"""Groups of parameters by pattern, frozen parts, and parts that thaw at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from eventloop import TaskError, hookimpl
from eventloop_finetune import Unfreeze, freeze, param_groups
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task


def network():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def names_of(model, groups):
    names = {id(one): name for name, one in model.named_parameters()}
    return [[names[id(one)] for one in group["params"]] for group in groups]


def test_later_patterns_win_and_equal_options_are_one_group():
    """In the order of the model's parameters; what no pattern names has the optimizer's options."""
    model = network()

    groups = param_groups(
        model, {"0": {"lr": 1e-5}, "2.*": {"lr": 1e-4}, "*.bias": {"weight_decay": 0.0}}
    )

    options = [{key: one for key, one in group.items() if key != "params"} for group in groups]
    assert names_of(model, groups) == [
        ["0.weight"], ["0.bias"], ["2.weight"], ["2.bias"], ["4.weight"], ["4.bias"]
    ]  # fmt: skip
    assert options == [
        {"lr": 1e-5}, {"lr": 1e-5, "weight_decay": 0.0}, {"lr": 1e-4},
        {"lr": 1e-4, "weight_decay": 0.0}, {}, {"weight_decay": 0.0},
    ]  # fmt: skip
    assert names_of(model, param_groups(model, {"?.weight": {"lr": 1.0}})) == [
        ["0.weight", "2.weight", "4.weight"],
        ["0.bias", "2.bias", "4.bias"],
    ]
    AdamW(groups, lr=1e-3)


def test_frozen_parameters_are_in_no_group():
    """They would only weigh on the checkpoint."""
    model = network()

    assert freeze(model, "0", "2.bias") == ["0.weight", "0.bias", "2.bias"]
    assert names_of(model, param_groups(model, {"2": {"lr": 0.1}})) == [
        ["2.weight"], ["4.weight", "4.bias"]
    ]  # fmt: skip


@pytest.mark.parametrize("call", [lambda m: param_groups(m, {"0.wieght": {}}),
                                  lambda m: freeze(m, "0.wieght")])  # fmt: skip
def test_a_pattern_that_matches_nothing_is_refused(call):
    """A misspelt one would train what should stay, or the other way round."""
    with pytest.raises(ValueError, match=r"'0.wieght' matches no parameter.*closest is '0.weight'"):
        call(network())


class Watch:
    """Keeps the weights after each batch."""

    name = "watch"

    def __init__(self):
        self.seen = {}

    @hookimpl
    def after_load(self, state):
        self.batch_end(state)

    @hookimpl
    def batch_end(self, state):
        named = state.model.named_parameters()
        self.seen[state.clock.batch] = {name: one.detach().clone() for name, one in named}


def fit(folder, *untils, until=None, **given):
    """Trains 9 batches, with a process for each part; returns the weights after each batch."""
    watch = Watch()
    for stop in untils or (None,):
        task = tiny_task(
            model=network,
            train_dataloader=tiny_batches(3, 8),
            optimizer=lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
            eval_dataloaders=None,
            metrics=None,
        )
        settings = {"max_duration": "9ba", "checkpoint_interval": "1ba", "clip_norm": 1.0} | given
        plugins = [Unfreeze(until or {"0": "4ba", "2.*": "1dur"})]
        with isolated_trainer(
            folder, task, algorithms=plugins, callbacks=[watch], **settings
        ) as trainer:
            trainer.fit(until=stop)
    return watch.seen


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_parts_stay_as_they_are_until_their_time(tmp_path, microbatch_size):
    """The first layer for four batches, the second one for good; the head never."""
    seen = fit(tmp_path, microbatch_size=microbatch_size)

    for batch in range(1, 10):
        moved = {name for name in seen[0] if not seen[batch][name].equal(seen[batch - 1][name])}
        assert moved == {"4.weight", "4.bias"} | ({"0.weight", "0.bias"} if batch > 4 else set())


def test_a_run_that_was_stopped_thaws_when_it_would_have(tmp_path):
    """What is frozen follows from the clock, not from a state."""
    whole = fit(tmp_path / "whole")

    stopped = fit(tmp_path / "stopped", "2ba", "4ba", "6ba", None)

    assert all(torch.equal(stopped[9][name], one) for name, one in whole[9].items())


def test_two_ranks_thaw_as_one_process_does(tmp_path):
    """Gradients are exchanged as they were when the model was wrapped, and dropped."""
    one, other = run_ranks(fit, tmp_path)

    for batch in range(1, 10):
        moved = {name for name in one[0] if not one[batch][name].equal(one[batch - 1][name])}
        assert moved == {"4.weight", "4.bias"} | ({"0.weight", "0.bias"} if batch > 4 else set())
    assert all(torch.equal(one[9][name], other[9][name]) for name in one[9])


def test_a_part_that_is_not_there_is_refused_when_the_trainer_is_built(tmp_path):
    """With the name that was meant."""
    with pytest.raises(TaskError, match="unfreeze: 'backbone' matches no parameter of the model"):
        fit(tmp_path, until={"backbone": "1ep"})
    with pytest.raises(ValueError, match="'soon' is not a time"):
        Unfreeze({"0": "soon"})


@pytest.mark.nightly
@pytest.mark.parametrize("stops", [("2ba",), ("4ba",), ("2ba", "6ba")])
@pytest.mark.parametrize("microbatch_size", [None, 1])
def test_ranks_that_were_stopped_thaw_when_they_would_have(tmp_path, stops, microbatch_size):
    """Other processes go on: before the time, at it and after it."""
    given = {"microbatch_size": microbatch_size}
    whole, _ = run_ranks(fit, tmp_path / "whole", **given)

    for stop in stops:
        run_ranks(fit, tmp_path / "stopped", stop, **given)
    one, other = run_ranks(fit, tmp_path / "stopped", None, **given)

    assert one[9]["0.weight"].ne(whole[0]["0.weight"]).any()
    for name, weight in whole[9].items():
        assert torch.equal(one[9][name], weight)
        assert torch.equal(other[9][name], weight)
    assert one[9]["2.weight"].equal(whole[0]["2.weight"])
