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
        TypeError: a value has the wrong type; the message contains the line to write.
    """
    _check_model(model)
    if isinstance(loss, type):
        raise TypeError(
            f"Task(loss={loss.__name__}) is a class, not a function of outputs and targets: "
            f"write loss={loss.__name__}()"
        )
    _check_maker(optimizer, "optimizer", "model", Optimizer, _OPTIMIZER)
    makers = scheduler.values() if isinstance(scheduler, Mapping) else [scheduler]
    for maker in makers:
        _check_maker(maker, "scheduler", "optimizer", LRScheduler, _SCHEDULER)
    for value, argument in ((loss, "loss"), (forward, "forward")):
        if value is not None and not callable(value):
            raise TypeError(f"Task({argument}=...) takes a function, not {value!r}")


def argument_meant(name: str, valid_names: Iterable[str]) -> str:
    """Returns the hint for an unknown argument of `Task`: "; the closest is 'model'"."""
    if name in SETTING_NAMES:
        return f"; it is a setting: Trainer(task, {name}=...), or Task(settings={{{name!r}: ...}})"
    if name in SETTINGS:
        setting, separator, description = setting_for(name, "keyword").partition(" with ")
        return f"; here it is a setting: Trainer(task, {setting}){separator}{description}"
    return known_as(name, {**TRAINER, **TASK}, valid_names)


def refuse_arguments_of_fit(
    until: object, extra_args: Sequence[object], unknown: Mapping[str, object]
) -> None:
    """Checks the arguments of `Trainer.fit`; in other frameworks, `fit` takes the model and the data.

    Args:
        until: the first positional argument.
        extra_args: further positional arguments.
        unknown: the keyword arguments that `fit` doesn't have.

    Raises:
        TypeError: `until` isn't a time, or there are other arguments.
    """
    for name in unknown:
        hint = argument_meant(name, ["until"])
        if name in _OF_TASK:
            hint = f"; here it belongs to the task: Trainer(Task({name}=...))"
        raise TypeError(f"fit(...) has no argument {name!r}{hint}")
    values = [value for value in (until, *extra_args) if value is not None]
    for value in values:
        if not isinstance(value, str | Time | int | float):  # `Time` has the message for a number
            raise TypeError(
                f"fit(until=...) takes a time such as '2ep', not {a(type(value).__name__)}; model and data "
                "belong to the task: Trainer(Task(model=..., train_dataloader=...)).fit()"
            )
    if extra_args:
        raise TypeError("fit(until=...) takes one argument, a time such as '2ep'")


def named_optimizers(optimizers: object) -> dict[str, Optimizer]:
    """Returns optimizers by name; a single optimizer is named after its class.

    Raises:
        TaskError: `optimizers` is neither an optimizer nor a mapping of optimizers.
    """
    if isinstance(optimizers, list | tuple):
        flattened = list(optimizers)
        for value in optimizers:
            if isinstance(value, list | tuple):
                flattened += value
        fix = "name them: optimizer=lambda model: {'body': SGD(...), 'head': AdamW(...)}"
        # Lightning's `configure_optimizers` returns lists of optimizers and schedulers.
        if any(isinstance(value, LRScheduler) for value in flattened):
            fix += f"; schedulers are Task({_SCHEDULER})"
        raise TaskError(
            f"the task's optimizers are {a(type(optimizers).__name__)} of {len(optimizers)}, without names",
            fix=fix,
        )
    if optimizers is None:
        raise TaskError(
            "the task's optimizer function returned None", fix=f"return it: {_OPTIMIZER}"
        )
    named: Mapping[Any, Any] = (
        optimizers
        if isinstance(optimizers, Mapping)
        else {type(optimizers).__name__.lower(): optimizers}
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
        TaskError: `scheduler` is not a scheduler, or its `step` requires an argument.
    """
    if not callable(getattr(scheduler, "step", None)):
        raise TaskError(
            f"the task's scheduler of {optimizer!r} is {a(type(scheduler).__name__)}, not a torch "
            "scheduler",
            fix=f"return it: {_SCHEDULER}",
        )
    required_names = _required(scheduler.step)
    if required_names:
        raise TaskError(
            f"{type(scheduler).__name__}.step requires {', '.join(required_names)}, but the loop calls "
            "it without arguments",
            fix="use scheduler=schedules.plateau(metric='valid/loss'), which follows a metric, or step "
            "it in `eval_after_all` of an algorithm, with state.eval_metrics",
        )
    return scheduler


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module) and not callable(model):
        raise TypeError(
            f"Task(model=...) takes an nn.Module or a function that returns one, not {model!r}"
        )
    required_names = [] if isinstance(model, nn.Module) else _required(model)
    if required_names:
        name = getattr(model, "__name__", "make")
        arguments = ", ".join(f"{required}=..." for required in required_names)
        raise TypeError(
            f"Task(model={name}) is called without arguments, but requires "
            f"{', '.join(required_names)}: write model=lambda: {name}({arguments})"
        )


def _call(maker: type, parameter: str) -> str:
    """Returns the call that creates an optimizer or a scheduler: `Adam(..., lr=0.001)`."""
    parameters = inspect.signature(maker).parameters
    arguments = ["model.parameters()" if parameter == "model" else parameter]
    arguments += [f"{name}=..." for name in _required(maker)[1:]]
    if "lr" in parameters and "lr=..." not in arguments:
        arguments.append(f"lr={parameters['lr'].default}")
    return f"{maker.__name__}({', '.join(arguments)})"


def _check_maker(
    value: object, argument: str, parameter: str, result_type: type, example: str
) -> None:
    """Checks a function with a single parameter, or a class whose constructor has only this parameter.

    Args:
        argument: the argument of `Task`.
        parameter: the parameter of the function, "model" or "optimizer".
        result_type: the class of the function's results.
        example: the line to write, for messages.
    """
    if value is None:
        return
    maker = value if isinstance(value, type) else type(value)
    if issubclass(maker, result_type):
        example = f"{argument}=lambda {parameter}: {_call(maker, parameter)}"
    # An optimizer that exists already would hold parameters that surgery or wrapping may replace.
    if isinstance(value, result_type):
        raise TypeError(
            f"Task({argument}=...) takes a function of the {parameter}, which may be replaced before it "
            f"is called, not {a(type(value).__name__)}: write {example}"
        )
    if isinstance(value, list | tuple):
        raise TypeError(
            f"Task({argument}=...) takes a function, not {a(type(value).__name__)}: {example}"
        )
    if not callable(value):
        raise TypeError(f"Task({argument}=...) takes a function, not {value!r}: write {example}")
    if isinstance(value, type) and (issubclass(value, Optimizer) or len(_required(value)) > 1):
        raise TypeError(
            f"Task({argument}={value.__name__}) is a class, not a function of the {parameter}: "
            f"write {example}"
        )


def _required(function: Callable[..., Any]) -> list[str]:
    """Returns the required parameters; none if the signature can't be read."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # functions written in C have no signature
        return []
    named_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind in named_kinds and parameter.default is parameter.empty
    ]
