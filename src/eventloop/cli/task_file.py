"""TASK: loads the task from a file or module."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import eventloop
from eventloop.config.option_types import Option, Value, flag, options_of, typed
from eventloop.data.batches import fix_for_no_samples
from eventloop.errors import (
    EventloopError,
    SettingError,
    TaskError,
    TaskFileError,
    closest,
    closest_at,
    text_of,
)
from eventloop.fixes import shell
from eventloop.naming import json_value
from eventloop.plugin.declared_hooks import HOOKS
from eventloop.plugin.load import spec_of_file
from eventloop.plugin.records import Plugin
from eventloop.plugin.validate import implementations
from eventloop.safe_text import one_line
from eventloop.secret_values import shown_options
from eventloop.task import Task

T = TypeVar("T")
_OURS = str(Path(eventloop.__file__).parent) + os.sep
_IMPORTLIB = importlib.__file__
_FIX = "fix the task; nothing has been trained"
_NO_PACKAGE = (
    "a task file belongs to no package: write `import helpers` for a file in its folder, or name the "
    "task as a module, `eventloop fit package.module`"
)


@dataclass(frozen=True)
class TaskFile:
    """An imported task file.

    Args:
        label: TASK as typed.
        name: the name of the file without folder and suffix, or of the module.
        target: a function that returns the task, or the task itself.
        options: the function's parameters, by folded name.
        source: the text of the file.
    """

    label: str
    name: str
    target: Any
    options: Mapping[str, Option] = field(default_factory=dict)
    source: str = ""

    def origin(self, values: Mapping[str, Value]) -> dict[str, Any]:
        """Returns the task's entry for the manifest: all its options, its file's text and digest.

        Args:
            values: the parameters that were set.
        """
        digest = hashlib.sha256(self.source.encode()).hexdigest()
        set_options = self.typed_options(values)
        all_options = {
            option.name: set_options.get(option.name, option.default)
            for option in self.options.values()
        }
        options = json_value(shown_options(all_options))
        return {"options": options, "digest": f"sha256:{digest}", "source": self.source}

    def typed_options(self, values: Mapping[str, Value]) -> dict[str, Any]:
        """Returns the parameters that were set, converted for the function.

        Raises:
            SettingError: a parameter is unknown or has the wrong type, or a parameter without a
                default isn't set.
        """
        for key, value in values.items():
            if key not in self.options:
                raise SettingError(
                    f"{self.label} has no option {key!r}{closest(key, self.options)}",
                    source=value.source,
                    fix=f"list its options with {shell('eventloop', 'fit', self.label, '--help')}",
                )
        for key, option in self.options.items():
            if option.required and key not in values:
                example = f"{flag(option.name, 'task')} {option.type_name.upper()}"
                raise SettingError(
                    f"{self.label} needs its option {option.name!r}, which has no default",
                    fix=f"set it with `{example}`",
                )
        return {
            self.options[key].name: typed(self.options[key], value, "task", task=self.label)
            for key, value in values.items()
        }

    def build(self, values: Mapping[str, Value]) -> object:
        """Returns the task: a `Task`, or an object or module with hook implementations.

        Raises:
            SettingError: as `typed_options`.
            TaskError: the function raises.
            TaskFileError: the function doesn't return a task.
        """
        task = self.target
        if _is_function(task):
            options = self.typed_options(values)
            task = _guarded(self.label, lambda: self.target(**options))
            if missing := _lacks(task):
                raise TaskFileError(
                    f"{self.label}: {self.target.__name__}() returns {task!r}, which isn't a task: "
                    f"{missing}",
                    fix="return Task(model=..., ...), or an object with hook implementations",
                )
        if isinstance(task, Task) and not task.name:
            task.name = self.name
        return task


def load_task_file(label: str) -> TaskFile:
    """Imports the file or module that TASK names, and finds the task in it.

    The file's folder, or the working directory for a module, is put first on `sys.path`.

    Raises:
        TaskFileError: the file or module doesn't exist, or has no task.
        TaskError: the import raises.
    """
    file, colon, name = label.partition(":")
    if colon and file.endswith(".py"):
        raise TaskFileError(
            f"TASK is only a file, not {label!r}: its function or object is always named `task`",
            fix=f"write {shell('eventloop', 'fit', file)}, and `task = {name or 'my_task'}` at the end of the file",
        )
    is_file = label.endswith(".py") or "/" in label or os.sep in label
    module = _import_file(label) if is_file else _import_module(label)
    name = Path(label).stem if is_file else label
    target: Any = getattr(module, "task", module)
    source = ""
    with suppress(OSError, TypeError):  # an extension module has no source
        source = inspect.getsource(module).replace("\r\n", "\n")
    if _is_function(target):
        return TaskFile(label, name, target, options_of(target), source)
    if missing := _lacks(target):
        if target is module and (modules_with_tasks := _modules_with_tasks(module)):
            raise TaskFileError(
                f"{label} is a package without a task of its own",
                tasks=", ".join(modules_with_tasks),
                fix=f"name one of them: {shell('eventloop', 'fit', modules_with_tasks[0])}",
            )
        names = [name for name in vars(module) if not name.startswith("_")]
        task_note = (
            f"; `task` there is {target!r}" if target is not module else closest("task", names)
        )
        raise TaskFileError(
            f"{label} holds no task: {missing}{task_note}",
            fix="define `def task(): return Task(...)`, `task = Task(...)`, or functions marked "
            "with @hookimpl",
        )
    return TaskFile(label, name, target, source=source)


def _modules_with_tasks(package: ModuleType) -> list[str]:
    """Returns the names of a package's modules that define `task`, by their sources.

    They aren't imported: a module may need packages that aren't installed.
    """
    names = []
    for folder in getattr(package, "__path__", ()):
        for path in sorted(Path(folder).glob("*.py")):
            with suppress(OSError, ValueError, SyntaxError):
                statements = ast.parse(path.read_text(encoding="utf-8")).body
                if any(map(_defines_task, statements)):
                    names.append(f"{package.__name__}.{path.stem}")
    return names


def _defines_task(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return statement.name == "task"
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "task" for target in targets)


def _import_file(label: str) -> ModuleType:
    path = Path(label).absolute()
    if not path.is_file() or path.suffix != ".py":
        raise _no_file(label, path)
    _come_first(path.parent)
    name = path.stem.replace(".", "_")
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        name = f"{name}_task"  # don't replace another module of this name
    spec = spec_of_file(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes can be pickled for data loader workers
    loader = spec.loader
    assert loader is not None
    _guarded(label, lambda: loader.exec_module(module))
    return module


def _import_module(label: str) -> ModuleType:
    missing = _no_file(label, Path.cwd() / f"{label}.py")
    if not all(segment.isidentifier() for segment in label.split(".")):
        raise missing
    _come_first(Path.cwd())
    try:
        return _guarded(label, lambda: importlib.import_module(label))
    except TaskError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{label}.".startswith(f"{cause.name}."):
            raise missing from None
        raise


def _come_first(folder: Path) -> None:
    if sys.path[:1] != [str(folder)]:
        sys.path.insert(0, str(folder))


def _no_file(label: str, path: Path) -> TaskFileError:
    if Path(label).is_dir():
        files = [str(path) for path in sorted(Path(label).glob("*.py"))]
        return TaskFileError(
            f"{one_line(label)} is a folder",
            files=one_line(", ".join(files), 200) or "none that ends in .py",
            fix=f"name the file with the task: {shell('eventloop', 'fit', *files[:1] or ['task.py'])}",
        )
    if Path(label).is_file() and not label.endswith(".py"):
        return TaskFileError(
            f"{one_line(label)} is not a Python file", fix="name a file that ends in .py"
        )
    kind = "file" if label.endswith(".py") or "/" in label else "module"
    return TaskFileError(
        f"there is no {kind} {label!r}{closest_at(path, '*.py')}",
        folder=path.parent if path.parent.is_dir() else f"{path.parent}, which doesn't exist",
        fix="name a file, `eventloop fit examples/digits.py`, or a module that can be imported",
    )


def _is_function(target: object) -> bool:
    return inspect.isroutine(target) or inspect.isclass(target)


def _lacks(target: object) -> str:
    """Returns the reason why an object isn't a task; "" for a `Task`, or if it has `build_model`."""
    if isinstance(target, Task):
        return ""
    valid, problems = implementations(Plugin("task", "task", target), HOOKS)
    names = [impl.hook.name for impl in valid]
    if "build_model" in names:
        return ""
    if problems:
        return problems[0].what
    description = f"it implements {', '.join(names)}, but not build_model"
    return description if names else "no Task and no hook implementations"


