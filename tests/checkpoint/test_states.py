"""The states of a checkpoint: weights that are read when a model takes them, and generators of ranks that are new."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torchmetrics
from safetensors.torch import save_file
from torch import Tensor, nn

from eventloop import Trainer, hookimpl
from eventloop.checkpoint.checkpoint_export import saved_weights_at
from eventloop.checkpoint.states import UnreadTensor, counts_of, put_counts, unread
from eventloop_testing import run_ranks, tiny_task


class Renames(nn.Module):
    """Takes weights of an earlier version: other names, another shape, another scale."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _take(_module, weights, prefix, *_):
        assert all(isinstance(one, torch.Tensor) for one in weights.values())
        weights["linear.weight"] = weights.pop("old").reshape(3, 3).t()
        weights["linear.bias"].mul_(2)
        weights["linear.bias"][1:].zero_()

    def forward(self, inputs):
        return self.linear(inputs)


def test_what_a_model_does_to_weights_before_it_takes_them_is_done(
    tmp_path, make_trainer, make_task
):
    """In place, too: what isn't read yet is a tensor like any other."""
    save_file({"old": torch.arange(9.0), "linear.bias": torch.ones(3)}, tmp_path / "m.safetensors")
    trainer = make_trainer(make_task(model=Renames()))

    trainer.load_weights(tmp_path / "m.safetensors")

    linear = trainer.state.model.linear
    assert torch.equal(linear.weight.cpu(), torch.arange(9.0).view(3, 3).t())
    assert linear.bias.tolist() == [2, 0, 0]


class KeepsWhatItGets(nn.Module):
    """As modules with buffers of no fixed size are loaded, torchmetrics say."""

    def __init__(self, how):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.how = how

    def _load_from_state_dict(self, state_dict, prefix, *others):
        self.how(self, state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *others)


def assign(module, saved):
    module.seen = saved


def assign_data(module, saved):
    module.seen.data = saved.to(module.seen.device)


def make_parameter(module, saved):
    del module.seen
    module.seen = nn.Parameter(saved)


def copy_by_numpy(module, saved):
    module.seen = torch.from_numpy(saved.numpy().copy())


def copy_deep(module, saved):
    module.seen = torch.tensor(copy.deepcopy(saved).tolist())


@pytest.mark.parametrize("how", [assign, assign_data, make_parameter, copy_by_numpy, copy_deep])
def test_a_module_that_loads_itself_gets_plain_tensors(how, tmp_path, make_trainer, make_task):
    """What isn't read yet has no memory: assigned to `.data`, it ended the process."""
    model = nn.Sequential(nn.Linear(3, 3), KeepsWhatItGets(how))
    save_file(
        {**model[0].state_dict(prefix="0."), "1.seen": torch.arange(4.0)},
        tmp_path / "m.safetensors",
    )
    trainer = make_trainer(make_task(model=model))

    trainer.load_weights(tmp_path / "m.safetensors")

    seen = trainer.state.model[1].seen
    assert type(seen) in (Tensor, nn.Parameter)
    assert seen.tolist() == [0, 1, 2, 3]


def test_a_tensor_that_is_copied_from_is_read_and_let_go(tmp_path):
    """Any other operation keeps it, or what is written into it would be lost."""
    weight = torch.arange(9.0).view(3, 3)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    weights = unread(saved_weights_at(tmp_path / "model.safetensors"))
    one, target = weights["weight"], torch.zeros(3, 3, dtype=torch.float64)

    target.copy_(one)

    assert isinstance(one, UnreadTensor)
    assert (one.shape, one.dtype, one.is_meta) == ((3, 3), torch.float32, False)
    assert torch.equal(target.float(), weight)
    assert one._loaded_entries is None
    one += 1
    assert torch.equal(one + 0, weight + 1)
    assert torch.equal(target.copy_(one).float(), weight + 1)


def draws(name, folder, until, **given):
    """Trains on this rank; returns what a generator of all ranks and one of this rank draw."""
    drawn = []

    class Noise:
        @hookimpl
        def before_train_batch(self, state):
            for alike in (True, False):
                generator = state.generator("noise", alike=alike)
                drawn.append(torch.rand(1, generator=generator).item())

    with Trainer(tiny_task(), algorithms=[Noise()], device="cpu", autoload=False,
                 run_dir=Path(folder) / name, max_duration="3ep", **given) as trainer:  # fmt: skip
        trainer.fit(until=until)
    return drawn[::2], drawn[1::2]


def test_a_generator_may_draw_alike_on_all_ranks(tmp_path):
    """Noise on weights that differs by rank would let the ranks drift apart."""
    (alike, own), (other_alike, other_own) = run_ranks(draws, "run", tmp_path, "2ep")

    assert alike == other_alike
    assert own[0] != other_own[0]
    assert alike[0] != own[0]


def test_a_generator_that_is_alike_stays_so_when_a_rank_is_new(tmp_path):
    """One rank began the run, two go on with it: the second takes the first one's place in it."""
    alone, _ = draws("run", tmp_path, "1ep")

    (alike, _), (other, _) = run_ranks(draws, "run", tmp_path, "2ep")

    assert alike == other
    assert not set(alike) & set(alone)


class Texts(torchmetrics.Metric):
    """Keeps texts, which have no device."""

    def __init__(self):
        super().__init__()
        self.add_state("texts", [], dist_reduce_fx=None)

    def update(self, text):
        self.texts.append(text)

    def compute(self):
        return torch.tensor(len(self.texts))


def test_texts_that_a_metric_keeps_are_restored_as_they_are():
    """Only tensors are moved to the device."""
    saved, restored = Texts(), Texts()
    saved.update("a")

    put_counts({"texts": restored}, counts_of({"texts": saved}))

    assert (restored.texts, int(restored.compute())) == (["a"], 1)
