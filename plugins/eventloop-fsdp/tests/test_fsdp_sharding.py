"""Which submodules are sharded each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eventloop import SettingError
from eventloop_fsdp import Fsdp, parts_of
from eventloop_testing import isolated_trainer, run_ranks, tiny_task


class Block(nn.Module):
    """What a transformer repeats; its own Sequential stays inside of it."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


def names(model, class_names=None):
    found = parts_of(model, class_names)
    return [name for name, one in model.named_modules() if any(one is part for part in found)]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.ModuleDict({"stem": nn.Linear(4, 4), "blocks": nn.ModuleList([Block(), Block()])}),
         ["blocks.0", "blocks.1"]),
        (nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())),
         ["0.0", "0.1", "1.0", "1.1"]),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU(), nn.LayerNorm(4)), []),
        (nn.Linear(4, 4), []),
    ],
)  # fmt: skip
def test_what_repeats_is_sharded_by_itself(model, expected):
    """The outermost that repeat, never a container, and nothing without parameters."""
    assert names(model) == expected


def test_classes_may_be_named():
    """Inside of each other, too."""
    model = nn.Sequential(Block(), nn.LayerNorm(4))

    assert names(model, ["Block", "Linear"]) == ["0", "0.mlp.0", "0.mlp.2"]


def test_a_layer_that_shares_a_parameter_belongs_to_the_root():
    """It would have to be gathered with another; named, it is an error."""
    model = nn.Sequential(Block(), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    model[1][0].weight = model[0].mlp[0].weight

    assert names(model) == ["0.mlp.2", "1.1"]
    with pytest.raises(SettingError, match="a Block shares parameters"):
        parts_of(model, ["Block"])


def test_a_class_that_nobody_is_is_an_error():
    """With the closest."""
    with pytest.raises(SettingError, match="of class 'Blok'; the closest is 'Block'"):
        parts_of(nn.Sequential(Block()), ["Blok"])


def test_a_sharded_parameter_without_an_optimizer_is_noted(tmp_path):
    """Sharding puts other parameters in the place of the model's; those are what optimizers have."""

    def notes(folder, optimizer):
        task = tiny_task(optimizer=optimizer)
        with isolated_trainer(folder, task, algorithms=[Fsdp()]) as trainer:
            return [note for note in trainer.notes if "in no optimizer" in note]

    def whole(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def part(model):
        return torch.optim.SGD([model[0].weight], lr=0.1)

    assert run_ranks(lambda: notes(tmp_path, whole)) == [[], []]
    for rank_notes in run_ranks(lambda: notes(tmp_path, part)):
        assert "in no optimizer, so they stay as they are: 0.bias" in rank_notes[0]
