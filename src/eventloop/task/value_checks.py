"""Checks the types of a task's values before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from eventloop.config.settings import SETTING_NAMES
from eventloop.config.value_sources import setting_for
from eventloop.errors import TaskError, a
from eventloop.vocabulary import SETTINGS, TASK, TRAINER, known_as

_OPTIMIZER = "optimizer=lambda model: SGD(model.parameters(), lr=0.1)"
_SCHEDULER = "scheduler=lambda optimizer: CosineAnnealingLR(optimizer, T_max=1000)"


def check_values(
    *, model: object, loss: object, forward: object, optimizer: object, scheduler: object
) -> None:
    """Checks the values that are modules and functions.

    Raises:
        TypeError: one is of the wrong kind; the message has the line to write.
    """
    _check_model(model)
    if isinstance(loss, type):
        raise TypeError(
            f"Task(loss={loss.__name__}) is a class, not a function of outputs and targets: "
            f"write loss={loss.__name__}()"
        )
    _check_maker(optimizer, "optimizer", "model", Optimizer, _OPTIMIZER)
    for one in scheduler.values() if isinstance(scheduler, Mapping) else [scheduler]:
        _check_maker(one, "scheduler", "optimizer", LRScheduler, _SCHEDULER)
    for value, what in ((loss, "loss"), (forward, "forward")):
        if value is not None and not callable(value):
            raise TypeError(f"Task({what}=...) takes a function, not {value!r}")


def argument_meant(name: str, known: Iterable[str]) -> str:
    """Returns the hint for an unknown argument of `Task`: "; the closest is 'model'"."""
    if name in SETTING_NAMES:
        return f"; it is a setting: Trainer(task, {name}=...), or Task(settings={{{name!r}: ...}})"
    if name in SETTINGS:
        setting, others, description = setting_for(name, "keyword").partition(" with ")
        return f"; here it is a setting: Trainer(task, {setting}){others}{description}"
    return known_as(name, {**TRAINER, **TASK}, known)


def named_optimizers(built: object) -> dict[str, Optimizer]:
    """Returns optimizers by name; a single one is named after its class.

    Raises:
        TaskError: it is neither an optimizer nor a mapping of optimizers.
    """
    if isinstance(built, list | tuple):
        raise TaskError(
            f"the task's optimizers are {a(type(built).__name__)} of {len(built)}, without names",
            fix="name them: optimizer=lambda model: {'body': SGD(...), 'head': AdamW(...)}",
        )
    if built is None:
        raise TaskError(
            "the task's optimizer function returned None", fix=f"return it: {_OPTIMIZER}"
        )
    named: Mapping[Any, Any] = (
        built if isinstance(built, Mapping) else {type(built).__name__.lower(): built}
    )
    for name, optimizer in named.items():
        if not isinstance(optimizer, Optimizer):
            raise TaskError(
                f"the task's optimizer {name!r} is {a(type(optimizer).__name__)}, not a "
                "torch.optim.Optimizer",
                fix=f"return it: {_OPTIMIZER}",
            )
    return {str(name): optimizer for name, optimizer in named.items()}


def usable_scheduler(scheduler: Any, optimizer: str) -> Any:
    """Returns a scheduler, if the loop can step it.

    Raises:
        TaskError: it is not a scheduler, or its `step` needs an argument.
    """
    if not callable(getattr(scheduler, "step", None)):
        raise TaskError(
            f"the task's scheduler of {optimizer!r} is {a(type(scheduler).__name__)}, not a torch "
            "scheduler",
            fix=f"return it: {_SCHEDULER}",
        )
    if wanted := _required(scheduler.step):
        raise TaskError(
            f"{type(scheduler).__name__} wants {', '.join(wanted)} at each step, but the "
            "loop passes nothing",
            fix="take scheduler=schedules.plateau(metric='valid/loss'), which follows a metric, or step "
            "it in an algorithm's `eval_after_all`, with state.eval_metrics at hand",
        )
    return scheduler


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module) and not callable(model):
        raise TypeError(
            f"Task(model=...) takes an nn.Module or a function that returns one, not {model!r}"
        )
    if not isinstance(model, nn.Module) and (wanted := _required(model)):
        name = getattr(model, "__name__", "make")
        given = ", ".join(f"{one}=..." for one in wanted)
        raise TypeError(
            f"Task(model={name}) is called without arguments, but wants {', '.join(wanted)}: "
            f"write model=lambda: {name}({given})"
        )


def _check_maker(value: object, what: str, wants: str, makes: type, example: str) -> None:
    """Checks a function of one value, or a class whose constructor takes only that value."""
    if value is None:
        return
    if isinstance(value, makes):
        raise TypeError(
            f"Task({what}=...) takes a function of the {wants}, which may be replaced before it "
            f"is called, not {a(type(value).__name__)}: write {example}"
        )
    if isinstance(value, list | tuple):
        raise TypeError(f"Task({what}=...) takes a function, not several without names: {example}")
    if not callable(value):
        raise TypeError(f"Task({what}=...) takes a function, not {value!r}: write {example}")
    if isinstance(value, type) and (issubclass(value, Optimizer) or len(_required(value)) > 1):
        raise TypeError(
            f"Task({what}={value.__name__}) is a class, not a function of the {wants}: "
            f"write {example}"
        )


def _required(function: Callable[..., Any]) -> list[str]:
    """Returns the required parameters; none if the signature can't be read."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in parameters if one.kind in named and one.default is one.empty]
