"""Modules and runs of Lightning's, each of which is trained by its own trainer and by ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import mse_loss
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

import eventloop_lightning
import eventloop_testing.case
from eventloop_lightning.accelerator import take_device

DEVICE = eventloop_testing.case.default_device
X = torch.randn(44, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))
QUIET = {
    "accelerator": "cpu" if DEVICE == "cpu" else "auto",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 3,
}


class Net(pl.LightningModule):
    """Dropout, batch norm and a shuffled loader: whatever is drawn otherwise shows."""

    def __init__(self, optimizers: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        hidden = (nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3))
        self.net = nn.Sequential(*hidden, nn.Linear(16, 1))
        self.optimizers_of = optimizers

    def training_step(self, batch, batch_idx):
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]), prog_bar=True)

    def configure_optimizers(self):
        make = self.optimizers_of
        return Adam(self.parameters(), 1e-2) if make is None else make(self)


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        pairs = batch.values() if isinstance(batch, dict) else [batch]
        return sum(mse_loss(self.net(inputs), targets) for inputs, targets in pairs)

    def configure_optimizers(self):
        return SGD(self.parameters(), 0.05)


class Gan(pl.LightningModule):
    def __init__(self, toggles: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggles = toggles
        self.generator = nn.Linear(3, 4)
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        real, noise = batch[0], torch.randn(len(batch[0]), 3, device=self.device)
        ones, zeros = real.new_ones(len(real), 1), real.new_zeros(len(real), 1)
        for_generator, for_critic = self.optimizers()
        self.step(for_generator, lambda: bce(self.critic(self.generator(noise)), ones))
        fake = self.generator(noise).detach()
        self.step(for_critic, lambda: bce(self.critic(real), ones) + bce(self.critic(fake), zeros))
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def step(self, optimizer, loss_of):
        if self.toggles:
            self.toggle_optimizer(optimizer)
        loss = loss_of()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        if self.toggles:
            self.untoggle_optimizer(optimizer)
        self.log(f"loss_of_{len(optimizer.param_groups[0]['params'])}", loss)

    def configure_optimizers(self):
        both = Adam(self.generator.parameters(), 1e-2), Adam(self.critic.parameters(), 1e-2)
        return list(both), [StepLR(both[1], 1, 0.5)]


class SharedGan(Gan):
    """Both optimizers move the critic's last bias."""

    def configure_optimizers(self):
        both, schedules = super().configure_optimizers()
        both[0].add_param_group({"params": [self.critic[2].bias], "lr": 1e-3})
        return both, schedules


class OwnStep(Net):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, (self.trainer.global_step + 1) / 5)
        optimizer.step(closure=optimizer_closure)


class WrappedClosure(Net):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=lambda: optimizer_closure())


class EverySecond(Net):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class NoLoss(Net):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


class Broadcasts(Net):
    def training_step(self, batch, batch_idx):
        return mse_loss(self.net(batch[0]), batch[1].squeeze(1))


class EndsEarly(Net):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 else None


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[1].eval()


class Moves(Net):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2, batch[1]]


