"""Refuses trainers with their own loop, and strategies, settings and plugins that can't be honoured."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import transformers

from eventloop import PluginError, SettingError, State

# Settings of eventloop that a trainer has arguments for.
ARGUMENTS = {
    "max_duration": "num_train_epochs, or max_steps",
    "precision": "bf16, fp16 or tf32",
    "device": "use_cpu",
    "seed": "seed",
    "seed_samples": "none: data are read as the trainer reads them",
    "microbatch_size": "per_device_train_batch_size with gradient_accumulation_steps",
    "clip_norm": "max_grad_norm",
    "clip_value": "none: the trainer clips by max_grad_norm",
    "eval_interval": "eval_strategy with eval_steps",
    "eval_at_start": "eval_on_start",
    "uneven": "dataloader_drop_last",
    "sync_batch_norm": "none: convert the model yourself",
    "find_unused_parameters": "ddp_find_unused_parameters",
    "deterministic": "full_determinism",
    "compile": "torch_compile",
    "checkpoint_best": "load_best_model_at_end",
    "resume": "resume_from_checkpoint; with a run_dir a run goes on by itself",
    "autoload": "none: name plugins in plugins=[...]",
}
# Hooks without a place here, by reason: `training_step` runs forward pass, loss and backward pass, and
# model, optimizer and data exist before the loop does.
_NO_PLACE = {
    "the trainer's training_step runs forward pass, loss and backward pass in one": (
        "forward",
        "loss",
        "backward",
        "before_loss",
        "split_batch",
        "before_backward",
        "train_batch",
    ),
    "the trainer has made model, optimizer and data before the loop begins": (
        "build_model",
        "init",
        "wrap_model",
        "build_optimizers",
        "build_train_dataloader",
        "build_eval_dataloaders",
        "build_schedulers",
        "count_batch",
        "after_dataloader",
        "batch_start",
    ),
}
# Plugins that implement these hooks only to watch.
_LOOK = {"agc": ("init",), "ema": ("train_batch",), "sam": ("split_batch",)}


def refuse_class(trainer: type) -> None:
    """Refuses classes that aren't trainers, or have their own loop.

    Raises:
        TypeError: it can't run on eventloop's loop.
    """
    if not isinstance(trainer, type) or not issubclass(trainer, transformers.Trainer):
        raise TypeError(f"on_eventloop takes a class of transformers.Trainer, not {trainer!r}")
    for base in trainer.__mro__[: trainer.__mro__.index(transformers.Trainer)]:
        for name in ("_inner_training_loop", "_run_epoch"):
            if name in vars(base) and not base.__module__.startswith("eventloop_transformers"):
                raise TypeError(
                    f"{trainer.__name__} can't run on eventloop's loop: {base.__module__}."
                    f"{base.__qualname__} has a loop of its own, {name}"
                )


def refuse_settings(settings: Collection[str]) -> None:
    """Refuses settings that the trainer has arguments for.

    Raises:
        SettingError: such a setting is given.
    """
    for name in settings:
        if name in ARGUMENTS:
            raise SettingError(
                f"{name} is a setting of eventloop's, for which this trainer has TrainingArguments",
                fix=f"leave it out; its argument is {ARGUMENTS[name]}",
            )


def refuse_fit(trainer: Any, settings: Mapping[str, Any]) -> None:
    """Refuses strategies that eventloop's loop doesn't support.

    Raises:
        SettingError: the arguments request such a strategy.
    """
    args = trainer.args
    requested = {
        "FSDP": trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "a model in parts": trainer.is_model_parallel
        or getattr(trainer, "is_distributed_loading_by_transformers", False),
        "torch_xla": args.device.type == "xla",
    }
    for name, is_asked in requested.items():
        if is_asked:
            raise SettingError(
                f"{name} isn't run on eventloop's loop; known are one device, and DDP",
                fix="leave it out, or train with transformers' own Trainer",
            )
    if settings.get("run_dir") is not None and args.auto_find_batch_size:
        raise SettingError(
            "auto_find_batch_size begins a run again with other batches, and a run_dir is for one run",
            fix="leave one of them out",
        )


def refuse_plugins(state: State, trainer: Any, assembly: Any) -> None:
    """Refuses algorithms that would have no effect, or another one, under this trainer.

    Raises:
        PluginError: such an algorithm is active.
    """
    algorithms = {plugin.name for plugin in assembly.plugins if plugin.role == "algorithm"}
    for reason, hooks in _NO_PLACE.items():
        for hook in hooks:
            for implementation in assembly.implementations[hook]:
                name = implementation.plugin.name
                if name in algorithms and hook not in _LOOK.get(name, ()):
                    _refuse(name, f"implements {hook}, but {reason}")
    args = trainer.args
    clipper = state.owner("clip_gradients")
    if clipper != "task" and args.max_grad_norm > 0:
        _refuse(
            clipper, f"clips the gradients, so that max_grad_norm={args.max_grad_norm} has no effect",
            "give TrainingArguments(max_grad_norm=0), or ",
        )  # fmt: skip
    if "sam" in algorithms and trainer.accelerator.scaler is not None:
        _refuse("sam", "takes two gradients a step, and accelerate unscales fp16's once")
    lenders = [name for name in assembly.exporting if name in algorithms]
    if lenders and args.load_best_model_at_end:
        _refuse(
            lenders[0],
            "lends evaluation its average, but load_best_model_at_end loads weights without it",
            "give TrainingArguments(load_best_model_at_end=False), or ",
        )


def _refuse(plugin: str, reason: str, fix: str = "") -> None:
    raise PluginError(
        f"{plugin} doesn't suit this trainer: it {reason}",
        fix=fix + f"leave {plugin} out of plugins=[...]",
    )
