"""The teacher: from a name and a file of weights to a module that only computes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from torch import nn

from eventloop.toolbox import module_of_file, weights_at


def named_teacher(label: str, weights: Path | None = None) -> nn.Module:
    """Builds the teacher that a label names, with its weights.

    Args:
        label: `module:function` or `./file.py:function`; what it names gives an nn.Module when it
            is called without arguments, or is one.
        weights: a safetensors file, a checkpoint, or the folder of a run.

    Raises:
        ValueError: there is no such thing, or it is not a model.
        Exception: what the file, the function or the weights raise.
    """
    place, name = parts_of(label)
    module = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    if not hasattr(module, name):
        raise ValueError(f"{place} has no {name!r}")
    made = getattr(module, name)
    model = made if isinstance(made, nn.Module) else made()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{label} gives {type(model).__name__}, no nn.Module")
    if weights is not None:
        model.load_state_dict(weights_at(weights))
    return model


def parts_of(label: str) -> tuple[str, str]:
    """Splits a label into file or module, and the name in it.

    Raises:
        ValueError: it lacks one of them.
    """
    place, _, name = label.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(
            f"teacher={label!r} names no function; write module:function or ./file.py:function"
        )
    return place, name


def _file(path: Path) -> ModuleType:
    """Imports a file; its folder is the last place where its own imports are looked for."""
    path = path.absolute()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return module_of_file(f"eventloop_teacher_{path.stem}", path)
