"""The default name of a task, which is also the name of the folder of its runs."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from eventloop.naming import kebab

_FALLBACK = "task"
_UNUSUAL_CHARS = re.compile(r"[^A-Za-z0-9_.-]+")
_MAX_LENGTH = 60
# `Sequential` and torch's other containers say nothing about a model.
_CONTAINERS = nn.modules.container.__name__


def name_of_model(model: Any) -> str:
    """Returns a name for a task: the name of the model's class, else of the script or notebook.

    Args:
        model: an `nn.Module`, or a function or class that returns an `nn.Module`.
    """
    return _usable(_name_of(model)) or name_of_program()


def name_of_hooks(task: object) -> str:
    """Returns a name for an object or a module that implements hooks."""
    if isinstance(task, ModuleType):
        name = task.__name__.rpartition(".")[2]
        return name_of_program() if name == "__main__" else _usable(name) or _FALLBACK
    return _usable(_name_of(task)) or name_of_program()


def name_of_program() -> str:
    """Returns the name of the running script or notebook, else "task"."""
    main = sys.modules.get("__main__")
    # Set by VS Code, and by Jupyter's server since version 2, in the kernel.
    notebook = getattr(main, "__vsc_ipynb_file__", None) or os.environ.get("JPY_SESSION_NAME")
    path = Path(getattr(main, "__file__", None) or notebook or "")
    # `python -m package` runs package/__main__.py.
    name = path.parent.name if path.stem == "__main__" else path.stem
    return _usable(name) or _FALLBACK


def _name_of(value: Any) -> str:
    """Returns the name of a function, or of an object's class; "" for a lambda or a container."""
    while isinstance(value, functools.partial):
        value = value.func
    if inspect.isclass(value) or isinstance(value, nn.Module):
        kind = value if inspect.isclass(value) else type(value)
        return "" if kind.__module__ == _CONTAINERS else kebab(kind.__name__)
    if inspect.isroutine(value):
        return "" if value.__name__ == "<lambda>" else value.__name__
    return kebab(type(value).__name__)


def _usable(name: str) -> str:
    """Returns a name without characters that are unusual in names of folders."""
    return _UNUSUAL_CHARS.sub("-", name).strip("-._")[:_MAX_LENGTH]
