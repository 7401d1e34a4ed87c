"""A run in one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop.clock import Time
from eventloop.config.layers import example
from eventloop.config.settings import SETTING_NAMES
from eventloop.errors import SettingError
from eventloop.run.result import Result
from eventloop.task import Task
from eventloop.trainer import Trainer
from eventloop.vocabulary import SETTINGS, TASK, TRAINER, known_as

_OF_TRAINER = ("algorithms", "callbacks")


def fit(
    model: nn.Module | Callable[[], nn.Module],
    train_dataloader: Any,
    *,
    optimizer: Callable[[nn.Module], Optimizer | Mapping[str, Optimizer]],
    max_duration: str | Time,
    loss: Callable[[Any, Any], Tensor] | None = None,
    **given: Any,
) -> Result:
    """Trains a model: `Trainer(Task(...), ...).fit()` in one call, for what needs no second one.

    Args:
        model, train_dataloader, optimizer, loss: see `Task`.
        max_duration: how long to train, as a time: "10ep", "5000ba".
        given: more values of `Task`, such as `eval_dataloaders` and `metrics`, and settings,
            `algorithms` and `callbacks` of `Trainer`.

    Raises:
        EventloopError: as `Trainer` and `Trainer.fit` do.
    """
    if "settings" in given:
        raise SettingError(
            "settings are keywords here", fix='write fit(..., seed=1) for {"seed": 1}'
        )
    names = inspect.signature(Task).parameters.keys() - {*_OF_TRAINER}
    settings = {word: example(*one, "keyword") for word, one in SETTINGS.items()}
    words = {**settings, **TRAINER, **TASK}
    for name in given.keys() - names - {*_OF_TRAINER, *SETTING_NAMES}:
        if hint := known_as(name, words, [*names, *_OF_TRAINER, *SETTING_NAMES]):
            raise SettingError(
                f"fit(...) has no argument {name!r}{hint}", fix="rename the keyword or leave it out"
            )
    of_task = {name: given.pop(name) for name in names & given.keys()}
    task = Task(
        model=model, train_dataloader=train_dataloader, optimizer=optimizer, loss=loss, **of_task
    )
    with Trainer(task, max_duration=max_duration, **given) as trainer:
        return trainer.fit()
