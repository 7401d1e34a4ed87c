"""Runs that begin with weights of a file: each rank reads its shards, and nothing is drawn."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import SettingError, Task, hookimpl
from eventloop.files.disk import OldFile
from eventloop_fsdp import Fsdp
from eventloop_fsdp.deferred_init import DeferredModel
from eventloop_testing import isolated_trainer, run_ranks
from eventloop_testing.ranks import RankError

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1)


class Net(nn.Module):
    """Layers that repeat, a tied weight, and buffers of both kinds."""

    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Linear(3, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 3)
        self.again = nn.Linear(width, 3)
        self.again.weight = self.head.weight
        self.register_buffer("offset", torch.arange(float(width)), persistent=False)
        nn.init.orthogonal_(self.layers[0].weight)
        nn.init.trunc_normal_(self.head.weight)

    def forward(self, inputs):
        hidden = self.stem(inputs)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        hidden = self.norm(hidden + self.offset)
        return self.head(hidden) + self.again(hidden)


def of_transformers(kind):
    """Returns a model of a few layers, by its configuration."""
    import transformers

    small = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    layers = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 2}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, **small)
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        config = transformers.LlamaConfig(**layers, **heads, num_key_value_heads=2, **small)
        return transformers.LlamaForCausalLM(config)
    return transformers.BertForMaskedLM(transformers.BertConfig(**layers, **heads, **small))


def looked_at(model):
    """Returns weights and buffers as they are, whole."""
    weights = {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).clone().cpu()
        for name, one in model.state_dict().items()
    }
    return weights, {name: one.clone().cpu() for name, one in model.named_buffers()}


def undrawn(make):
    """Makes a model, for which no random number may be drawn."""
    before = torch.get_rng_state()
    model = make()
    assert torch.equal(torch.get_rng_state(), before)
    return model


def begun(folder, make=Net, until="0ba", batch_size=24, **options):
    """Begins a run, and trains; returns its weights and what the header says."""
    task = Task(
        model=lambda: undrawn(make) if options.get("meta") else make(),
        loss=cross_entropy,
        train_dataloader=lambda: DataLoader(TensorDataset(X, Y), batch_size),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    )
    given = {"max_duration": "3ep", "checkpoint_interval": "1ba", "sync_batch_norm": True}
    with isolated_trainer(folder, task, algorithms=[Fsdp(**options)], **given) as trainer:
        if until != "0ba":
            trainer.fit(until=until)
        return *looked_at(trainer.state.model), trainer.notes


@pytest.fixture
def other():
    """Weights of a model that was drawn otherwise."""
    torch.manual_seed(7)
    return Net().state_dict()


@pytest.fixture
def file(tmp_path, other):
    path = tmp_path / "model.safetensors"
    save_file({name: one.clone() for name, one in other.items()}, path)
    return path


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    assert [name for name, one in expected.items() if not torch.equal(actual[name], one)] == []


def on_two(function, *args, **given):
    return run_ranks(lambda: function(*args, **given))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_begins_with_the_bits_of_a_file(tmp_path, file, other, num_ranks, meta, monkeypatch):
    """In one process as in two; with meta nothing is drawn, and what isn't saved is as it is built."""

    def drawn(*_):
        raise AssertionError("weights were drawn")

    monkeypatch.setattr(DeferredModel, "fill", drawn)
    given = {"weights": str(file), "meta": meta}
    ranks = [begun(tmp_path, **given)] if num_ranks == 1 else on_two(begun, tmp_path, **given)

    for weights, buffers, notes in ranks:
        assert_same(weights, other)
        assert torch.equal(buffers["offset"], torch.arange(8.0))
        assert f"fsdp: weights of {file}" in notes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_a_pretrained_model_of_several_files_is_read_by_its_index(tmp_path, kind):
    """A tied weight is in one of them, under one of its names; buffers are those of its class."""
    torch.manual_seed(7)
    pretrained, folder = of_transformers(kind), tmp_path / "pretrained"
    pretrained.save_pretrained(folder, max_shard_size="40KB")
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(places.values())) > 2
    assert (len(places) < len(pretrained.state_dict())) == (kind != "llama")
    given = {"weights": str(folder), "meta": True}

    one = begun(tmp_path / "one", lambda: of_transformers(kind), **given)
    two = on_two(begun, tmp_path / "two", lambda: of_transformers(kind), **given)

    for weights, buffers, _ in [one, *two]:
        assert_same(weights, pretrained.state_dict())
        assert_same(buffers, dict(pretrained.named_buffers()))


def num_read(folder, make, **options):
    """Returns how many bytes this rank has read for a run to begin, and how many at once."""
    sizes = []
    fill_at = OldFile.fill_at

    def counted(self, buffer, position):
        sizes.append(len(buffer))
        fill_at(self, buffer, position)

    OldFile.fill_at = counted
    try:
        begun(folder, make, **options)
    finally:
        OldFile.fill_at = fill_at
    return sum(sizes), max(sizes)


def test_no_rank_reads_or_holds_what_others_hold(tmp_path):
    """Half of each weight, one at a time."""
    path = tmp_path / "model.safetensors"
    save_file({name: one.clone() for name, one in Net(256).state_dict().items()}, path)
    given = {"weights": str(path), "meta": True}

    read = on_two(num_read, tmp_path, lambda: Net(256), **given)

    whole = path.stat().st_size
    assert all(0.49 < total / whole < 0.51 for total, _ in read)
    assert [most for _, most in read] == [256 * 256 * 4 / 2] * 2


