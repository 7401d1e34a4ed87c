"""Weights of a model that the task compiled are those of the plain model, under its names."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from eventloop.checkpoint.checkpoint_export import export_weights, with_names_of
from eventloop.toolbox import weights_at


def plain():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))


def compiled():
    return torch.compile(plain(), backend="eager")


def compiled_part():
    model = plain()
    model[0] = torch.compile(model[0], backend="eager")
    return model


def compiled_twice():
    return torch.compile(compiled_part(), backend="eager")


MODELS = {"whole": compiled, "part": compiled_part, "whole and part": compiled_twice}


@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
def test_an_export_loads_into_the_plain_model(make_model, make_trainer, make_task, tmp_path):
    """Users of the weights needn't know how they were trained."""
    trainer = make_trainer(make_task(model=make_model))
    trainer.fit()

    path = trainer.export(tmp_path / "weights.safetensors")

    model = plain()
    model.load_state_dict(load_file(path))
    other = make_trainer(make_task(model=plain))
    other.load_weights(path)
    assert torch.equal(other.state.model[1].weight.cpu(), model[1].weight)


@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
def test_a_checkpoint_is_exported_under_plain_names(make_model, make_trainer, make_task, tmp_path):
    """`eventloop export` reads files alone, and knows no model."""
    trainer = make_trainer(make_task(model=make_model), run_dir=tmp_path / "run")
    trainer.fit()
    trainer.close()
    checkpoint = max((tmp_path / "run" / "checkpoints").glob("*/manifest.json")).parent

    names, others = export_weights(checkpoint, tmp_path / "weights.safetensors")

    assert others == []
    assert sorted(names) == sorted(plain().state_dict())
    assert load_file(tmp_path / "weights.safetensors").keys() == plain().state_dict().keys()


@pytest.mark.parametrize("strict", [True, False])
def test_plain_weights_load_into_a_compiled_model(strict, make_trainer, make_task, tmp_path):
    """The other way round: pretrained weights, and training that is compiled."""
    trained = make_trainer(make_task(model=plain))
    trained.fit()
    path = trained.export(tmp_path / "weights.safetensors")
    trainer = make_trainer(make_task(model=compiled))

    trainer.load_weights(path, strict=strict)

    weight = weights_at(path)["0.weight"]
    assert torch.equal(trainer.state.model.state_dict()["_orig_mod.0.weight"].cpu(), weight)


@pytest.mark.parametrize(("before", "after"), [(compiled, plain), (plain, compiled_part)])
def test_a_run_resumes_with_or_without_compilation(
    before, after, make_trainer, make_task, tmp_path
):
    """The weights are the same ones; how a step is computed may change."""
    settings = {"run_dir": tmp_path / "run", "max_duration": "2ep"}
    first = make_trainer(make_task(model=before), **settings)
    first.fit(until="1ep")
    first.close()
    expected = [one.detach().cpu().clone() for one in first.state.model.parameters()]

    resumed = make_trainer(make_task(model=after), **settings)

    actual = [one.detach().cpu() for one in resumed.state.model.parameters()]
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def test_names_that_no_model_has_stay():
    """A misfit is told under the name that the file has."""
    assert with_names_of(plain(), {"_orig_mod.head.weight": 1}) == {"_orig_mod.head.weight": 1}