class Stops(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.current_epoch == 1 and batch_idx == 2:
            self.trainer.should_stop = True


class StopsAt(Net):
    """Sets `should_stop` in a hook that comes before the first batch, or before it is trained on."""

    def __init__(self, hook: str, epoch: int = 0) -> None:
        super().__init__()
        self.hook, self.epoch = hook, epoch

    def stop_in(self, hook: str) -> None:
        if hook == self.hook and self.current_epoch == self.epoch:
            self.trainer.should_stop = True

    def on_fit_start(self):
        self.stop_in("on_fit_start")

    def on_train_start(self):
        self.stop_in("on_train_start")

    def on_train_epoch_start(self):
        self.stop_in("on_train_epoch_start")

    def on_train_batch_start(self, batch, batch_idx):
        self.stop_in("on_train_batch_start")


class Twice(SGD):
    """Evaluates its closure twice in a step, and moves the weights after each."""

    def step(self, closure):
        closure()
        super().step()
        loss = closure()
        super().step()
        return loss


class WithBackbone(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        return super().training_step((self.backbone(batch[0]), batch[1]), batch_idx)

    def configure_optimizers(self):
        return SGD(self.net.parameters(), 0.05)


class Measures(Net):
    """Logs metrics of torchmetrics, whole and of a step, and a collection of them."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanAbsoluteError()
        self.both = MetricCollection([MeanSquaredError(), MeanAbsoluteError()])
        self.val_error = MeanAbsoluteError()

    def training_step(self, batch, batch_idx):
        outputs = self.net(batch[0])
        self.error(outputs, batch[1])
        self.both.update(outputs, batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log_dict(self.both, on_step=False, on_epoch=True)
        return mse_loss(outputs, batch[1])

    def validation_step(self, batch, batch_idx):
        self.val_error(self.net(batch[0]), batch[1])
        self.log("val_error", self.val_error)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(list(DATA))


def by_step(module):
    optimizer = SGD(module.parameters(), 0.05, momentum=0.9)
    return [optimizer], [{"scheduler": StepLR(optimizer, 2), "interval": "step", "frequency": 3}]


def by_epoch(module):
    optimizer = SGD(module.parameters(), 0.05)
    return [optimizer], [ExponentialLR(optimizer, 0.5)]


def one_cycle(module):
    optimizer = SGD(module.parameters(), 0.05)
    num_steps = int(module.trainer.estimated_stepping_batches)
    scheduler = {"scheduler": OneCycleLR(optimizer, 0.1, total_steps=num_steps), "interval": "step"}
    return {"optimizer": optimizer, "lr_scheduler": scheduler}


def plateau(interval: str, monitor: str, **more: Any) -> Callable[[Any], Any]:
    def make(module):
        optimizer = SGD(module.parameters(), 0.05)
        course = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        config = {"scheduler": course, "interval": interval, "monitor": monitor, **more}
        return {"optimizer": optimizer, "lr_scheduler": config}

    return make


def lbfgs(module):
    return LBFGS(module.parameters(), 0.1, max_iter=3)


def twice(module):
    return Twice(module.parameters(), 0.01, momentum=0.9)


def loaders() -> tuple[Any, Any]:
    return DataLoader(DATA, 8, shuffle=True), DataLoader(DATA, 10)


def two_eval_loaders() -> tuple[Any, Any]:
    return loaders()[0], [loaders()[1], DataLoader(DATA, 4)]


def stream() -> tuple[Any, Any]:
    return DataLoader(Stream(), 8), DataLoader(DATA, 10)


def side_by_side() -> tuple[Any, Any]:
    return {"a": DataLoader(DATA, 8, shuffle=True), "b": DataLoader(DATA, 5, shuffle=True)}, None


def combined(mode: Any) -> Callable[[], tuple[Any, Any]]:
    return lambda: (CombinedLoader(side_by_side()[0], mode), None)


def without_eval() -> tuple[Any, Any]:
    return loaders()[0], None


@dataclass
class Case:
    module: Callable[[], pl.LightningModule]
    data: Callable[[], tuple[Any, Any]] = loaders
    arguments: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list


def swa():
    return [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)]


STOPPING = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")
CASES = {
    "plain": Case(Net),
    "a loss that broadcasts": Case(Broadcasts),
    "accumulated": Case(Net, arguments={"accumulate_grad_batches": 4}),
    "clipped by norm": Case(Net, arguments={"gradient_clip_val": 0.1}),
    "clipped by value": Case(
        Net, arguments={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    ),
    "schedule by step": Case(lambda: Net(by_step), arguments={"accumulate_grad_batches": 2}),
    "schedule by epoch": Case(lambda: Net(by_epoch)),
    "one cycle": Case(lambda: Net(one_cycle)),
    "plateau by step": Case(lambda: Net(plateau("step", "loss", frequency=2))),
    "plateau by epoch": Case(lambda: Net(plateau("epoch", "val_loss"))),
    "LBFGS": Case(lambda: Net(lbfgs)),
    "a closure twice": Case(lambda: Net(twice)),
    "a closure twice, clipped": Case(lambda: Net(twice), arguments={"gradient_clip_val": 0.1}),
    "a closure twice, accumulated": Case(
        lambda: Net(twice), arguments={"accumulate_grad_batches": 2}
    ),
    "two optimizers, toggled": Case(Gan),
    "two optimizers": Case(lambda: Gan(toggles=False)),
    "two optimizers that share a parameter": Case(lambda: SharedGan(toggles=False)),
    "own optimizer_step": Case(OwnStep),
    "closure in a closure": Case(WrappedClosure),
    "a step every second batch": Case(EverySecond),
    "training_step returns None": Case(NoLoss),
    "on_train_batch_start returns -1": Case(lambda: EndsEarly(by_epoch)),
    "a layer in evaluation mode": Case(Frozen),
    "on_after_batch_transfer": Case(Moves),
    "should_stop": Case(Stops),
    **{f"should_stop in {hook}": Case(lambda hook=hook: StopsAt(hook)) for hook in STOPPING},
    "should_stop in a later epoch": Case(lambda: StopsAt("on_train_epoch_start", 1)),
    "should_stop, with min_steps": Case(
        lambda: StopsAt("on_train_start"), arguments={"min_steps": 7}
    ),
    "max_steps=0": Case(Net, arguments={"max_steps": 0}),
    "max_epochs=0": Case(Net, arguments={"max_epochs": 0}),
    "limit_train_batches=0": Case(Net, arguments={"limit_train_batches": 0}),
    "no time": Case(Net, arguments={"max_time": {"seconds": 0}}),
    "min_epochs": Case(Stops, arguments={"min_epochs": 3}),
    "max_steps": Case(Net, arguments={"max_epochs": -1, "max_steps": 8}),
    "max_epochs and max_steps": Case(lambda: Net(by_epoch), arguments={"max_steps": 8}),
    "limits": Case(Net, arguments={"limit_train_batches": 3, "limit_val_batches": 2}),
    "a part of an epoch": Case(Net, arguments={"limit_train_batches": 0.5}),
    "val_check_interval, batches": Case(
        lambda: Net(plateau("epoch", "val_loss")), arguments={"val_check_interval": 2}
    ),
    "val_check_interval, a part": Case(Net, arguments={"val_check_interval": 0.5}),
    "validation over epochs": Case(
        Net, arguments={"val_check_interval": 4, "check_val_every_n_epoch": None}
    ),
    "every second epoch": Case(Net, arguments={"check_val_every_n_epoch": 2}),
    "torchmetrics": Case(Measures),
    "no validation": Case(Net, without_eval),
    "fast_dev_run": Case(Net, arguments={"fast_dev_run": 2}),
    "overfit_batches": Case(Net, arguments={"overfit_batches": 2}),
    "reloaded": Case(Net, arguments={"reload_dataloaders_every_n_epochs": 1}),
    "two eval loaders": Case(Net, two_eval_loaders),
    "a stream": Case(Net, stream, {"accumulate_grad_batches": 4}),
    "loaders by name": Case(Plain, side_by_side),
    "CombinedLoader, max_size_cycle": Case(Plain, combined("max_size_cycle")),
    "CombinedLoader, min_size": Case(Plain, combined("min_size")),
    "float64": Case(Net, arguments={"precision": "64-true"}),
    "bf16-true": Case(Net, arguments={"precision": "bf16-true"}),
    "bf16": Case(Net, arguments={"precision": "bf16-mixed"}),
    "SWA": Case(lambda: Net(by_epoch), arguments={"max_epochs": 5}, callbacks=swa),
    "SWA without batch norm": Case(Plain, callbacks=swa),
    "WeightAveraging": Case(Net, callbacks=lambda: [EMAWeightAveraging(decay=0.9)]),
    "BackboneFinetuning": Case(
        WithBackbone, callbacks=lambda: [BackboneFinetuning(1, verbose=False)]
    ),
    "EarlyStopping": Case(
        lambda: Net(lambda module: SGD(module.parameters(), 0.0)),
        arguments={"max_epochs": 8},
        callbacks=lambda: [EarlyStopping("val_loss", patience=1)],
    ),
    "GradientAccumulationScheduler": Case(
        Net, callbacks=lambda: [GradientAccumulationScheduler({0: 1, 2: 3})]
    ),
}


def on_the_device(trainer: pl.Trainer) -> pl.Trainer:
    """Has a trainer train on the pretend accelerator under `--device`; Lightning's can't choose it."""
    if DEVICE == "pretend":
        take_device(trainer.strategy, torch.device("pretend", 0))
    return trainer


def fitted(
    trainer: type[pl.Trainer],
    case: Case,
    *,
    seed: int = 1,
    callbacks: list[Any] | None = None,
    ckpt_path: str | None = None,
    **more: Any,
) -> tuple[pl.LightningModule, pl.Trainer]:
    """Returns what a trainer, theirs or ours, makes of a case, and the trainer."""
    pl.seed_everything(seed, verbose=False)
    module = case.module()
    if trainer is eventloop_lightning.Trainer:
        more["settings"] = {"autoload": False, **more.get("settings", {})}
    arguments = {**QUIET, **case.arguments, **more}
    made = trainer(callbacks=[*case.callbacks(), *(callbacks or [])], **arguments)
    on_the_device(made)
    made.fit(module, *case.data(), ckpt_path=ckpt_path)
    return module, made


def told(module: pl.LightningModule, trainer: pl.Trainer) -> dict[str, Any]:
    """Returns all that must be equal: weights, metrics, counts, and the next random number."""
    loop = trainer.fit_loop.epoch_loop
    rates = [group["lr"] for one in trainer.optimizers for group in one.param_groups]
    return {
        **{f"weights.{name}": one.tolist() for name, one in module.state_dict().items()},
        **{f"metrics.{name}": one.item() for name, one in trainer.callback_metrics.items()},
        "rates": rates,
        "counts": (trainer.global_step, trainer.current_epoch, loop._batches_that_stepped),
        "next random number": torch.rand(1).item(),
    }
