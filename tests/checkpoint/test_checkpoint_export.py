"""Weights that stay in their files until a model takes them, one tensor after the other."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from eventloop import hookimpl
from eventloop.checkpoint.checkpoint_export import FoundWeights, saved_weights_at, weights_at
from eventloop.checkpoint.checkpoint_files import write_checkpoint
from eventloop.errors import TaskError

WEIGHTS = {
    "weight": torch.arange(9.0).view(3, 3),
    "bias": torch.arange(3).half(),
    "count": torch.tensor(7),
}


@pytest.fixture
def file(tmp_path) -> Path:
    save_file(WEIGHTS, tmp_path / "model.safetensors", {"format": "pt", "author": "Zoë"})
    return tmp_path / "model.safetensors"


@pytest.fixture
def pretrained(tmp_path) -> Path:
    """A folder as `save_pretrained` writes it where a model takes several files."""
    folder, places = tmp_path / "pretrained", {}
    folder.mkdir()
    for idx, name in enumerate(WEIGHTS):
        places[name] = f"model-{idx + 1:05}-of-00003.safetensors"
        save_file({name: WEIGHTS[name]}, folder / places[name])
    index = {"metadata": {"total_size": 50}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def assert_same(found, expected=WEIGHTS):
    assert found.keys() == expected.keys()
    assert [name for name, one in expected.items() if not torch.equal(found[name], one)] == []


def test_weights_are_read_from_a_file_from_a_folder_of_several_and_through_links(
    file, pretrained, tmp_path
):
    """Caches of pretrained models are folders of links."""
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "config.json").write_text("{}")
    (linked / "model.safetensors").symlink_to(file)

    for path in (file, pretrained, linked):
        assert_same(weights_at(path))
        part = saved_weights_at(path)["weight"].read_slice((1, 1), (2, 1))
        assert torch.equal(part, WEIGHTS["weight"][1:, 1:2])


def test_a_folder_that_was_a_checkpoint_is_not_taken_for_a_pretrained_model(file):
    """Without its manifest nothing says that these are the weights which were written."""
    with pytest.raises(Exception, match="no checkpoints"):
        weights_at(file.parent)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"weight": "../model.safetensors"}, "doesn't map to names of files"),
        ({"weight": 3}, "doesn't map to names of files"),
        ([], "doesn't map to names of files"),
        ({"weight": "gone.safetensors"}, r"gone.safetensors can't be loaded"),
        ({"other": "model-00001-of-00003.safetensors"}, "says that it has 'other', but it doesn't"),
    ],
)
def test_an_index_that_says_something_else_is_refused(pretrained, places, message):
    """A file from elsewhere may be anything."""
    (pretrained / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    with pytest.raises(TaskError, match=message):
        weights_at(pretrained)


def test_a_file_that_is_cut_off_while_a_model_is_loaded_is_told(file):
    """Its header was read before."""
    saved = saved_weights_at(file)
    file.write_bytes(file.read_bytes()[:-40])

    with pytest.raises(TaskError, match=r"model.safetensors can't be loaded: .*it ends early"):
        saved["weight"].read()


class Tied(nn.Module):
    """Two names for one parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 3)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs):
        return self.head(inputs)


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_a_tied_weight_is_found_under_either_name(name, tmp_path, make_trainer, make_task):
    """`save_pretrained` leaves out all but one."""
    save_file({name: WEIGHTS["weight"]}, tmp_path / "model.safetensors")
    trainer = make_trainer(make_task(model=Tied()))

    trainer.load_weights(tmp_path / "model.safetensors")

    assert torch.equal(trainer.state.model.head.weight.cpu(), WEIGHTS["weight"])


@pytest.mark.sampled(2)
@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["file", "checkpoint"])
def test_weights_are_loaded_with_the_memory_of_a_tensor(
    kind, tmp_path, make_trainer, make_task, memory_kb
):
    """Beside the model not all of them, which are 400 MB: 24 tensors of 16 MB."""
    model = nn.Module()
    for idx in range(24):
        model.register_parameter(f"p{idx}", nn.Parameter(torch.full((2048, 2048), float(idx))))
    trainer = make_trainer(make_task(model=model))
    if kind == "file":
        path = trainer.export(tmp_path / "model.safetensors")
    else:
        path = tmp_path / "ba00000001"
        write_checkpoint(path, {"model": model.state_dict()}, {}, batch=1)
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(-1)
    gc.collect()

    # Whatever this process did before may add to one measurement, not to each.
    assert min(memory_kb(lambda: trainer.load_weights(path)) for _ in range(3)) < 330_000
    trainer.load_weights(path)
    assert [one[0, 0].item() for one in model.parameters()] == list(range(24))


def test_a_plugin_reads_what_the_core_does_not_know(make_trainer, tmp_path):
    """A format of its own; what it passes over is the core's to read."""

    class Reads:
        name = "reads"

        @hookimpl(conditional=True)
        def read_weights(self, state, path, plugins):
            if path.suffix != ".pt":
                return None
            return FoundWeights(torch.load(path, weights_only=True), {})

    torch.save({"weight": torch.eye(3), "bias": torch.ones(3)}, tmp_path / "model.pt")
    trainer = make_trainer(algorithms=[Reads()])

    trainer.load_weights(tmp_path / "model.pt")
    assert torch.equal(trainer.state.model.weight.cpu(), torch.eye(3))
    save_file({"weight": torch.zeros(3, 3), "bias": torch.ones(3)}, tmp_path / "model.safetensors")
    trainer.load_weights(tmp_path / "model.safetensors")
    assert not trainer.state.model.weight.any()


def test_adapters_for_a_model_that_has_none_are_refused(make_trainer, tmp_path):
    """The message names what gives it some."""
    (tmp_path / "adapter_config.json").write_text("{}")

    with pytest.raises(
        TaskError, match="has adapters for a model, and this model has none"
    ) as caught:
        make_trainer().load_weights(tmp_path)
    assert "with lora of eventloop-llm: `--lora.r 8`" in str(caught.value)
