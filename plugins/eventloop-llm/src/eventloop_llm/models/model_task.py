"""Shared by the tasks of this package: optimizer and schedule, sample answers, the exported tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn

from eventloop import State, StateView, Task, hookimpl, schedules

EVAL = "eval"  # the name of the eval set
Schedule = Literal["linear", "cosine", "constant"]


def training(
    *, lr: float, weight_decay: float, schedule: Schedule, warmup: str | None, max_duration: str
) -> dict[str, Any]:
    """Returns the arguments of `Task` that set how a language model is trained.

    Args:
        lr: highest learning rate.
        weight_decay: weight decay of AdamW.
        schedule: how the learning rate falls after the warmup.
        warmup: how long the learning rate rises; None for no warmup.
        max_duration: how long to train, unless the user says otherwise.
    """
    return {
        "optimizer": partial(adamw, lr=lr, weight_decay=weight_decay),
        "scheduler": schedule_of(schedule, warmup),
        "settings": {"max_duration": max_duration, "clip_norm": 1.0},
    }


def adamw(model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Returns AdamW over the parameters that require gradients.

    A model with adapters has mostly frozen parameters, for which AdamW would only hold empty entries.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr, weight_decay=weight_decay)


def schedule_of(schedule: Schedule, warmup: str | None) -> Callable[..., Any]:
    """Returns a scheduler maker from `eventloop.schedules`."""
    makers: dict[str, Callable[..., Any]] = {
        "linear": schedules.linear,
        "cosine": schedules.cosine,
        "constant": schedules.constant,
    }
    scheduler: Callable[..., Any] = makers[schedule](warmup=warmup)
    return scheduler


class Samples:
    """Logs the model's answers to a few prompts, after each evaluation, as a table `samples`.

    Args:
        tokenizer: a tokenizer of transformers.
        prompts: token ids and the reference answer of each prompt.
        max_new_tokens: maximum length of an answer.
        header: a note on the data, for the header of the run.
    """

    name = "samples"
    needs_eval_data = True

    def __init__(
        self,
        tokenizer: Any,
        prompts: Sequence[tuple[list[int], str]],
        *,
        max_new_tokens: int = 64,
        header: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = list(prompts)
        self.max_new_tokens = max_new_tokens
        self._header = header

    @hookimpl
    def header_note(self) -> str:
        """Returns the note on the data that the constructor was given."""
        return self._header

    @hookimpl
    def eval_after_all(self, state: StateView) -> None:
        """Generates with the evaluated weights, under the run's precision."""
        if not self._prompts:
            return
        # Every rank generates every answer: a sharded model needs all ranks for each forward pass.
        generate = state.precision.under_autocast(self._generated)
        answers = generate(state.model, state.device)
        prompts = [self._tokenizer.decode(ids) for ids, _ in self._prompts]
        expected = [answer for _, answer in self._prompts]
        state.log_text("samples", {"prompt": prompts, "answer": answers, "expected": expected})

    def _generated(self, model: nn.Module, device: torch.device) -> list[str]:
        # Padded on the left: a causal model continues the last token of a row.
        longest = max(len(ids) for ids, _ in self._prompts)
        pad_id = self._tokenizer.pad_token_id
        rows = [[pad_id] * (longest - len(ids)) + ids for ids, _ in self._prompts]
        masks = [[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in self._prompts]
        untyped: Any = model
        tokens = untyped.generate(
            input_ids=torch.tensor(rows, device=device),
            attention_mask=torch.tensor(masks, device=device),
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            pad_token_id=pad_id,
        )
        answers: list[str] = self._tokenizer.batch_decode(
            tokens[:, longest:], skip_special_tokens=True
        )
        return answers


class ModelTask(Task):
    """A task that adds its tokenizer to exported folders, so that the folder is a complete model.

    Args:
        tokenizer: a tokenizer of transformers.
        options: further arguments of `Task`.
    """

    def __init__(self, *, tokenizer: Any, **options: Any) -> None:
        super().__init__(**options)
        self._tokenizer = tokenizer

    def hooks(self) -> SimpleNamespace:
        """Returns the task's hooks, and `export`."""
        return SimpleNamespace(**vars(super().hooks()), export=self.export)

    @hookimpl(wrapper=True)
    def export(self, state: State, path: Path) -> Generator[None, Path | None, Path | None]:
        """Adds the tokenizer to a folder that another plugin exported."""
        exported_path = yield
        if exported_path is not None and state.rank == 0 and Path(exported_path).is_dir():
            self._tokenizer.save_pretrained(exported_path)
        return exported_path
