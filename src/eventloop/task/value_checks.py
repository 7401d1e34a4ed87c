"""Checks the types of a task's values before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from eventloop.clock import Time
from eventloop.config.settings import SETTING_NAMES
from eventloop.config.value_sources import setting_for
from eventloop.errors import TaskError, a
from eventloop.vocabulary import SETTINGS, TASK, TRAINER, known_as

_OF_TASK = (
    "model",
    "train_dataloader",
    "eval_dataloaders",
    "test_dataloaders",
    "loss",
    "optimizer",
)
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


def refuse_arguments_of_fit(
    until: object, others: Sequence[object], unknown: Mapping[str, object]
) -> None:
    """Checks the arguments of `Trainer.fit`, which other trainers give the model and the data.

    Raises:
        TypeError: `until` isn't a time, or there are other arguments.
    """
    for name in unknown:
        hint = argument_meant(name, ["until"])
        if name in _OF_TASK:
            hint = f"; here it belongs to the task: Trainer(Task({name}=...))"
        raise TypeError(f"fit(...) has no argument {name!r}{hint}")
    values = [value for value in (until, *others) if value is not None]
    for value in values:
        if not isinstance(value, str | Time | int | float):  # `Time` says what a number lacks
            raise TypeError(
                f"fit(until=...) takes a time such as '2ep', not {a(type(value).__name__)}; model and data "
                "belong to the task: Trainer(Task(model=..., train_dataloader=...)).fit()"
            )
    if others:
        raise TypeError("fit(until=...) takes one argument, a time such as '2ep'")


def named_optimizers(built: object) -> dict[str, Optimizer]:
    """Returns optimizers by name; a single one is named after its class.

    Raises:
        TaskError: it is neither an optimizer nor a mapping of optimizers.
    """
    if isinstance(built, list | tuple):
        lists = [part for part in built if isinstance(part, list | tuple)]
        parts = [*built, *(value for values in lists for value in values)]
        fix = "name them: optimizer=lambda model: {'body': SGD(...), 'head': AdamW(...)}"
        if any(
            isinstance(part, LRScheduler) for part in parts
        ):  # as of Lightning's configure_optimizers
            fix += f"; schedulers are Task({_SCHEDULER})"
        raise TaskError(
            f"the task's optimizers are {a(type(built).__name__)} of {len(built)}, without names",
            fix=fix,
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


def make_optimizers(
    optimizer: Callable[[nn.Module], object], model: nn.Module
) -> dict[str, Optimizer]:
    """Calls the task's function; returns the optimizers by name.

    Raises:
        TaskError: an optimizer has no parameters, or the function returns no optimizers.
    """
    try:
        return named_optimizers(optimizer(model))
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        name = type(model).__name__
        if any(True for _ in model.parameters()):
            raise TaskError(
                f"an optimizer was made without parameters, although the model, {a(name)}, has some",
                fix="give it some: optimizer=lambda model: SGD(model.parameters(), lr=0.1); a generator "
                "of parameters can be iterated once",
            ) from error
        raise TaskError(
            f"an optimizer was made without parameters: the model, {a(name)}, has none",
            fix="make its layers attributes of the module: layers in a list or a dict belong in "
            "torch.nn.ModuleList or ModuleDict, and a tensor that is trained in torch.nn.Parameter",
        ) from error


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


def _call(maker: type, wants: str) -> str:
    """Returns the call that makes an optimizer or a scheduler of a class: `Adam(..., lr=0.001)`."""
    parameters = inspect.signature(maker).parameters
    arguments = ["model.parameters()" if wants == "model" else wants]
    arguments += [f"{name}=..." for name in _required(maker)[1:]]
    if "lr" in parameters and "lr=..." not in arguments:
        arguments.append(f"lr={parameters['lr'].default}")
    return f"{maker.__name__}({', '.join(arguments)})"


def _check_maker(value: object, what: str, wants: str, makes: type, example: str) -> None:
    """Checks a function of one value, or a class whose constructor takes only that value."""
    if value is None:
        return
    maker = value if isinstance(value, type) else type(value)
    if issubclass(maker, makes):
        example = f"{what}=lambda {wants}: {_call(maker, wants)}"
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
