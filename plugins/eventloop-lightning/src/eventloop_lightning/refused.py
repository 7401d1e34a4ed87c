"""Refuses arguments of Lightning's trainer and settings of eventloop that would have no effect."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import CheckpointIO
from torch.nn.modules.batchnorm import (
    _BatchNorm,
)  # private: base class of all batch norms (torch 2.13)

from eventloop import PluginError, SettingError, State
from eventloop_lightning.hook_calls import is_overridden

# Arguments that can't be honoured, and alternatives.
REFUSED = {
    "model_registry": "leave it out, and save with ModelCheckpoint",
}
ARGUMENTS = {
    "max_duration": "max_epochs",
    "clip_norm": "gradient_clip_val",
    "clip_value": "gradient_clip_val",
    "eval_interval": "val_check_interval",
    "eval_at_start": "num_sanity_val_steps",
    "precision": "precision",
    "device": "accelerator",
    "sync_batch_norm": "sync_batchnorm",
}
STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true")
ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
PRECISIONS = (None, 32, "32", "32-true", "bf16-mixed", "bf16", 64, "64", "64-true", "bf16-true")


def checked_device(arguments: Mapping[str, Any]) -> torch.device:
    """Refuses arguments that can't be honoured; returns the device.

    Raises:
        SettingError: an argument isn't one of Lightning's, or can't be honoured.
    """
    parameters = inspect.signature(LightningTrainer.__init__).parameters
    for name, value in arguments.items():
        if name not in parameters:
            raise SettingError(
                f"Lightning's Trainer has no argument {name!r}",
                fix=f'eventloop\'s own go into settings={{"{name}": ...}}',
            )
        if name in REFUSED and value:
            raise SettingError(f"{name}={value!r} can't be honoured", fix=REFUSED[name])
    for plugin in _listed(arguments.get("plugins")):
        if not isinstance(plugin, CheckpointIO):
            raise SettingError(
                f"plugins={plugin!r} can't be honoured, but a CheckpointIO can",
                fix="leave it out; give precision=, or start the script with torchrun for several ranks",
            )
    if arguments.get("profiler"):
        warnings.warn(
            f"profiler={arguments['profiler']!r} records validation and what Lightning itself calls, and "
            "nothing of the training: eventloop-profile profiles that, and eventloop-trace",
            stacklevel=3,
        )
    _require(arguments, "strategy", STRATEGIES, "start the script with torchrun for several ranks")
    _require(arguments, "accelerator", ACCELERATORS, "give cpu or gpu")
    _require(arguments, "precision", PRECISIONS, "give 32-true, 64-true, bf16-mixed or bf16-true")
    _require_ranks(arguments)
    current_device = torch.accelerator.current_accelerator(check_available=True)
    if arguments.get("accelerator") == "cpu" or current_device is None:
        return torch.device("cpu")
    return torch.device(current_device.type, int(os.environ.get("LOCAL_RANK", "0")))


def _listed(plugins: Any) -> Sequence[Any]:
    return plugins if isinstance(plugins, list | tuple) else [plugins] if plugins else []


def _require(arguments: Mapping[str, Any], name: str, allowed: Sequence[Any], fix: str) -> None:
    value = arguments.get(name, allowed[0])
    if not any(value is allowed_value or value == allowed_value for allowed_value in allowed):
        raise SettingError(
            f"{name}={value!r} can't be honoured; known are {', '.join(map(repr, allowed))}",
            fix=fix,
        )


def _require_ranks(arguments: Mapping[str, Any]) -> None:
    """Refuses a number of devices that differs from the number of processes."""
    devices = arguments.get("devices", "auto")
    nodes = arguments.get("num_nodes", 1)
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        devices = len(devices)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if devices in ("auto", -1, "-1"):
        return
    if int(devices) * int(nodes) != world_size:
        raise SettingError(
            f"devices={devices!r} and num_nodes={nodes!r} are not the {world_size} processes that "
            "there are",
            fix=f"start the script with `torchrun --nproc-per-node {devices}`, which makes them",
        )


def refuse_others_words(settings: Mapping[str, Any]) -> None:
    """Refuses settings that Lightning's trainer has its own arguments for.

    Raises:
        SettingError: such a setting is given.
    """
    for name, argument in ARGUMENTS.items():
        if name in settings:
            raise SettingError(
                f"settings={{{name!r}: ...}} is {argument} of this trainer",
                fix=f"give Trainer({argument}=...)",
            )


def refuse_settings(state: State, *, is_automatic: bool) -> None:
    """Refuses settings of eventloop that would have no effect on a module.

    Raises:
        SettingError: such a setting is set.
    """
    settings = state.settings
    if state.precision.name == "fp16":
        raise SettingError(
            "precision fp16 scales a loss that the module computes gradients of by itself",
            fix="set precision to bf16 or fp32",
        )
    if settings.compile:
        raise SettingError(
            "compile has no effect on a training_step",
            fix="compile the module, or a part of it, in configure_model: torch.compile(self.net)",
        )
    for name in () if is_automatic else ("microbatch_size", "clip_norm", "clip_value"):
        value = getattr(settings, name)
        if value is not None:
            raise SettingError(
                f"{name}={value} has no effect in manual optimization, which is the LightningModule's",
                fix="leave it out; its training_step splits batches and clips gradients itself",
            )


def refuse_plugins(state: State, trainer: Any) -> None:
    """Refuses plugins of eventloop that would have no effect, or another one, under Lightning's steps.

    Raises:
        PluginError: such a plugin is active.
    """
    module = trainer.lightning_module
    scheduled = [
        callback
        for callback in trainer.callbacks
        if isinstance(callback, GradientAccumulationScheduler)
    ]
    accumulates = trainer.accumulate_grad_batches > 1 or bool(scheduled)
    clipper = state.owner("clip_gradients")
    for name in [
        candidate
        for candidate in (clipper, "sam")
        if candidate in state.plugins and candidate != "task"
    ]:
        if not module.automatic_optimization:
            _refuse(name, "changes gradients, but manual optimization steps without the loop")
        if accumulates:
            _refuse(
                name, "changes gradients of one batch, but accumulate_grad_batches adds them up"
            )
    if clipper != "task":
        clips = "clips the gradients, so that {} has no effect"
        if trainer.gradient_clip_val:
            _refuse(clipper, clips.format(f"gradient_clip_val={trainer.gradient_clip_val}"))
        if is_overridden(module, "configure_gradient_clipping", LightningModule):
            _refuse(clipper, clips.format("configure_gradient_clipping"))
    has_norms = any(isinstance(submodule, _BatchNorm) for submodule in module.modules())
    if "swa" in state.plugins and has_norms and not module.automatic_optimization:
        _refuse("swa", "estimates batch norms by training_step, which steps in manual optimization")


def _refuse(plugin: str, reason: str) -> None:
    raise PluginError(
        f"{plugin} doesn't suit this LightningModule: it {reason}",
        fix=f"leave {plugin} out of `algorithms=[...]`, or of `-p`",
    )
