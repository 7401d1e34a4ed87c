"""The plugin in a training: less is kept, and no bit of the result is another."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from eventloop import PluginError, hookimpl
from eventloop_checkpointing import Checkpointing
from eventloop_checkpointing.layers import matching_layers, repeated_layers
from eventloop_testing import differences, isolated_trainer, run_ranks, tiny_task


class Block(nn.Module):
    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), norm(32), nn.GELU(), nn.Dropout(0.3))
        self.out = nn.Linear(32, 8)

    def forward(self, x, scale=1.0):
        return x + scale * self.out(self.inner(x))


def model(norm=nn.BatchNorm1d):
    blocks = nn.Sequential(*(Block(norm) for _ in range(4)))
    return nn.Sequential(nn.Linear(3, 8), blocks, nn.Linear(8, 3))


class Kept:
    """Adds up what each forward pass keeps for the backward pass, in bytes."""

    name = "kept"

    def __init__(self):
        self.num_bytes = 0

    def _count(self, tensor):
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    @hookimpl(wrapper=True)
    def forward(self, state):
        # The weights are there in any case.
        with saved_tensors_hooks(
            lambda one: one if isinstance(one, nn.Parameter) else self._count(one), lambda one: one
        ):
            return (yield)


def fit(folder, *algorithms, until=None, norm=nn.BatchNorm1d, **given):
    given = {"max_duration": "2ep"} | given
    task = tiny_task(model=lambda: model(norm))
    with isolated_trainer(folder, task, algorithms=algorithms, **given) as trainer:
        trainer.fit(until=until)
    return trainer


def contents(trainer):
    """Everything that a checkpoint would hold of the model, and where the generators stand."""
    return {**trainer.state.model.state_dict(), "generator": torch.get_rng_state()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keep", ["nothing", "matmuls"])
@pytest.mark.parametrize(
    "given",
    [{}, {"microbatch_size": 2}, {"precision": "bf16"}, {"microbatch_size": "auto"}],
    ids=["fp32", "microbatches", "bf16", "auto"],
)
def test_the_weights_are_those_without(tmp_path, given, keep):
    """Dropout draws the same again, and batch norms move once."""
    plain = contents(fit(tmp_path / "plain", **given))
    algorithm = Checkpointing(keep=keep)

    ours = contents(fit(tmp_path / "ours", algorithm, **given))

    assert list(differences(plain, ours)) == []
    assert algorithm.header_note().startswith("1.0, 1.1 and 2 more layers run twice")


def test_less_is_kept(tmp_path):
    """In this order: everything, every second layer, products alone, inputs alone."""
    kinds = [None, Checkpointing(every=2), Checkpointing(keep="matmuls"), Checkpointing()]
    kept = []
    for idx, one in enumerate(kinds):
        counts = Kept()
        fit(tmp_path / str(idx), counts, *([one] if one else []), max_duration="1ba")
        kept.append(counts.num_bytes)

    whole, half, products, inputs = kept
    assert inputs < half < whole
    assert inputs <= products < whole
    assert inputs < whole / 4


COMPILED = {"compile": {"backend": "aot_eager"}, "norm": nn.LayerNorm}
BY_LAYER = {"compile": {"backend": "aot_eager", "layers": True}, "norm": nn.LayerNorm}


@pytest.mark.sampled(8)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # asked for by torch's compiler
@pytest.mark.parametrize("given", [{}, COMPILED, BY_LAYER], ids=["plain", "compile", "layers"])
def test_a_run_that_goes_on_ends_the_same(tmp_path, given):
    """With the layers changed anew; a compiled model is compiled with them."""
    whole = fit(tmp_path / "whole", Checkpointing(), **given)
    given = {"checkpoint_interval": "1ba", **given}
    fit(tmp_path / "parts", Checkpointing(), until="5ba", **given)

    parts = fit(tmp_path / "parts", Checkpointing(), **given)

    assert list(differences(contents(whole), contents(parts))) == []


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_statistics_of_batch_norms_are_not_compiled(tmp_path):
    """The compiled backward pass would move them a second time, in silence."""
    with pytest.raises(PluginError, match=r"1\.0 has batch norms"):
        fit(tmp_path, Checkpointing(), compile=True)


def on_rank(folder, sharded):
    from eventloop_fsdp import Fsdp

    algorithms = [Checkpointing(), *([Fsdp()] if sharded else [])]
    trainer = fit(folder, *algorithms, precision="fp32")
    return {
        name: one.full_tensor() if hasattr(one, "full_tensor") else one
        for name, one in trainer.state.model.named_parameters()
    }


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_ranks_end_alike(tmp_path, sharded):
    """A layer whose weights were freed is gathered again for its second pass."""
    first, second = run_ranks(on_rank, tmp_path, sharded)

    assert list(differences(first, second)) == []
    assert all(torch.isfinite(one).all() for one in first.values())


def test_the_layers_of_a_pattern_are_the_outermost():
    """A part of a layer that runs again would run a third time."""
    assert matching_layers(model(), "1.*") == ["1.0", "1.1", "1.2", "1.3"]
    assert repeated_layers(model()) == ["1.0", "1.1", "1.2", "1.3"]
    assert repeated_layers(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))) == []


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path):
    """The run would have the memory that it was to save."""
    with pytest.raises(PluginError, match="no module's name matches layers='blocks"):
        fit(tmp_path, Checkpointing(layers="blocks.*"))


def test_a_model_without_repeated_layers_is_left_alone(tmp_path):
    """It stands off, with the reason."""
    with isolated_trainer(tmp_path, tiny_task(), algorithms=[]) as trainer:
        assert "repeats no layers" in Checkpointing().unsuitable(trainer.state)


@pytest.mark.parametrize("options", [{"every": 0}, {"every": True}, {"keep": "all"}])
def test_options_are_checked(options):
    """Before anything is built."""
    with pytest.raises(ValueError, match="is n"):
        Checkpointing(**options)
