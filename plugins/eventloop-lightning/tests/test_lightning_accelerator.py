"""On an accelerator that Lightning has no object for, but torch has."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lit_cases import CASES, DATA
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

import eventloop_lightning
from eventloop_lightning.accelerator import take_device
from eventloop_lightning.self_log_results import put_counts
from eventloop_testing import counted_waits, isolated_trainer
from eventloop_testing import pretend_device as switched_on

QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_epochs": 2, "settings": {"autoload": False},
}  # fmt: skip


class Module(pl.LightningModule):
    """Notes where it trains, and in which precision."""

    def __init__(self, waits=()):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
        self.waits, self.num_waits, self.seen = waits, [], set()

    def on_train_batch_start(self, batch, batch_idx):
        self.num_waits.append(len(self.waits))

    def training_step(self, batch, batch_idx):
        outputs = self.net(batch[0])
        self.seen.add((outputs.device, outputs.dtype))
        self.log("loss", loss := mse_loss(outputs.float(), batch[1]))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(DATA, 8)


def trained(waits=(), **more):
    module = Module(waits)
    pl.seed_everything(1, verbose=False)
    eventloop_lightning.Trainer(**QUIET | more).fit(module)
    return module


@pytest.mark.parametrize("given", ["auto", "gpu"])
def test_it_trains_there_to_the_bits_of_the_cpu(given):
    """The accelerator of torch is found; random numbers are drawn as on the host."""
    expected = trained(accelerator="cpu")

    with switched_on(draws_from_host=True) as device:
        actual = trained(accelerator=given)

    assert actual.seen == {(device, torch.float32)}
    assert expected.seen == {(torch.device("cpu"), torch.float32)}
    torch.testing.assert_close(actual.state_dict(), expected.state_dict(), rtol=0, atol=0)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", [one for one in CASES if not one.startswith("bf16")])
def test_modules_of_all_kinds_have_the_bits_of_the_cpu_there(name):
    """Optimizers by hand and twice a step, averages, metrics; in bf16 the bits are others."""

    def weights(accelerator):
        case = CASES[name]
        pl.seed_everything(1, verbose=False)
        module = case.module()
        arguments = QUIET | case.arguments | {"accelerator": accelerator}
        trainer = eventloop_lightning.Trainer(callbacks=case.callbacks(), **arguments)
        trainer.fit(module, *case.data())
        return {name: one.cpu() for name, one in module.state_dict().items()}

    expected = weights("cpu")
    with switched_on(draws_from_host=True):
        actual = weights("gpu")

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_random_numbers_are_those_of_lightnings_own_trainer(pretend_device):
    """The generator of the device is where `seed_everything` has put it, as the others are."""
    module = Module()
    pl.seed_everything(1, verbose=False)
    theirs = pl.Trainer(**{name: one for name, one in QUIET.items() if name != "settings"})
    take_device(theirs.strategy, pretend_device)
    theirs.fit(module)

    actual = trained()

    torch.testing.assert_close(actual.state_dict(), module.state_dict(), rtol=0, atol=0)


def test_autocast_is_that_of_the_device(pretend_device):
    """Lightning would have one of CUDA's."""
    assert trained(precision="bf16-mixed").seen == {(pretend_device, torch.bfloat16)}


def test_no_step_reads_the_device(pretend_device):
    """Between the beginnings of two batches, with a number that is logged."""
    with counted_waits() as waits:
        module = trained(waits, log_every_n_steps=100)

    assert len(module.num_waits) == 12
    assert module.num_waits[1] == module.num_waits[5]  # in the first epoch


def test_metrics_of_a_module_go_on_where_they_are(pretend_device):
    """A checkpoint has their sums on the host."""
    module = Module()
    module.error = MeanSquaredError()
    module.to(pretend_device)
    sums = {"sum_squared_error": torch.tensor(3.0), "total": torch.tensor(1)}

    put_counts(module, {"error": {"values": sums, "updates": 1}})

    module.error(*torch.tensor([[1.0], [0.0]], device=pretend_device))
    assert module.error.compute().item() == 2


@pytest.mark.parametrize("device", ["cpu", "pretend"])
def test_the_device_of_the_settings_counts(tmp_path, pretend_device, device):
    """Also the CPU, where there is an accelerator."""
    task = eventloop_lightning.task(module := Module())

    with isolated_trainer(tmp_path, task, device=device, max_duration="2ba") as trainer:
        trainer.fit()

    assert {one.type for one, _ in module.seen} == {device}


def test_an_accelerator_that_is_not_there_is_not_replaced(pretend_device):
    """CUDA was asked for."""
    with pytest.raises(Exception, match="accelerator is not available"):
        trained(accelerator="cuda")


@pytest.mark.about_cpu
def test_a_gpu_that_is_not_there_is_not_the_cpu():
    """Lightning says so, as by itself."""
    with pytest.raises(Exception, match="No supported gpu backend"):
        trained(accelerator="gpu")
