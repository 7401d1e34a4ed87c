"""The words of other trainers, and what eventloop calls the same things."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec

from eventloop.errors import closest

P = ParamSpec("P")

_EPOCHS, _BATCHES = ("max_duration", "10ep"), ("max_duration", "5000ba")
_DEVICE, _CLIP, _MICRO = ("device", "cuda"), ("clip_norm", 1.0), ("microbatch_size", 8)
_FOLDER, _RESUME = ("run_dir", "runs/first"), ("resume", "CHECKPOINT")
_EVAL, _LOG, _SAVE = (
    ("eval_interval", "1ep"),
    ("log_interval", "50ba"),
    ("checkpoint_interval", "1ep"),
)
_RANKS = "a process for each device: `torchrun --nproc-per-node 2 train.py`"
_EARLY = "a plugin that stops early, callbacks=[...]"
_PROGRESS = "a plugin that shows progress, callbacks=[...]"
_TRAIN, _EVALUATE = (
    "train_dataloader=DataLoader(...)",
    "eval_dataloaders={'valid': DataLoader(...)}",
)
_OPTIMIZER = "optimizer=lambda model: SGD(model.parameters(), lr=0.1)"

# A setting with an example of its value, which is written as its caller writes settings.
SETTINGS: Mapping[str, tuple[str, Any]] = {
    "accelerator": _DEVICE,
    "accumulate_grad_batches": _MICRO,
    "accumulation_steps": _MICRO,
    "amp": ("precision", "fp16"),
    "bf16": ("precision", "bf16"),
    "check_val_every_n_epoch": _EVAL,
    "checkpoint_dir": _FOLDER,
    "ckpt_path": _RESUME,
    "default_root_dir": _FOLDER,
    "enable_checkpointing": _SAVE,
    "epochs": _EPOCHS,
    "eval_every": _EVAL,
    "eval_steps": _EVAL,
    "fp16": ("precision", "fp16"),
    "gradient_accumulation_steps": _MICRO,
    "gradient_clip_val": _CLIP,
    "gradient_clipping": _CLIP,
    "load_path": _RESUME,
    "log_every_n_steps": _LOG,
    "logging_steps": _LOG,
    "max_epochs": _EPOCHS,
    "max_grad_norm": _CLIP,
    "max_iters": _BATCHES,
    "max_steps": _BATCHES,
    "max_time": ("max_duration", "3600sec"),
    "mixed_precision": ("precision", "bf16"),
    "num_epochs": _EPOCHS,
    "num_iterations": _BATCHES,
    "num_steps": _BATCHES,
    "num_train_epochs": _EPOCHS,
    "output_dir": _FOLDER,
    "resume_from_checkpoint": _RESUME,
    "save_folder": _FOLDER,
    "save_interval": _SAVE,
    "save_steps": _SAVE,
    "save_total_limit": ("checkpoint_keep", 2),
    "total_steps": _BATCHES,
    "use_amp": ("precision", "fp16"),
    "val_check_interval": _EVAL,
    "validate_every": _EVAL,
}
TRAINER: Mapping[str, str] = {
    "algorithm": "algorithms=[...]",
    "callback": "callbacks=[...]",
    "devices": _RANKS,
    "early_stopping": _EARLY,
    "enable_progress_bar": _PROGRESS,
    "gpus": _RANKS,
    "hooks": "algorithms=[...] and callbacks=[...]",
    "logger": "a plugin, callbacks=[...]",
    "loggers": "plugins, callbacks=[...]",
    "num_nodes": _RANKS,
    "patience": _EARLY,
    "plugins": "algorithms=[...] and callbacks=[...]",
    "progress_bar": _PROGRESS,
    "strategy": _RANKS,
    "verbose": _PROGRESS,
}
TASK: Mapping[str, str] = {
    "batch_size": "train_dataloader=DataLoader(..., batch_size=32)",
    "collate_fn": "train_dataloader=DataLoader(..., collate_fn=...)",
    "compute_metrics": "metrics={...}",
    "criterion": "loss=...",
    "data": _TRAIN,
    "dataloader": _TRAIN,
    "dataset": _TRAIN,
    "eval_dataloader": _EVALUATE,
    "eval_dataset": _EVALUATE,
    "eval_loader": _EVALUATE,
    "learning_rate": _OPTIMIZER,
    "loss_fn": "loss=...",
    "lr": _OPTIMIZER,
    "lr_scheduler": "scheduler=...",
    "module": "model=...",
    "net": "model=...",
    "network": "model=...",
    "num_workers": "train_dataloader=DataLoader(..., num_workers=2)",
    "optim": _OPTIMIZER,
    "per_device_train_batch_size": "train_dataloader=DataLoader(..., batch_size=32)",
    "shuffle": "train_dataloader=DataLoader(..., shuffle=True)",
    "train_data": _TRAIN,
    "train_dataset": _TRAIN,
    "train_loader": _TRAIN,
    "val_dataloader": _EVALUATE,
    "val_dataloaders": _EVALUATE,
    "val_loader": _EVALUATE,
    "valid_dataloader": _EVALUATE,
    "valid_loader": _EVALUATE,
}
HOOKS: Mapping[str, str] = {
    "configure_optimizers": "build_optimizers",
    "evaluate_step": "eval_forward",
    "on_after_backward": "after_backward",
    "on_before_backward": "before_backward",
    "on_before_optimizer_step": "after_train_batch",
    "on_batch_begin": "batch_start",
    "on_batch_end": "batch_end",
    "on_batch_start": "batch_start",
    "on_epoch_begin": "epoch_start",
    "on_epoch_end": "epoch_end",
    "on_epoch_start": "epoch_start",
    "on_evaluate": "eval_after_all",
    "on_exception": "exception",
    "on_fit_end": "fit_end",
    "on_fit_start": "fit_start",
    "on_load_checkpoint": "the method load_state_dict(self, state, version)",
    "on_log": "log",
    "on_predict_batch_end": "predict_batch_end",
    "on_predict_batch_start": "predict_batch_start",
    "on_predict_end": "predict_end",
    "on_predict_start": "predict_start",
    "on_save": "checkpoint_saved",
    "on_save_checkpoint": "the method state_dict(self)",
    "on_step_begin": "batch_start",
    "on_step_end": "batch_end",
    "on_test_batch_end": "eval_batch_end",
    "on_test_end": "eval_end",
    "on_test_epoch_end": "eval_end",
    "on_test_start": "eval_start",
    "on_train_batch_end": "batch_end",
    "on_train_batch_start": "batch_start",
    "on_train_begin": "fit_start",
    "on_train_end": "fit_end",
    "on_train_epoch_end": "epoch_end",
    "on_train_epoch_start": "epoch_start",
    "on_train_start": "fit_start",
    "on_validation_batch_end": "eval_batch_end",
    "on_validation_batch_start": "eval_batch_start",
    "on_validation_end": "eval_end",
    "on_validation_epoch_end": "eval_end",
    "on_validation_start": "eval_start",
    "setup": "init",
    "teardown": "close",
    "test_step": "eval_forward",
    "train_step": "train_batch",
    "training_step": "forward and loss, or train_batch for both with the step",
    "val_dataloader": "build_eval_dataloaders",
    "validation_step": "eval_forward",
}
STATE: Mapping[str, str] = {
    "batch_idx": "state.clock.batch_in_epoch",
    "callback_metrics": "state.eval_metrics",
    "current_epoch": "state.clock.epoch",
    "epoch": "state.clock.epoch",
    "global_rank": "state.rank",
    "global_step": "state.clock.batch",
    "is_global_zero": "state.rank == 0",
    "is_main_process": "state.rank == 0",
    "iteration": "state.clock.batch",
    "labels": "state.targets",
    "logged_metrics": "state.eval_metrics",
    "logits": "state.outputs",
    "lr": "state.optimizers[NAME].param_groups[0]['lr']",
    "lr_scheduler": "state.schedulers",
    "max_epochs": "state.duration",
    "module": "state.model",
    "net": "state.model",
    "num_training_batches": "state.num_batches",
    "optimizer": "state.optimizers",
    "output": "state.outputs",
    "should_stop": "state.request_stop(reason)",
    "step": "state.clock.batch",
    "timestamp": "state.clock",
    "train_loader": "state.train_dataloader",
    "val_dataloaders": "state.eval_dataloaders",
}
# What a trainer does itself; what is of its State is in `STATE`.
METHODS: Mapping[str, str] = {
    "evaluate": "trainer.eval()",
    "load_checkpoint": "Trainer(task, resume=CHECKPOINT)",
    "load_state_dict": "Trainer(task, resume=CHECKPOINT)",
    "save": "trainer.export(FILE)",
    "save_checkpoint": "trainer.state.request_checkpoint(), which saves after the next batch",
    "save_model": "trainer.export(FILE)",
    "test": "trainer.eval()",
    "train": "trainer.fit()",
    "validate": "trainer.eval()",
}


def known_as(name: str, words: Mapping[str, str], names: Iterable[str]) -> str:
    """Returns "; here it is ..." for a word of another trainer, else the closest of `names`."""
    return f"; here it is {words[name]}" if name in words else closest(name, names)


def names_unknown(
    hint: Callable[[str, Iterable[str]], str],
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorates a constructor: an unknown keyword is named with what was meant.

    Args:
        hint: takes the name and those there are; returns what was meant, "; the closest is ...", or "".
    """

    def decorate(function: Callable[P, None]) -> Callable[P, None]:
        known = frozenset(inspect.signature(function).parameters)
        owner = function.__qualname__.partition(".")[0]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> None:
            for name in kwargs:
                if name not in known:
                    raise TypeError(f"{owner}(...) has no argument {name!r}{hint(name, known)}")
            return function(*args, **kwargs)

        return checked

    return decorate
