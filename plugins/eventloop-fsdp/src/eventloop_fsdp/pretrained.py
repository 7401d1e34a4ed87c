"""Weights from files into a model that may be sharded: each rank reads what it holds; free of hooks."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from eventloop import SettingError
from eventloop.toolbox import SavedTensor, first_of, saved_weights_at, shards_like, with_tied

_MOST_NAMED = 5
_FIX = "give weights of this model, or load them in the task and leave weights out"


def load_pretrained(model: nn.Module, path: Path, *, warns: bool = True) -> str:
    """Fills parameters and buffers, one after the other; of a sharded one its shard alone is read.

    What has no name in a state dict, a buffer that isn't persistent say, stays as it is.

    Args:
        path: as `eventloop.toolbox.saved_weights_at` takes it.
        warns: whether names that the model lacks are warned of; they are left out.

    Returns:
        What was done to the names, in a few words, or "".

    Raises:
        SettingError: a weight is missing, or has another shape or kind.
        TaskError, CheckpointError, UsageError: the file can't be read.
    """
    own = {name: one for name, one in model.state_dict().items() if isinstance(one, Tensor)}
    found, renamed = _by_own_names(saved_weights_at(path), own)
    weights = with_tied(model, found)
    _require_fitting(path, weights, own)
    unexpected = [name for name in weights if name not in own]
    if unexpected and warns:
        warnings.warn(
            f"weights: {path} has {len(unexpected)} that the model lacks, left out: "
            f"{_named(unexpected)}",
            stacklevel=3,
        )
    with torch.no_grad():
        for name, into in own.items():
            into.copy_(shards_like(weights[name], into))
    return renamed


def _by_own_names(
    weights: Mapping[str, SavedTensor], own: Collection[str]
) -> tuple[Mapping[str, SavedTensor], str]:
    """Returns weights by the model's names, where one beginning is all that is different.

    A model without its head was saved, say, or one inside of another module.
    """
    if any(name in weights for name in own):
        return weights, ""
    fits: list[tuple[int, dict[str, SavedTensor], str]] = []
    for prefix in _beginnings(own):
        longer = {prefix + name: one for name, one in weights.items()}
        fits.append((len(longer.keys() & own), longer, f"{prefix!r} before each name"))
    for prefix in _beginnings(weights):
        shorter = {name.removeprefix(prefix): one for name, one in weights.items()}
        fits.append((len(shorter.keys() & own), shorter, f"without {prefix!r} before names"))
    num, best, renamed = max(fits, key=lambda one: one[0], default=(0, {}, ""))
    return (best, renamed) if num else (weights, "")


def _beginnings(names: Iterable[str]) -> list[str]:
    """Returns what names begin with, up to the second dot."""
    parts = [name.split(".") for name in names]
    found = (".".join(one[:num]) + "." for num in (1, 2) for one in parts if len(one) > num)
    return list(dict.fromkeys(found))


def _require_fitting(
    path: Path, weights: Mapping[str, SavedTensor], own: Mapping[str, Tensor]
) -> None:
    missing = [name for name in own if name not in weights]
    if missing:
        raise SettingError(
            f"weights: {path} lacks {len(missing)} of the model's {len(own)}: {_named(missing)}; it "
            f"has {_named(weights)}",
            fix=_FIX,
        )
    shapes = [
        f"{name!r} is {tuple(weights[name].shape)} there and {tuple(one.shape)} in the model"
        for name, one in own.items()
        if tuple(weights[name].shape) != tuple(one.shape)
    ]
    kinds = [
        f"{name!r} is {weights[name].dtype} there and {one.dtype} in the model"
        for name, one in own.items()
        if _kind(weights[name].dtype) != _kind(one.dtype)
    ]
    for what, differing in (("shapes", shapes), ("kinds", kinds)):
        if differing:
            raise SettingError(
                f"weights: {path} has other {what}: {first_of(differing, _MOST_NAMED, '; ')}",
                fix=_FIX,
            )


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def _named(names: Iterable[str]) -> str:
    return first_of((repr(name[:80]) for name in names), _MOST_NAMED)
