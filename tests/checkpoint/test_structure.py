"""What a run changes of the structure it was built with is restored, or named at the first save."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from eventloop import hookimpl
from eventloop.checkpoint.structure import fit_buffers
from eventloop.errors import CheckpointError
from eventloop_testing import isolated_trainer, run_ranks


class Remembers(nn.Module):
    """Keeps the means of its batches: a buffer that comes, grows, shrinks, or goes."""

    def __init__(self, how):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.how = how
        if how == "goes":
            self.register_buffer("seen", torch.zeros(1, 3))
        elif how != "registered late":
            self.register_buffer("seen", None)

    def forward(self, inputs):
        if self.training:
            self._remember(inputs.detach().mean(0, keepdim=True))
        seen = getattr(self, "seen", None)
        shift = 0 if seen is None else seen.mean()
        return self.layer(inputs) + shift

    def _remember(self, mean):
        seen = getattr(self, "seen", None)
        if self.how == "goes":
            self.seen = None
        elif self.how == "registered late" and seen is None:
            self.register_buffer("seen", mean)
        elif seen is None:
            self.seen = mean
        elif self.how == "shrinks":
            self.seen = torch.cat([seen, mean])[-2:] if len(seen) < 3 else seen[:1]
        else:
            self.seen = torch.cat([seen, mean])


HOW = ["grows", "shrinks", "goes", "registered late"]


class Thaw:
    """Begins to train the first layer in the second epoch, with a group of its own."""

    name = "thaw"

    def __init__(self, *, with_group=True):
        self.with_group = with_group

    @hookimpl
    def epoch_start(self, state):
        if state.clock.epoch != 1 or state.resumed:
            return
        state.model[0].requires_grad_(True)
        if self.with_group:
            optimizer = state.optimizers["sgd"]
            optimizer.add_param_group({"params": [*state.model[0].parameters()], "lr": 0.01})


def frozen_first():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    return model


def trained_ones(model):
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.fixture
def weights_after(make_trainer, tmp_path):
    """Trains in one process or several, each resuming; returns the model's whole state."""

    def weights_after(name, make_task, untils, plugins=lambda: ()):
        for until in untils:
            trainer = make_trainer(
                make_task(),
                algorithms=plugins(),
                run_dir=tmp_path / name,
                max_duration="4ep",
            )
            trainer.fit(until=until)
            trainer.close()
        return trainer

    return weights_after


@pytest.mark.parametrize("how", HOW)
def test_a_buffer_that_training_changes_the_shape_of_is_restored(how, weights_after, make_task):
    """The checkpoint has its shape; a run that saves well must be resumed."""

    def task():
        return make_task(model=lambda: Remembers(how))

    whole = weights_after("whole", task, [None]).state.model.state_dict()
    resumed = weights_after("resumed", task, ["1ep", "4ba", "3ep", None]).state.model.state_dict()

    assert resumed.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(resumed[name], value)


@pytest.mark.parametrize("untils", [["1ep", None], ["5ba", None], ["2ep", "3ep", None]])
def test_a_parameter_group_that_was_added_in_the_run_is_restored(untils, weights_after, make_task):
    """Its options and momenta, too; and that its parameters are trained."""

    def plugins():
        return [Thaw()]

    def task():
        return make_task(model=frozen_first, optimizer=trained_ones)

    whole = weights_after("whole", task, [None], plugins)
    resumed = weights_after("resumed", task, untils, plugins)

    for name, value in whole.state.model.state_dict().items():
        assert torch.equal(resumed.state.model.state_dict()[name], value)
    groups = [one.state.optimizers["sgd"].param_groups for one in (whole, resumed)]
    assert [[group["lr"] for group in one] for one in groups] == [[0.1, 0.01]] * 2
    assert all(param.requires_grad for param in resumed.state.model.parameters())


def test_what_is_trained_is_restored_without_a_group_of_its_own(weights_after, make_task):
    """The optimizer had the parameters from the start; only `requires_grad` changed."""

    def plugins():
        return [Thaw(with_group=False)]

    def task():
        optimizer = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1)}
        return make_task(model=frozen_first, **optimizer)

    whole = weights_after("whole", task, [None], plugins).state.model
    resumed = weights_after("resumed", task, ["2ep", None], plugins).state.model

    assert all(torch.equal(*pair) for pair in zip(whole.parameters(), resumed.parameters()))


def adds_parameter(state):
    state.model.register_parameter("late", nn.Parameter(torch.zeros(2)))


