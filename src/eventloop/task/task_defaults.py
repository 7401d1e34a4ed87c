"""What a task brings: its plugin, and what it says beside its hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from eventloop.errors import SettingError, a
from eventloop.plugin.declared import HOOKS
from eventloop.plugin.records import Plugin
from eventloop.plugin.validate import implementations
from eventloop.task import Task


@dataclass(frozen=True)
class TaskDefaults:
    """What a task brings beside its hooks; nothing where it is hooks alone."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    algorithms: tuple[object, ...] = ()
    callbacks: tuple[object, ...] = ()
    name: str = ""
    criterion: Callable[[Any, Any], Tensor] | None = None
    counts_tokens: bool = True
    described: Mapping[str, str] = field(default_factory=dict)


def task_defaults_of(task: object) -> TaskDefaults:
    """Returns what a task brings."""
    if isinstance(task, Task):
        return TaskDefaults(
            settings=task.settings,
            algorithms=task.algorithms,
            callbacks=task.callbacks,
            name=task.name,
            criterion=task.loss,
            counts_tokens=task.num_tokens is not None,
            described=task.described(),
        )
    return TaskDefaults()


def refuse_task_values(settings: Iterable[str]) -> None:
    """Checks that what was given as settings isn't of the task.

    Raises:
        SettingError: something is.
    """
    of_task = inspect.signature(Task).parameters
    for name in settings:
        if name in of_task:
            raise SettingError(
                f"{name} is a value of the task, not a setting", fix=f"write Task({name}=...)"
            )


def task_plugin(task: object) -> Plugin:
    """Makes the plugin of a task, which has the task's place in the order.

    Raises:
        TypeError: it is not a task.
    """
    if isinstance(task, Task):
        return Plugin("task", "task", task.hooks())
    if isinstance(task, type):
        raise TypeError(f"Trainer was given the class {task.__name__}, not an instance of it")
    plugin = Plugin("task", "task", task)
    if "build_model" not in {one.hook.name for one in implementations(plugin, HOOKS)[0]}:
        given = a(type(task).__name__) if isinstance(task, nn.Module) else repr(task)
        hint = "; write Task(model=...)" if isinstance(task, nn.Module) else ""
        raise TypeError(
            "a task is a Task, or an object or module that implements build_model, not "
            f"{given}{hint}"
        )
    return plugin
