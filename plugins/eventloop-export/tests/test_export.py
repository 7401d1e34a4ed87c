"""Models in other formats compute what the model computes."""

import os
import stat
from copy import deepcopy

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from eventloop import EventloopError, hookimpl
from eventloop_export import Export, save_onnx
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task


def conv_task():
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(4, 1, 6, 6, generator=generator), torch.tensor([0, 1, 2, 0])) for _ in range(3)
    ]
    return tiny_task(
        model=lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(),
            nn.Linear(64, 3),
        ),
        train_dataloader=batches,
        eval_dataloaders={"test": batches},
    )  # fmt: skip


class TwoInputs(nn.Module):
    """Takes a mapping, and gives its loss where it has labels."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(8, 4), nn.Linear(4, 3)

    def forward(self, ids, mask, labels=None):
        logits = self.out((self.embed(ids) * mask[..., None]).sum(1))
        if labels is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def save_pretrained(self, path):
        path.mkdir()
        torch.save(self.state_dict(), path / "model.bin")


def mapping_task():
    generator = torch.Generator().manual_seed(0)
    batches = [
        {
            "ids": torch.randint(8, (4, 5), generator=generator),
            "mask": torch.ones(4, 5),
            "labels": torch.tensor([0, 1, 2, 0]),
        }
        for _ in range(3)
    ]
    return tiny_task(
        model=TwoInputs,
        loss=None,
        metrics=None,
        train_dataloader=batches,
        eval_dataloaders=None,
    )


def exported(folder, task, name, **given):
    """Trains, exports, and returns the file and the trained model, on the host, to be evaluated."""
    path = folder / name
    with isolated_trainer(folder, task, algorithms=[Export()], **given) as trainer:
        trainer.fit()
        assert trainer.export(path) == path
        was_training = trainer.state.model.training
        return path, trainer.state.model.eval().cpu(), was_training


def by_onnx(path, *inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    given = {name: one.numpy() for name, one in zip(names, inputs, strict=True)}
    (outputs,) = session.run(None, given)
    return outputs


@pytest.fixture(scope="module")
def as_onnx(tmp_path_factory):
    """The file of a trained model, the model, and whether it was in training mode."""
    return exported(tmp_path_factory.mktemp("onnx"), conv_task(), "model.onnx")


@pytest.mark.parametrize("num_samples", [1, 4, 7])
def test_onnx_computes_what_the_model_computes(as_onnx, num_samples):
    """With the statistics of batch norms, without dropout, for any number of samples."""
    path, model, _ = as_onnx
    inputs = torch.randn(num_samples, 1, 6, 6)

    with torch.no_grad():
        expected = model(inputs).numpy()
    assert np.abs(by_onnx(path, inputs) - expected).max() < 1e-5
    assert [one.name for one in path.parent.glob("*model.onnx*")] == ["model.onnx"]


def test_other_weights_would_be_seen(as_onnx):
    """Control: the comparison is one of these weights."""
    path, model, _ = as_onnx
    inputs, model = torch.randn(4, 1, 6, 6), deepcopy(model)
    with torch.no_grad():
        model[-1].weight.add_(1e-3)
        other = model(inputs).numpy()

    assert np.abs(by_onnx(path, inputs) - other).max() > 1e-5


@pytest.mark.nightly
def test_a_model_of_named_inputs_is_exported_without_labels(tmp_path):
    """What is deployed has none."""
    path, model, _ = exported(tmp_path, mapping_task(), "model.onnx")
    ids, mask = torch.randint(8, (3, 5)), torch.ones(3, 5)

    with torch.no_grad():
        expected = model(ids, mask).numpy()
    assert np.abs(by_onnx(path, ids, mask) - expected).max() < 1e-5


def test_a_program_needs_no_code_of_the_model(tmp_path):
    """`torch.export.load` is all."""
    path, model, _ = exported(tmp_path, conv_task(), "model.pt2")
    inputs = torch.randn(5, 1, 6, 6)

    found = torch.export.load(path).module()(inputs)

    torch.testing.assert_close(found, model(inputs), rtol=0, atol=1e-6)


class Average:
    """An algorithm that evaluates and exports other weights, as averages do."""

    name = "average"

    @hookimpl(wrapper=True)
    def export(self, state):
        params = [one.detach().clone() for one in state.model.parameters()]
        with torch.no_grad():
            for one in state.model.parameters():
                one.mul_(0.5)
        path = yield
        with torch.no_grad():
            for one, before in zip(state.model.parameters(), params, strict=True):
                one.copy_(before)
        return path


def test_weights_are_those_that_evaluation_sees(tmp_path):
    """A wrapper of the action swaps them in."""
    path = tmp_path / "model.pt2"
    with isolated_trainer(tmp_path, algorithms=[Average(), Export()]) as trainer:
        trainer.fit()
        trainer.export(path)
        model = trainer.state.model
    found = torch.export.load(path).module().state_dict()

    for name, one in model.state_dict().items():
        torch.testing.assert_close(found[name], one.cpu() / 2)


def test_save_pretrained_is_called_where_the_model_has_it(tmp_path):
    """A name without a suffix is a folder."""
    path, model, _ = exported(tmp_path, mapping_task(), "folder")

    assert torch.load(path / "model.bin").keys() == model.state_dict().keys()
    with pytest.raises(EventloopError, match="has no save_pretrained"):
        exported(tmp_path / "other", conv_task(), "folder")


def test_safetensors_is_left_to_the_core(tmp_path, as_onnx):
    """And the model's mode is what it was."""
    path, _, was_training = exported(tmp_path, conv_task(), "model.safetensors")

    assert path.stat().st_size > 0
    assert was_training == as_onnx[2]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 3)

    def forward(self, inputs):
        return self.out(inputs) if inputs.sum().item() > 0 else self.out(-inputs)