@pytest.mark.nightly
def test_a_run_that_goes_on_does_not_look_at_them(tmp_path, file):
    """They may be gone by then; it ends as one that was never stopped."""
    given = {"weights": str(file), "meta": True, "batch_size": 12, "until": "3ep"}
    expected = on_two(begun, tmp_path / "whole", **given)[0][0]
    on_two(begun, tmp_path / "stopped", **given | {"until": "3ba"})
    file.unlink()

    went_on = on_two(begun, tmp_path / "stopped", **given)[0][0]

    assert_same(went_on, expected)
    with pytest.raises(RankError, match=r"TaskError: the weights in .* can't be loaded: .*No such"):
        on_two(begun, tmp_path / "new", **given)


@pytest.mark.nightly
def test_weights_of_another_type_are_converted(tmp_path, other):
    """As load_state_dict does it."""
    path = tmp_path / "model.safetensors"
    halves = {
        name: one.bfloat16() if one.is_floating_point() else one for name, one in other.items()
    }
    save_file({name: one.clone() for name, one in halves.items()}, path)

    (weights, _, _), _ = on_two(begun, tmp_path, weights=str(path), meta=True)

    assert_same(weights, {name: one.to(other[name].dtype) for name, one in halves.items()})


class Outer(nn.Module):
    """Has a model inside."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, inputs):
        return self.net(inputs)


@pytest.mark.parametrize(
    ("rename", "said"),
    [
        (lambda name: f"_orig_mod.{name}", "without '_orig_mod.' before names"),
        (lambda name: f"inner.net.{name}", "without 'inner.net.' before names"),
        (lambda name: name.removeprefix("net."), "'net.' before each name"),
    ],
)
def test_one_beginning_of_all_names_is_left_out_or_added(tmp_path, other, rename, said):
    """A model that was compiled or inside of another one; a head's model filled by its base's."""
    make = Outer if said.endswith("each name") else Net
    path = tmp_path / "model.safetensors"
    save_file({rename(name): one.clone() for name, one in other.items()}, path)

    weights, _, notes = begun(tmp_path, make, weights=str(path), meta=True)

    assert_same({name.removeprefix("net."): one for name, one in weights.items()}, other)
    assert any(said in one for one in notes)


def test_a_base_model_fills_one_whose_head_is_tied_to_it(tmp_path):
    """Saved without its head, as `GPT2Model`."""
    pretrained = of_transformers("gpt2")
    pretrained.transformer.save_pretrained(tmp_path / "base")

    weights, _, _ = begun(
        tmp_path, lambda: of_transformers("gpt2"), weights=str(tmp_path / "base"), meta=True
    )

    assert_same(weights, pretrained.state_dict())


def changed(weights, **changes):
    return {name: one.clone() for name, one in (weights | changes).items() if one is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stem.bias": None, "norm.running_mean": None},
         r"model.safetensors lacks 2 of the model's \d+: 'stem.bias', 'norm.running_mean'; it has"),
        ({"stem.weight": torch.zeros(8, 4)},
         r"other shapes: 'stem.weight' is \(8, 4\) there and \(8, 3\) in the model"),
        ({"stem.weight": torch.zeros(8, 3, dtype=torch.int8)},
         r"other kinds: 'stem.weight' is torch.int8 there and torch.float32 in the model"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_named(tmp_path, other, changes, message):
    """With what to do; nothing is left as the memory has it."""
    path = tmp_path / "model.safetensors"
    save_file(changed(other, **changes), path)

    with pytest.raises(SettingError, match=rf"{message}[\s\S]*load them in the task"):
        begun(tmp_path, weights=str(path), meta=True)


def test_weights_that_the_model_lacks_are_warned_of(tmp_path, other):
    """Of another head, say."""
    path = tmp_path / "model.safetensors"
    save_file(changed(other, more=torch.zeros(3)), path)

    with pytest.warns(UserWarning, match=r"has 1 that the model lacks, left out: 'more'"):
        weights, _, _ = begun(tmp_path, weights=str(path), meta=True)

    assert_same(weights, other)


@pytest.mark.nightly
def test_a_run_begins_with_the_weights_of_another_run(tmp_path):
    """Of shards that were written by other ranks, too."""
    trained = on_two(begun, tmp_path / "first", until="2ba", layers=None)[0][0]

    weights, _, _ = begun(tmp_path / "second", weights=str(tmp_path / "first" / "run"), meta=True)

    assert_same(weights, trained)


def test_averages_begin_with_what_was_loaded(tmp_path, file, other):
    """Plugins that copy weights when a run begins come after."""

    class Copies:
        name = "copies"

        @hookimpl
        def after_load(self, state):
            self.copy = state.model.stem.weight.detach().clone()

    copies = Copies()
    task = Task(
        model=Net,
        loss=cross_entropy,
        train_dataloader=[(X, Y)],
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    plugins = [copies, Fsdp(weights=str(file))]
    with isolated_trainer(tmp_path, task, algorithms=plugins, max_duration="1ba"):
        pass

    assert torch.equal(copies.copy.cpu(), other["stem.weight"])


def test_the_file_is_left_as_it_was(tmp_path, file):
    """What is trained has memory of its own."""
    before = load_file(file)
    begun(tmp_path, weights=str(file), meta=True, until="2ba")

    assert_same(load_file(file), before)