def _guarded(label: str, call: Callable[[], T]) -> T:
    """Runs code of the task file.

    Raises:
        TaskError: the code raises; the message has the traceback without eventloop's frames.
    """
    try:
        return call()
    except (KeyboardInterrupt, EventloopError):
        raise
    except (Exception, SystemExit) as error:
        raise _raised(label, error) from error


def _raised(label: str, error: BaseException) -> TaskError:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, "<frozen")) and frame.filename != _IMPORTLIB
    ]
    fields: dict[str, Any] = {"where": _line_of(frames, error)}
    if len(frames) > 1:
        lines = "".join(traceback.format_list(frames)).splitlines()
        fields["through"] = "\n    ".join(["", *lines])
    is_relative = isinstance(error, ImportError) and "relative import" in text_of(error)
    fix = _NO_PACKAGE if is_relative else fix_for_no_samples(error) or _FIX
    return TaskError(
        f"{one_line(label)} raises {type(error).__name__}: " + text_of(error), fix=fix, **fields
    )


def _line_of(frames: Sequence[traceback.FrameSummary], error: BaseException) -> str:
    """Returns the last line of the traceback in the task's folder, which is the first frame's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    folders = [Path(frame.filename).parent for frame in frames]
    task_frames = [
        frame for frame, folder in zip(frames, folders, strict=True) if folder == folders[0]
    ]
    return (
        f"{task_frames[-1].filename}, line {task_frames[-1].lineno}, in {task_frames[-1].name}"
        if task_frames
        else "unknown"
    )
