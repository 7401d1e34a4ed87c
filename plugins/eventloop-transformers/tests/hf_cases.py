"""Trainers to compare: a tiny model, its data, and what there is to see of a training."""

from __future__ import annotations

import copy
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)
from transformers.optimization import Adafactor, AdafactorSchedule

import eventloop_testing.case

os.environ["HF_HUB_OFFLINE"] = "1"
USE_CPU = eventloop_testing.case.default_device == "cpu"
EVENTS = [name for name in vars(transformers.TrainerCallback) if name.startswith("on_")]
# What the clock and the machine say.
TIMES = ("_runtime", "_per_second", "step_time")


def gpt2(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **more))


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def rows(num: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Sequences of which some labels don't count, as many as differ."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for tokens in torch.randint(3, 32, (num, 12), generator=generator):
        labels = tokens.clone()
        labels[: int(tokens[0]) % 7] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def own_rates(model: nn.Module) -> tuple[Any, Any]:
    """Returns an optimizer that finds its own learning rates, and a schedule that reads them."""
    optimizer = Adafactor(model.parameters(), relative_step=True, warmup_init=True, lr=None)
    return optimizer, AdafactorSchedule(optimizer)


class Rows(Dataset):
    def __init__(self, num: int) -> None:
        self._rows = rows(num)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return self._rows[idx]


class Noisy(Rows):
    """Draws from the global generator as it is read."""

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        row = dict(self._rows[idx])
        row["input_ids"] = row["input_ids"].roll(int(torch.randint(3, ())))
        return row


class Stream(IterableDataset):
    """Has no length."""

    def __init__(self, num: int) -> None:
        self._rows = rows(num)

    def __iter__(self) -> Any:
        return iter(self._rows)


class Recorder(transformers.TrainerCallback):
    """Notes each call, with the state and the control at that moment."""

    def __init__(self) -> None:
        self.calls: list[Any] = []


def _recording(name: str) -> Callable[..., None]:
    def call(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seen = {key: one for key, one in asdict(state).items() if key != "log_history"}
        seen["logs"] = untimed(state.log_history)
        grads = [one.grad is not None for one in kwargs["model"].parameters()]
        rate = kwargs["optimizer"].param_groups[0]["lr"] if kwargs.get("optimizer") else None
        self.calls.append((name, copy.deepcopy(seen), asdict(control), any(grads), rate))

    return call


for _name in EVENTS:
    setattr(Recorder, _name, _recording(_name))


class Controlling(transformers.TrainerCallback):
    """Sets flags of the control at some steps: {("on_step_end", 2): "should_save"}."""

    def __init__(self, flags: Mapping[tuple[str, int], str]) -> None:
        for event in {event for event, _ in flags}:
            setattr(self, event, self._setting(event, flags))

    def _setting(self, event: str, flags: Mapping[tuple[str, int], str]) -> Callable[..., None]:
        def call(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if name := flags.get((event, state.global_step)):
                setattr(control, name, True)

        return call


def untimed(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if not name.endswith(TIMES)} for row in history
    ]


def arguments(folder: Path | str, **more: Any) -> TrainingArguments:
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": USE_CPU,
        **more,
    }
    return TrainingArguments(**given)


def trained(
    kind: type,
    folder: Path | str,
    *,
    model: Callable[[], nn.Module] = gpt2,
    data: Callable[[], Any] = lambda: Rows(14),
    callbacks: tuple[Callable[[], Any], ...] = (),
    optimizers: Callable[[nn.Module], tuple[Any, Any]] = lambda _: (None, None),
    resume: Any = None,
    **more: Any,
) -> dict[str, Any]:
    """Trains, and returns all that there is to compare."""
    recorder = Recorder()
    given = arguments(folder, **more)
    evaluates = given.eval_strategy != "no" or given.eval_on_start
    made = model()
    trainer = kind(
        model=made,
        optimizers=optimizers(made),
        args=given,
        train_dataset=data(),
        eval_dataset=Rows(6) if evaluates else None,
        callbacks=[*(one() for one in callbacks), recorder],
    )
    output = trainer.train(resume_from_checkpoint=resume)
    return {
        "weights": {name: one.clone() for name, one in trainer.model.state_dict().items()},
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "history": untimed(trainer.state.log_history),
        "state": {k: v for k, v in asdict(trainer.state).items() if k != "log_history"},
        "output": [output.global_step, output.training_loss, untimed([output.metrics])],
        "calls": recorder.calls,
        "files": files_in(folder),
        "random": [random.random(), float(np.random.rand()), float(torch.rand(()))],
    }


def process_environment(folder: Path) -> dict[str, str]:
    """Returns the environment of a process that imports what this one does.

    Beside Composer there is a torchvision for CUDA, which transformers imports: its operators are
    declared first, as `plugins/conftest.py` does here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("composer") is not None:
        (folder / "sitecustomize.py").write_text(
            "from eventloop_composer.importing import declare_operators\ndeclare_operators()\n"
        )
    path = os.pathsep.join([str(folder), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def files_in(folder: Path | str) -> list[str]:
    found = Path(folder).rglob("*")
    return sorted(
        str(one.relative_to(folder))
        for one in found
        if "eventloop" not in str(one.relative_to(folder))
    )


def differing(one: Any, other: Any, path: str = "") -> list[str]:
    """Returns where two nests differ, bit by bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return (
            []
            if alike and bool(((one == other) | (one != one) & (other != other)).all())
            else [path]
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        return [at for key in one for at in differing(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [at for idx, pair in pairs for at in differing(*pair, f"{path}[{idx}]")]
    return (
        []
        if one == other or (one != one and other != other)
        else [f"{path}: {one!r} {other!r}"[:300]]
    )


SAVES = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
AT = Controlling
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "Llama": {"model": llama},
    "accumulation, whole": {"gradient_accumulation_steps": 4, "data": lambda: Rows(16)},
    "accumulation, incomplete": {"gradient_accumulation_steps": 4},
    "accumulation in bf16": {"gradient_accumulation_steps": 4, "bf16": True},
    "accumulation in fp16": {"gradient_accumulation_steps": 4, "fp16": True},
    "label smoothing": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "activation checkpointing": {"activation_checkpointing": True},
    "no clipping": {"max_grad_norm": 0.0},
    "losses that aren't finite": {"max_grad_norm": 0.0, "learning_rate": 1e18},
    "tokens counted": {"include_num_input_tokens_seen": "non_padding"},
    "max_steps": {"max_steps": 5},
    "max_steps over epochs": {"max_steps": 17, "gradient_accumulation_steps": 4},
    "a part of an epoch": {"num_train_epochs": 1.5},
    "no epoch": {"num_train_epochs": 0},
    "evaluation by steps": SAVES,
    "evaluation by epochs": {
        "eval_strategy": "epoch", "save_strategy": "epoch", "eval_on_start": True,
        "logging_strategy": "epoch",
    },
    "the best": {**SAVES, "load_best_model_at_end": True, "save_total_limit": 1},
    "saved when best": {
        **SAVES, "save_strategy": "best", "metric_for_best_model": "loss", "learning_rate": 0.1,
    },
    "early stopping": {
        **SAVES, "load_best_model_at_end": True, "learning_rate": 0.3, "num_train_epochs": 6,
        "callbacks": (lambda: transformers.EarlyStoppingCallback(1),),
    },
    "a plateau": {**SAVES, "load_best_model_at_end": True, "lr_scheduler_type": "reduce_lr_on_plateau"},
    "cosine with warm-up": {"lr_scheduler_type": "cosine", "warmup_steps": 3},
    "adafactor": {"optim": "adafactor"},
    "adafactor that finds its rates": {"optimizers": own_rates},
    "data that draw": {"data": lambda: Noisy(14)},
    "a stream": {"data": lambda: Stream(14), "max_steps": 12},
    "a stream, accumulation": {
        "data": lambda: Stream(14), "max_steps": 6, "gradient_accumulation_steps": 4,
    },
    "control: an epoch stops": {
        "callbacks": (lambda: AT({("on_step_end", 2): "should_epoch_stop"}),),
    },
    "control: it stops": {"callbacks": (lambda: AT({("on_step_end", 4): "should_training_stop"}),)},
    "control: it stops at first": {
        "callbacks": (lambda: AT({("on_step_begin", 0): "should_training_stop"}),),
    },
    "control: within a step": {
        "gradient_accumulation_steps": 4,
        "callbacks": (
            lambda: AT({
                ("on_substep_end", 1): "should_epoch_stop",
                ("on_substep_end", 2): "should_training_stop",
            }),
        ),
    },
    "control: log, save, evaluate": {
        "eval_strategy": "steps", "eval_steps": 100, "logging_steps": 100,
        "callbacks": (
            lambda: AT({
                ("on_step_end", 2): "should_log",
                ("on_step_end", 3): "should_save",
                ("on_step_end", 5): "should_evaluate",
                ("on_epoch_end", 7): "should_save",
            }),
        ),
    },
}  # fmt: skip
