"""Hooks of module and callbacks come in Lightning's order, and find the trainer as it would be."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lit_cases import CASES, STOPPING, Case, Gan, Net, fitted

import eventloop_lightning

OF_MODULE = (
    *(name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(kind)),
    "configure_optimizers",
    "configure_callbacks",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "training_step",
    "validation_step",
    "backward",
)
OF_CALLBACK = [name for name in vars(pl.Callback) if name.startswith("on_")] + ["setup", "teardown"]
# eventloop builds all that a run needs before the run begins, the loaders among it.
EARLIER = ("train_dataloader", "val_dataloader")
RECORDED = (
    "plain",
    "accumulated",
    "clipped by norm",
    "schedule by step",
    "plateau by epoch",
    "plateau by step",
    "LBFGS",
    "two optimizers, toggled",
    "own optimizer_step",
    "training_step returns None",
    "on_train_batch_start returns -1",
    "a closure twice",
    "should_stop",
    *(f"should_stop in {hook}" for hook in STOPPING),
    "max_steps=0",
    "no time",
    "min_epochs",
    "max_steps",
    "max_epochs and max_steps",
    "val_check_interval, batches",
    "two eval loaders",
    "a stream",
    "fast_dev_run",
)


def recording(kind: type, names: Any, told: list[Any]) -> type:
    """Returns a class of which each of these methods notes its call, and the trainer's state."""

    def noted(name: str) -> Any:
        method = getattr(kind, name)

        @functools.wraps(method)
        def call(self, *args: Any, **kwargs: Any) -> Any:
            trainer = args[0] if isinstance(self, pl.Callback) else self.trainer
            told.append((kind.__name__, name, numbers_in(args), *seen_of(trainer, name)))
            return method(self, *args, **kwargs)

        return call

    return type(kind.__name__, (kind,), {name: noted(name) for name in names})


def numbers_in(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one for one in args if isinstance(one, int | str))


def seen_of(trainer: pl.Trainer, name: str) -> tuple[Any, ...]:
    known = () if name in ("setup", "teardown") else sorted(trainer.callback_metrics)
    last = trainer.is_last_batch if name.startswith("on_train_batch") else None
    stepped = trainer.fit_loop.epoch_loop._batches_that_stepped
    return trainer.global_step, trainer.current_epoch, trainer.state.stage, last, stepped, known


def order_under(trainer: type[pl.Trainer], case: Case) -> list[Any]:
    told: list[Any] = []
    kind = type(case.module())
    names = [name for name in dict.fromkeys(OF_MODULE) if callable(getattr(kind, name, None))]
    names = [name for name in names if not name.startswith("_")]

    def module() -> pl.LightningModule:
        made = case.module()
        made.__class__ = recording(kind, names, told)
        return made

    watching = recording(pl.Callback, OF_CALLBACK, told)()
    fitted(trainer, Case(module, case.data, case.arguments), callbacks=[watching])
    return [one for one in told if one[1] not in EARLIER]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", RECORDED)
def test_hooks_come_in_lightnings_order(name):
    """What a hook does depends on what came before it, and on the numbers that it reads."""
    theirs = order_under(pl.Trainer, CASES[name])

    ours = order_under(eventloop_lightning.Trainer, CASES[name])

    assert ours == theirs
    assert len(theirs) > 20


def test_a_hook_that_comes_twice_would_show():
    """The control: the orders of two different runs aren't equal."""
    theirs = order_under(pl.Trainer, Case(Net))

    ours = order_under(eventloop_lightning.Trainer, Case(Gan))

    assert ours != theirs
