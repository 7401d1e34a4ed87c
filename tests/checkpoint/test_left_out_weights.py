"""Checkpoints without the weights that the task builds again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eventloop import CheckpointError, PluginError, hookimpl
from eventloop.checkpoint.checkpoint_export import weights_and_states
from eventloop.checkpoint.checkpoint_files import read_checkpoint


class Leaves:
    """Leaves out the first layer."""

    name = "leaves"

    def __init__(self, begin="0."):
        self.begin = begin

    @hookimpl
    def select_weights(self, state, names):
        return [name for name in names if not name.startswith(self.begin)]


def network(bias=0.5):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.init.constant_(model[0].bias, bias)
    return model


@pytest.fixture
def make(make_task, make_trainer):
    """Makes a trainer of the second layer that saves every batch."""

    def make(folder, *plugins, bias=0.5, model=None, **given):
        task = make_task(
            model=model or (lambda: network(bias)),
            optimizer=lambda model: torch.optim.SGD(model[1].parameters(), lr=0.1),
        )
        given = {"run_dir": folder, "checkpoint_interval": "1ba"} | given
        return make_trainer(task, algorithms=plugins, **given)

    return make


@pytest.fixture
def saved(make, tmp_path):
    """The newest checkpoint of a run."""
    make(tmp_path / "run", Leaves()).fit()
    return max((tmp_path / "run" / "checkpoints").glob("ba*"))


def test_what_is_left_out_is_not_in_the_file(saved):
    """Its digest is among the facts."""
    found = read_checkpoint(saved)

    assert found.parts["model"].keys() == {"1.weight", "1.bias"}
    assert weights_and_states(saved).left_out == found.facts["left_out"]


def test_whole_checkpoints_have_no_digest(make, tmp_path):
    """To compute one takes time, and would say nothing."""
    make(tmp_path, max_duration="1ba").fit()

    found = read_checkpoint(max((tmp_path / "checkpoints").glob("ba*")))
    assert "left_out" not in found.facts


def test_a_run_goes_on_with_the_weights_that_it_began_with_only(make, saved):
    """Also where it no longer leaves any out; the error says what to build."""
    folder = saved.parents[1]
    again = {"max_duration": "1ep"}

    with pytest.raises(
        CheckpointError, match="differ from the weights that it leaves out"
    ) as caught:
        make(folder, Leaves(), bias=0.6, **again)
    assert "from the same files" in str(caught.value)
    model = make(folder, Leaves(), **again).state.model
    assert torch.equal(model[1].weight.cpu(), read_checkpoint(saved).parts["model"]["1.weight"])


OTHER_MODELS = {
    "holds 2 weights that this model lacks: '1.bias', '1.weight'": lambda: nn.Linear(3, 3),
    r"holds 2 weights of other shapes: '1.bias' is \(3,\), not \(2,\), '1.weight'": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    ),
}


@pytest.mark.parametrize("shown", OTHER_MODELS)
def test_weights_of_another_model_are_named(make, make_task, make_trainer, saved, tmp_path, shown):
    """A digest alone would hide that adapters are missing, or have another rank."""
    task = make_task(
        model=OTHER_MODELS[shown], optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1)
    )
    with pytest.raises(CheckpointError, match=shown) as caught:
        make_trainer(task, run_dir=tmp_path / "other").load_weights(saved)
    assert "the plugins and options of the run, which are in its manifest.json" in str(caught.value)


def test_weights_are_loaded_on_top_of_the_same_ones_only(make, saved, tmp_path):
    """With or without the plugin; without strictness what is missing stays, with a warning."""
    with pytest.raises(CheckpointError, match="differ from the weights that it leaves out"):
        make(tmp_path / "other", bias=0.6).load_weights(saved)
    trainer = make(tmp_path / "lenient", bias=0.6)
    with pytest.warns(UserWarning, match="lacks 2 weights of the model, left as built"):
        trainer.load_weights(saved, strict=False)
    assert trainer.state.model[0].bias.eq(0.6).all()
    same = make(tmp_path / "same")
    same.load_weights(saved)

    assert torch.equal(same.state.model[1].bias, trainer.state.model[1].bias)


def test_a_model_of_other_names_is_refused(make, saved, tmp_path):
    """Neither what it has in addition nor what it lacks is passed over."""

    def deeper():
        return nn.Sequential(*network(), nn.Linear(3, 3))

    with pytest.raises(CheckpointError, match="this model's 4 other weights"):
        make(tmp_path / "deeper", model=deeper).load_weights(saved)
    smaller = make(
        tmp_path / "smaller", model=lambda: nn.Sequential(nn.Identity(), nn.Linear(3, 3))
    )
    with pytest.raises(CheckpointError, match="this model's 0 other weights"):
        smaller.load_weights(saved)


def test_what_changes_though_it_is_left_out_is_an_error(make, tmp_path):
    """At the next save: no run could go on from it."""
    with pytest.raises(PluginError, match=r"'1\.weight' has changed in training") as caught:
        make(tmp_path, Leaves("1.")).fit()
    assert "leaves" in str(caught.value)


def test_the_best_weights_are_whole(make_task, make_trainer, make_batches, tmp_path):
    """Test sets are evaluated with what was saved, on what the task has built."""
    sets = {
        "eval_dataloaders": {"valid": make_batches()},
        "test_dataloaders": {"test": make_batches()},
    }
    task = make_task(
        model=network,
        optimizer=lambda model: torch.optim.SGD(model[1].parameters(), lr=0.1),
        **sets,
    )
    given = {"run_dir": tmp_path, "checkpoint_best": "valid/loss", "eval_interval": "1ba"}

    result = make_trainer(task, algorithms=[Leaves()], **given).fit()

    assert result.tested_with is not None
    assert torch.isfinite(result.metrics["test"]["loss"])