def adds_module(state):
    state.model.late = nn.BatchNorm1d(3).to(state.device)


def resizes(state):
    state.model[0].weight = nn.Parameter(torch.zeros(3, 5, device=state.device))


def adds_foreign_group(state):
    state.optimizers["sgd"].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def fills_a_group(state):
    state.optimizers["sgd"].param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))


LOST = {
    "parameter": (adds_parameter, "the parameter 'late' was added"),
    "module": (adds_module, "the parameter 'late.weight' was added"),
    "shape": (resizes, r"'0.weight' has changed from \(3, 3\) to \(3, 5\)"),
    "foreign group": (adds_foreign_group, "'sgd' got 1 parameter group with parameters"),
    "filled group": (fills_a_group, "parameter groups of the optimizer 'sgd' got other parameters"),
}


@pytest.mark.parametrize(("change", "message"), LOST.values(), ids=LOST)
def test_what_a_resumed_run_can_not_make_again_is_named_at_the_first_save(
    change, message, make_trainer, make_task, make_plugin, tmp_path
):
    """After days of training it would be too late; twice it would be noise."""

    def batch_checkpoint(state):
        if state.clock.batch == 1:
            change(state)
            state.request_checkpoint()
        elif state.clock.batch == 3:
            state.request_stop("enough")

    trainer = make_trainer(
        make_task(model=lambda: nn.Sequential(nn.Linear(3, 3))),
        algorithms=[make_plugin(batch_checkpoint=batch_checkpoint)],
        max_duration="3ep",
        run_dir=tmp_path / "run",
    )
    if change is resizes:
        weight = torch.ones(3, 3, device=trainer.state.device, requires_grad=True)
        trainer.state.model.forward = lambda inputs: inputs @ weight

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit()

    (told,) = [str(one.message) for one in caught if "can't be resumed" in str(one.message)]
    assert re.search(message, told)


def test_a_run_as_it_was_built_saves_nothing_of_its_structure(make_trainer):
    """Control: almost every run."""
    trainer = make_trainer()

    assert trainer.state.capture().parts["training"]["structure"] == {}


def test_changes_that_do_not_fit_the_model_are_refused(make_trainer, make_task, tmp_path):
    """The task may have changed since."""
    settings = {"run_dir": tmp_path / "run", "max_duration": "2ep"}
    trainer = make_trainer(make_task(model=lambda: Remembers("registered late")), **settings)
    trainer.fit(until="1ep")
    trainer.close()

    class Other(nn.Linear):
        seen = property(lambda self: 1)

    with pytest.raises(CheckpointError, match="don't fit this model"):
        make_trainer(make_task(model=lambda: Other(3, 3)), **settings)


def test_weights_with_a_grown_buffer_load_with_a_warning(make_trainer, make_task, tmp_path):
    """An export of the run must be of use in another one."""
    trainer = make_trainer(make_task(model=lambda: Remembers("grows")), max_duration="2ep")
    trainer.fit()
    path = trainer.export(tmp_path / "weights.safetensors")
    other = make_trainer(make_task(model=lambda: Remembers("grows")))

    with pytest.warns(UserWarning, match="other shapes of 1 buffer.*seen"):
        other.load_weights(path)

    assert torch.equal(other.state.model.seen, trainer.state.model.seen)


def test_parameters_of_another_shape_are_not_fitted():
    """They are an error that torch names."""
    model = nn.Linear(3, 3)

    assert fit_buffers(model, {"weight": torch.zeros(5, 3), "other": torch.zeros(1)}) == []


def grown_on_ranks(folder, untils):
    from eventloop import Task

    for until in untils:
        task = Task(
            model=lambda: Remembers("grows"),
            loss=cross_entropy,
            train_dataloader=[(torch.ones(4, 3), torch.arange(4) % 3)] * 4,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )
        run_dir = folder / "run"
        with isolated_trainer(folder, task, max_duration="2ep", run_dir=run_dir) as trainer:
            trainer.fit(until=until)
            state = {name: one.tolist() for name, one in trainer.state.model.state_dict().items()}
    return state


def test_ranks_restore_what_has_grown(tmp_path):
    """Each rank builds the buffer before DDP takes its values from the first."""
    whole = run_ranks(grown_on_ranks, tmp_path / "whole", [None])

    assert run_ranks(grown_on_ranks, tmp_path / "resumed", ["1ep", None]) == whole
