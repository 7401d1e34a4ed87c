"""Loads weights from files into a model that may be sharded: each rank reads its shards; free of hooks."""

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
    """Loads parameters and buffers one by one; of a sharded parameter only this rank's shard is read.

    Tensors that aren't in the state dict, such as buffers that aren't persistent, stay unchanged.

    Args:
        path: as in `eventloop.toolbox.saved_weights_at`.
        warns: whether to warn about names that the model lacks; these weights are ignored.

    Returns:
        A short description of how names were changed, or "".

    Raises:
        SettingError: a weight is missing, or has another shape or kind.
        TaskError, CheckpointError, UsageError: the file can't be read.
    """
    tensors = {
        name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)
    }
    saved, renamed = _by_own_names(saved_weights_at(path), tensors)
    weights = with_tied(model, saved)
    _require_fitting(path, weights, tensors)
    unexpected = [name for name in weights if name not in tensors]
    if unexpected and warns:
        warnings.warn(
            f"weights: {path} has {len(unexpected)} that the model lacks, left out: "
            f"{_named(unexpected)}",
            stacklevel=3,
        )
    with torch.no_grad():
        for name, into in tensors.items():
            into.copy_(shards_like(weights[name], into))
    return renamed


def _by_own_names(
    weights: Mapping[str, SavedTensor], model_names: Collection[str]
) -> tuple[Mapping[str, SavedTensor], str]:
    """Returns weights under the model's names, if the names differ only by a prefix.

    For example, a model was saved without its head, or inside another module.
    """
    if any(name in weights for name in model_names):
        return weights, ""
    fits: list[tuple[int, dict[str, SavedTensor], str]] = []
    for prefix in _beginnings(model_names):
        longer = {prefix + name: weight for name, weight in weights.items()}
        fits.append((len(longer.keys() & model_names), longer, f"{prefix!r} before each name"))
    for prefix in _beginnings(weights):
        shorter = {name.removeprefix(prefix): weight for name, weight in weights.items()}
        fits.append(
            (len(shorter.keys() & model_names), shorter, f"without {prefix!r} before names")
        )
    num, best, renamed = max(fits, key=lambda fit: fit[0], default=(0, {}, ""))
    return (best, renamed) if num else (weights, "")


def _beginnings(names: Iterable[str]) -> list[str]:
    """Returns the prefixes of names, up to the second dot."""
    prefixes = []
    split_names = [name.split(".") for name in names]
    for num in (1, 2):
        for segments in split_names:
            if len(segments) > num:
                prefixes.append(".".join(segments[:num]) + ".")
    return list(dict.fromkeys(prefixes))


def _require_fitting(
    path: Path, weights: Mapping[str, SavedTensor], tensors: Mapping[str, Tensor]
) -> None:
    missing = [name for name in tensors if name not in weights]
    if missing:
        raise SettingError(
            f"weights: {path} lacks {len(missing)} of the model's {len(tensors)}: {_named(missing)}; it "
            f"has {_named(weights)}",
            fix=_FIX,
        )
    shapes = [
        f"{name!r} is {tuple(weights[name].shape)} there and {tuple(tensor.shape)} in the model"
        for name, tensor in tensors.items()
        if tuple(weights[name].shape) != tuple(tensor.shape)
    ]
    kinds = [
        f"{name!r} is {weights[name].dtype} there and {tensor.dtype} in the model"
        for name, tensor in tensors.items()
        if _kind(weights[name].dtype) != _kind(tensor.dtype)
    ]
    for property_name, differing in (("shapes", shapes), ("kinds", kinds)):
        if differing:
            raise SettingError(
                f"weights: {path} has other {property_name}: {first_of(differing, _MOST_NAMED, '; ')}",
                fix=_FIX,
            )


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def _named(names: Iterable[str]) -> str:
    return first_of((repr(name[:80]) for name in names), _MOST_NAMED)
