"""Modules that are in evaluation mode on purpose stay there while the model trains."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from eventloop_testing import isolated_trainer, run_ranks


def frozen_norm():
    """Makes a model whose batch norm keeps its statistics."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[0].eval()
    return model


def pretrained():
    """Makes a model as libraries load them: in evaluation mode."""
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).eval()


def modes(trainer):
    return trainer.state.model.training, trainer.state.model[0].training


def test_a_submodule_that_was_made_in_evaluation_mode_stays_in_it(make_trainer, make_task):
    """A frozen batch norm whose statistics move isn't frozen."""
    trainer = make_trainer(make_task(model=frozen_norm), max_duration="2ep")

    trainer.fit()

    assert modes(trainer) == (True, False)
    assert trainer.state.model[0].running_mean.tolist() == [0, 0, 0]


def test_a_model_that_was_loaded_in_evaluation_mode_trains(make_trainer, make_task):
    """Control: its parts are in evaluation mode because the whole is."""
    trainer = make_trainer(make_task(model=pretrained))

    trainer.fit()

    assert modes(trainer) == (True, True)
    assert trainer.state.model[0].running_mean.abs().sum() > 0


def test_a_caller_that_evaluates_between_fits_thaws_nothing(make_trainer, make_task):
    """`trainer.state.model.eval()` in a notebook cell must not change what trains after it."""
    trainer = make_trainer(make_task(model=frozen_norm), max_duration="2ep")
    trainer.fit(until="1ep")
    trainer.state.model.eval()

    trainer.fit()

    assert modes(trainer) == (True, False)
    assert trainer.state.model[0].running_mean.tolist() == [0, 0, 0]


def test_a_module_that_a_plugin_thaws_stays_thawed(make_trainer, make_task, make_plugin):
    """The modes of the latest fit count, not those of the first."""

    def epoch_start(state):
        state.model[0].train()

    thaw = make_plugin(epoch_start=epoch_start)
    trainer = make_trainer(make_task(model=frozen_norm), algorithms=[thaw], max_duration="2ep")
    trainer.fit(until="1ep")
    trainer.state.model.eval()

    trainer.fit()

    assert modes(trainer) == (True, True)


def test_a_plugin_may_freeze_modules_when_training_starts(make_trainer, make_task, make_plugin):
    """`training_start` comes once; a later fit must not undo it."""

    def training_start(state):
        state.model[0].eval()

    freeze = make_plugin(training_start=training_start)
    task = make_task(model=lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)))
    trainer = make_trainer(task, algorithms=[freeze], max_duration="2ep")

    trainer.fit(until="1ep")
    trainer.fit()

    assert modes(trainer) == (True, False)


def statistics_of_rank(folder, make_model):
    from eventloop import Task

    torch.manual_seed(0)
    task = Task(
        model=make_model,
        loss=nn.functional.cross_entropy,
        train_dataloader=[(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64))] * 3,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with isolated_trainer(folder, task, max_duration="1ep") as trainer:
        trainer.fit()
        return modes(trainer), trainer.state.model[0].running_mean.abs().sum().item()


@pytest.mark.parametrize(("make_model", "trains"), [(frozen_norm, False), (pretrained, True)])
def test_ranks_keep_the_modes_of_the_model_below_ddp(make_model, trains, tmp_path):
    """The wrapper itself is always in training mode; it says nothing about the model."""
    results = run_ranks(partial(statistics_of_rank, tmp_path, make_model))

    assert [mode for mode, _ in results] == [(True, trains)] * 2
    assert all((moved > 0) == trains for _, moved in results)


class Wrapper(nn.Module):
    """A head on a backbone that a library has loaded, and a second part that trains."""

    def __init__(self, *, evaluating):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.back = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)
        for name in evaluating:
            self.get_submodule(name).eval()

    def forward(self, inputs):
        return self.head(self.back(self.backbone(inputs)))


def notes_of(trainer):
    return [note for note in trainer.notes if "evaluation mode" in note]


@pytest.mark.parametrize(
    ("evaluating", "text"),
    [
        (["backbone"], "4 modules stay in evaluation mode: backbone;"),
        (["backbone.1"], "1 module stays in evaluation mode: backbone.1;"),
        (["back", "backbone"], "5 modules stay in evaluation mode: backbone, back;"),
    ],
    ids=["backbone", "norm", "names that begin alike"],
)
def test_the_notes_name_modules_that_stay_in_evaluation_mode(
    evaluating, text, make_trainer, make_task
):
    """A backbone as `from_pretrained` returns it trains without dropout, and nothing else shows it."""
    trainer = make_trainer(make_task(model=partial(Wrapper, evaluating=evaluating)))

    (note,) = notes_of(trainer)

    assert note.startswith(text)
    assert ".train()" in note
    trainer.fit()
    assert notes_of(trainer) == [note]


@pytest.mark.parametrize("make_model", [partial(Wrapper, evaluating=[]), pretrained])
def test_a_model_of_which_all_trains_has_no_such_note(make_model, make_trainer, make_task):
    """Control: a whole model in evaluation mode is put into training mode by the fit."""
    trainer = make_trainer(make_task(model=make_model))

    assert not notes_of(trainer)
    trainer.fit()
    assert not notes_of(trainer)
