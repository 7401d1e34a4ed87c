"""Weights alone, from a file or a checkpoint, into a model that they may not fit."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from eventloop.checkpoint.format import read
from eventloop.checkpoint.locations import checkpoint_at
from eventloop.checkpoint.weights import PART
from eventloop.errors import CheckpointError, TaskError, counted

STATES = "plugins"
_MOST_NAMED = 3


def weights_at(path: Path) -> dict[str, Tensor]:
    """Reads weights, to the host.

    Args:
        path: a safetensors file, a checkpoint, or a run, which stands for its newest that verifies.

    Raises:
        OSError, SafetensorError, CheckpointError, UsageError: as `weights_and_states` does.
    """
    return weights_and_states(path)[0]


def weights_and_states(
    path: Path, plugins: Collection[str] = ()
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads weights, and what plugins kept beside them, to the host.

    Args:
        path: a safetensors file, a checkpoint, or a run, which stands for its newest that verifies.
        plugins: by their folded names.

    Returns:
        The weights by name; and the states of those plugins that have one there.

    Raises:
        OSError, SafetensorError: there is no such file, or it isn't one.
        CheckpointError: the checkpoint doesn't verify, or has no weights.
        UsageError: the folder has no checkpoint.
    """
    if not path.is_dir():
        return load_file(path, device="cpu"), {}
    checkpoint, refused = checkpoint_at(path)
    for one in refused:
        warnings.warn(f"{one.path} isn't used: {one.reason}", stacklevel=3)
    found = read(checkpoint, only=[PART])
    weights = found.parts[PART]
    if not isinstance(weights, dict):
        raise CheckpointError(
            f"the weights of the checkpoint {str(checkpoint)!r} aren't tensors by name",
            fix="take another checkpoint",
        )
    if not plugins or STATES not in found.names:
        return weights, {}
    states = read(checkpoint, only=[STATES]).parts[STATES]
    return weights, {name: states[name] for name in plugins if name in states}


def warn_of_misfits(
    model: Mapping[str, object], weights: Mapping[str, object], path: object
) -> None:
    """Warns of names that only the model or only the weights have.

    Args:
        model: its `state_dict`.
        path: what the weights are called in messages.

    Raises:
        TaskError: no name is the same.
    """
    if not model.keys() & weights.keys():
        raise TaskError(
            f"none of the {len(weights)} weights in {path} is one of this model's",
            weights=f"have {_named(weights)}",
            model=f"has {_named(model)}",
            fix="give weights of this model, or of a part of it with the names that it has here",
        )
    missing = [name for name in model if name not in weights]
    unexpected = [name for name in weights if name not in model]
    if missing:
        warnings.warn(
            f"{path} lacks {counted(len(missing), 'weight')} of the model, left as built: "
            f"{_named(missing)}",
            stacklevel=3,
        )
    if unexpected:
        warnings.warn(
            f"{path} has {counted(len(unexpected), 'weight')} that the model lacks, left out: "
            f"{_named(unexpected)}",
            stacklevel=3,
        )


def _named(names: Iterable[str]) -> str:
    """Returns the first names; they may be a stranger's."""
    listed = list(names)
    more = len(listed) - _MOST_NAMED
    text = ", ".join(repr(name[:80]) for name in listed[:_MOST_NAMED])
    return f"{text} and {more} more" if more > 0 else text or "none"
