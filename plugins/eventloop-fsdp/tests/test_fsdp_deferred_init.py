"""Models that no rank builds whole have the weights that one process would draw."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.init import orthogonal_
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task, hookimpl
from eventloop_fsdp import Fsdp
from eventloop_fsdp.deferred_init import DeferredModel
from eventloop_testing import isolated_trainer, run_ranks
from eventloop_testing.ranks import RankError

EXAMPLES = Path(__file__).parents[3] / "examples"
X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1)


class Net(nn.Module):
    """Draws in its constructor, in all the ways that models do."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(3, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.full((8,), 0.5))
        self.head = nn.Linear(8, 3)
        self.unused = nn.Embedding(5, 8, padding_idx=1)
        self.tied = nn.Embedding(5, 8)
        self.tied.weight = self.unused.weight
        self.register_buffer("offset", torch.arange(8.0))
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.1)
            layer.bias.data[2:5].fill_(0.25)

    def forward(self, inputs):
        hidden = self.stem(inputs)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden)) * self.scale
        return self.head(self.norm(hidden + self.offset)) + 0 * self.tied.weight.sum()


class Looks:
    """Keeps what there is of the parameters before they are sharded, and the weights afterwards."""

    name = "looks"

    def __init__(self):
        self.meta, self.weights = {}, {}

    @hookimpl
    def init(self, state):
        self.meta = {name: one.is_meta for name, one in state.model.named_parameters()}

    def look(self, state):
        for name, one in state.model.state_dict().items():
            whole = one.full_tensor() if hasattr(one, "full_tensor") else one
            self.weights[name] = whole.clone()


def train(folder, model=Net, options=None, until=None, batch_size=24):
    """Trains three epochs; returns the weights at the end."""
    looks = Looks()
    task = Task(
        model=model,
        loss=cross_entropy,
        train_dataloader=lambda: DataLoader(TensorDataset(X, Y), batch_size),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    )
    plugins = [looks] if options is None else [Fsdp(**options), looks]
    given = {"max_duration": "3ep", "checkpoint_interval": "1ba", "sync_batch_norm": True}
    with isolated_trainer(folder, task, algorithms=plugins, **given) as trainer:
        trainer.fit(until=until)
        looks.look(trainer.state)
    return looks.weights


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    assert [name for name, one in expected.items() if not torch.equal(actual[name], one)] == []


def built(make):
    """Returns the weights of a model in a run of this process or rank, as it begins."""

    def run(folder, options=None):
        task = Task(
            model=make,
            loss=lambda outputs, targets: outputs.sum(),
            train_dataloader=[(X, Y)] * 2,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )
        looks = Looks()
        plugins = [looks] if options is None else [Fsdp(**options), looks]
        with isolated_trainer(folder, task, algorithms=plugins, max_duration="1ba") as trainer:
            looks.look(trainer.state)
        return looks.meta, looks.weights

    return run


def of_charlm():
    return runpy.run_path(str(EXAMPLES / "charlm.py"))["GPT"](32, 2, 2)


def of_transformers(kind):
    """Returns a model of a few layers, by its configuration."""
    import transformers

    small = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, **small)
        return transformers.GPT2LMHeadModel(config)
    layers = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 2}
    if kind == "llama":
        config = transformers.LlamaConfig(**layers, **heads, num_key_value_heads=2, **small)
        return transformers.LlamaForCausalLM(config)
    return transformers.BertForMaskedLM(transformers.BertConfig(**layers, **heads, **small))


MODELS = {
    "net": Net,
    "charlm": of_charlm,
    "gpt2": lambda: of_transformers("gpt2"),
    "llama": lambda: of_transformers("llama"),
    "bert": lambda: of_transformers("bert"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_the_weights_are_those_of_one_process_to_the_bit(tmp_path, name):
    """Most parameters take no memory before they are sharded; what is drawn is drawn in order."""
    run = built(MODELS[name])
    _, expected = run(tmp_path)

    for meta, weights in run_ranks(lambda: run(tmp_path / os.environ["RANK"], {"meta": True})):
        assert_same(weights, expected)
        assert sum(meta.values()) > len(meta) / 2


@pytest.mark.nightly
def test_a_run_goes_on_from_weights_that_were_never_drawn(tmp_path, monkeypatch):
    """They are read, each rank its shards; and the run ends as one that was never stopped."""
    given = {"options": {"meta": True}, "batch_size": 12}
    expected = run_ranks(train, tmp_path / "whole", **given)[0]
    run_ranks(train, tmp_path / "stopped", until="3ba", **given)

    def drawn(*_):
        raise AssertionError("weights were drawn")

    monkeypatch.setattr(DeferredModel, "fill", drawn)
    went_on = run_ranks(train, tmp_path / "stopped", **given)[0]

    with pytest.raises(RankError, match="weights were drawn"):
        run_ranks(train, tmp_path / "another", **given)
    assert_same(went_on, expected)


class Unwritten(nn.Module):
    """Takes its scale as the memory has it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.empty(3))

    def forward(self, inputs):
        return self.linear(inputs) * self.scale


def test_weights_that_nothing_writes_are_named(tmp_path):
    """With what to add."""
    with pytest.raises(RankError, match=r"write the weights of scale\n[\s\S]*nn.init.normal_"):
        run_ranks(built(Unwritten), tmp_path, {"meta": True})


class Orthogonal(nn.Linear):
    """Draws what a later number depends on."""

    def __init__(self):
        super().__init__(3, 3)
        orthogonal_(self.weight)


def test_weights_that_are_computed_from_others_are_refused(tmp_path):
    """Torch would leave them out in silence, and others would be trained."""
    with pytest.raises(RankError, match=r"SettingError: meta: a parameter is computed from others"):
        run_ranks(built(Orthogonal), tmp_path, {"meta": True})