def test_what_can_not_be_traced_is_told(tmp_path):
    """With the way out; no half file stays."""
    with pytest.raises(EventloopError, match="can't be exported") as raised:
        exported(tmp_path, tiny_task(model=Branches), "model.pt2")

    assert "model.safetensors" in str(raised.value)
    assert not list(tmp_path.glob("*.pt2"))


def test_rank_0_writes(tmp_path):
    """The other goes on."""

    def run(folder):
        task = tiny_task(train_dataloader=tiny_batches(6))
        path, model, _ = exported(folder, task, "model.pt2")
        inputs = torch.ones(4, 3)
        found = torch.export.load(path).module()(inputs) if path.exists() else model(inputs)
        return torch.allclose(found, model(inputs), atol=1e-6)

    assert run_ranks(run, tmp_path) == [True, True]


class Pairs(nn.Module):
    """Compares queries with documents, of which there are others, and scales by a number."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, queries, documents, scale):
        return {"scores": scale * self.out(queries) @ self.out(documents).T}


def axes_of(path):
    graph = onnx.load(path).graph
    return {
        one.name: [dim.dim_param or dim.dim_value for dim in one.type.tensor_type.shape.dim]
        for one in (*graph.input, *graph.output)
    }


def test_the_axis_of_samples_has_a_name(tmp_path):
    """Tools show it, and people write it where they give another length."""
    save_onnx(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4), tmp_path / "one.onnx")
    batch = {"ids": torch.ones(2, 5, dtype=torch.int64), "mask": torch.ones(2, 5)}
    save_onnx(TwoInputs(), batch, tmp_path / "two.onnx")

    assert [*axes_of(tmp_path / "one.onnx").values()] == [["batch", 4], ["batch", 3]]
    assert [*axes_of(tmp_path / "two.onnx").values()] == [["batch", 5], ["batch", 5], ["batch", 3]]


def test_axes_that_may_differ_have_different_names(tmp_path):
    """One name would say that there are as many documents as queries."""
    inputs = {
        "queries": torch.randn(3, 4), "documents": torch.randn(5, 4), "scale": torch.tensor(2.0),
    }  # fmt: skip

    save_onnx(Pairs(), inputs, tmp_path / "pairs.onnx")

    axes = axes_of(tmp_path / "pairs.onnx")
    assert (axes["queries"], axes["documents"]) == (["batch", 4], ["documents_batch", 4])
    assert axes["scale"] == []
    assert ["batch", "documents_batch"] in axes.values()


def test_a_folder_gets_the_mode_of_any_new_file(tmp_path):
    """save_pretrained of transformers writes weights that their owner alone can read."""

    class Private(TwoInputs):
        def save_pretrained(self, path):
            super().save_pretrained(path)
            (path / "model.bin").chmod(0o600)

    task = mapping_task()
    task.model = Private
    before = os.umask(0o022)
    try:
        path, _, _ = exported(tmp_path, task, "folder")
    finally:
        os.umask(before)

    assert stat.S_IMODE((path / "model.bin").stat().st_mode) == 0o644
