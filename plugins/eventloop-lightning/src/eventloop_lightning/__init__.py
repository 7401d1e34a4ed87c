"""Runs LightningModules, their data modules, callbacks and loggers on eventloop, unchanged."""

from eventloop_lightning.pytorch_lightning_alias import either_lightning

with either_lightning():
    from eventloop_lightning.from_command import task
    from eventloop_lightning.install import install
    from eventloop_lightning.task import LightningTask
    from eventloop_lightning.trainer import Trainer

__all__ = ["LightningTask", "Trainer", "install", "task"]
