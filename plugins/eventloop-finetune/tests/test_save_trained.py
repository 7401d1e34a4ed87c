"""Checkpoints without what is frozen, and the runs that go on from them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import CheckpointError, PluginError, Task, hookimpl
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.cli.main import main
from eventloop.toolbox import local
from eventloop_ema import Ema
from eventloop_finetune import SaveTrained, Unfreeze, freeze
from eventloop_fsdp import Fsdp
from eventloop_testing import isolated_trainer, run_ranks

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.argmax(1))


def network(base=0.1):
    """Two blocks that repeat, which are frozen, and a head; a batch norm counts what it sees."""
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(3, 3))
    for block in blocks:
        nn.init.constant_(block[0].weight, base)
    freeze(model, "0", "1")
    return model


FROZEN = {
    f"{block}.{name}" for block in (0, 1) for name in ("0.weight", "0.bias", "1.weight", "1.bias")
}


class Ends:
    """Ends a run before a batch, on all ranks."""

    name = "ends"
    free_options = ("batch",)

    def __init__(self, batch=None):
        self.batch = batch

    @hookimpl
    def batch_start(self, state):
        if state.clock.batch == self.batch:
            raise EOFError


def trainer_of(folder, *plugins, batch=None, model=network, **given):
    task = Task(
        model=model,
        loss=cross_entropy,
        train_dataloader=lambda: DataLoader(DATA, 8, shuffle=True),
        eval_dataloaders=lambda: {"valid": DataLoader(DATA, 8)},
        test_dataloaders=lambda: {"test": DataLoader(DATA, 8)},
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    )
    given = {"max_duration": "2ep", "checkpoint_interval": "2ba"} | given
    return isolated_trainer(folder, task, algorithms=[*plugins, Ends(batch)], **given)


def fit(folder, *plugins, **given):
    """Trains; gives what this rank holds of the weights."""
    with contextlib.suppress(EOFError), trainer_of(folder, *plugins, **given) as trainer:
        trainer.fit()
    return {name: local(one).clone() for name, one in trainer.state.model.state_dict().items()}


def last(folder):
    return max((folder / "run" / "checkpoints").glob("ba*"))


def test_a_checkpoint_holds_what_is_trained_and_a_digest_of_the_rest(tmp_path):
    """Buffers are saved, too: a batch norm's statistics move though it is frozen."""
    fit(tmp_path, SaveTrained())
    found = read_checkpoint(last(tmp_path))

    whole = network().state_dict().keys()
    assert found.parts["model"].keys() == whole - FROZEN
    assert found.parts["optimizers"]["adamw"]["state"].keys() == {8, 9}
    assert len(found.facts["left_out"]) == 16


@pytest.mark.sampled(5)
@pytest.mark.parametrize("strategy", ["one process", "ddp", "fsdp", "fsdp meta", "fsdp meta file"])
def test_a_run_that_goes_on_ends_with_the_same_bits(tmp_path, strategy):
    """What no checkpoint holds is built again, drawn or read from its file as before."""
    file = tmp_path / "base.safetensors"
    save_file(network_drawn().state_dict(), file)
    meta: dict = {"meta": True}
    of_file = meta | {"weights": str(file)}
    fsdp = {"fsdp": [{}], "fsdp meta": [meta], "fsdp meta file": [of_file]}.get(strategy, [])
    plugins = lambda: [SaveTrained(), *(Fsdp(**one) for one in fsdp)]  # noqa: E731
    model = network_drawn if "meta" in strategy else network

    def run(folder, **given):
        def train():
            return fit(tmp_path / folder, *plugins(), model=model, **given)

        return train() if strategy == "one process" else run_ranks(train)

    expected = run("one")
    run("two", batch=3)
    actual = run("two")

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert not read_checkpoint(last(tmp_path / "two")).parts["model"].keys() & FROZEN


def network_drawn():
    """Likewise, with what can be drawn once it is sharded."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3)) for _ in range(2)), nn.Linear(3, 3))
    freeze(model, "0", "1")
    return model


@pytest.mark.nightly
def test_one_process_goes_on_with_what_two_sharded_ranks_saved(tmp_path):
    """The digest of shards is that of whole weights."""
    run_ranks(lambda: fit(tmp_path, SaveTrained(), Fsdp(), batch=5))

    with trainer_of(tmp_path / "one", SaveTrained()) as trainer:
        trainer.load_weights(last(tmp_path))
        found = trainer.state.model.state_dict()

    saved = read_checkpoint(last(tmp_path)).parts["model"]
    found = {name: found[name].cpu() for name in saved}
    torch.testing.assert_close(found, saved, rtol=0, atol=0)


def test_other_weights_than_it_was_saved_with_are_refused(tmp_path):
    """A head on another backbone gives anything; to resume and to load it are refused alike."""
    fit(tmp_path, SaveTrained(), batch=5)
    other = {"model": lambda: network(0.2)}

    with pytest.raises(
        CheckpointError, match="differ from the weights that it leaves out: their digest"
    ) as caught:
        fit(tmp_path, SaveTrained(), **other)
    assert "the same files" in str(caught.value)
    with (
        trainer_of(tmp_path / "other", SaveTrained(), **other) as trainer,
        pytest.raises(CheckpointError, match="differ from the weights that it leaves out"),
    ):
        trainer.load_weights(last(tmp_path))
    with trainer_of(tmp_path / "same") as trainer:  # without the plugin, too
        trainer.load_weights(last(tmp_path))
        loaded = trainer.state.model.state_dict()
    torch.testing.assert_close(
        loaded["2.weight"].cpu(), read_checkpoint(last(tmp_path)).parts["model"]["2.weight"]
    )


def test_the_best_weights_and_exports_are_whole(tmp_path, capsys):
    """Test sets are evaluated with the head of the best evaluation on the backbone that is there."""
    best = {"checkpoint_best": "valid/loss", "eval_interval": "2ba", "checkpoint_interval": "2ba"}
    with trainer_of(tmp_path, SaveTrained(), Ema(), **best) as trainer:
        result = trainer.fit()
        path = trainer.export(tmp_path / "model.safetensors")
    with trainer_of(tmp_path / "other") as trainer:
        trainer.load_weights(path)

    assert result.tested_with is not None
    assert main(["export", str(last(tmp_path)), str(tmp_path / "of.safetensors")]) != 0
    assert "--export" in capsys.readouterr().err


class Moves:
    """Changes what is frozen."""

    name = "moves"

    @hookimpl
    def batch_end(self, state):
        with torch.no_grad():
            state.model[0][0].weight.add_(1)


def test_what_is_left_out_and_changes_is_an_error(tmp_path):
    """No checkpoint would have it, and no run could go on."""
    with pytest.raises(PluginError, match=r"'0.0.weight' has changed in training") as caught:
        fit(tmp_path, SaveTrained(), Moves())
    assert "save-trained" in str(caught.value)


def test_what_thaws_is_saved_from_then_on(tmp_path):
    """Its digest isn't compared any more; a resumed run has it from the checkpoint."""
    thaws = lambda: [SaveTrained(), Unfreeze({"2.weight": "1ep"})]  # noqa: E731
    expected = fit(tmp_path / "one", *thaws())
    fit(tmp_path / "two", *thaws(), batch=5)
    assert "2.weight" not in read_checkpoint(last(tmp_path / "two")).parts["model"]

    fit(tmp_path / "two", *thaws(), batch=11)
    assert "2.weight" in read_checkpoint(last(tmp_path / "two")).parts["model"]
    torch.testing.assert_close(fit(tmp_path / "two", *thaws()), expected, rtol=0, atol=0)
