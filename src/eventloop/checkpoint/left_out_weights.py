"""Weights that a checkpoint leaves out, since the task builds them; a digest proves that it did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from eventloop.checkpoint.manifest import LEFT_OUT
from eventloop.errors import CheckpointError, PluginError, counted
from eventloop.training.tensor_slices import TensorSlice
from eventloop.training.weight_digest import digests_of, merged

if TYPE_CHECKING:
    from eventloop.plugin.plans import Plans
    from eventloop.state import State


def selected(
    state: State, hooks: Plans, weights: dict[str, Any], before: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the weights to save, and the fact about the others, if any; collective.

    Args:
        before: the digests of those that were left out so far; gets new ones.

    Raises:
        PluginError: a weight that isn't saved has changed.
    """
    names = {*hooks.select_weights(state, [*weights])}
    others = {
        name: one
        for name, one in weights.items()
        if name not in names and isinstance(one, Tensor | TensorSlice)
    }
    if not any(state.all_gather(bool(others))):
        return weights, {}
    digests = digests_of(others, state.all_gather)
    for name, digest in digests.items():
        if before.setdefault(name, digest) != digest:
            raise PluginError(
                f"{name!r} has changed in training, but checkpoints leave it out",
                by=state.owner("select_weights"),
                fix="let select_weights name all that is trained",
            )
    saved = {name: one for name, one in weights.items() if name not in others}
    return saved, {LEFT_OUT: merged(digests)}


def require_same_rest(state: State, hooks: Plans, weights: Mapping[str, Any], digest: str) -> None:
    """Checks that the model has the weights that a checkpoint leaves out; collective.

    Args:
        weights: those of the checkpoint.
        digest: of the others.

    Raises:
        CheckpointError: it has others, or isn't such a model.
    """
    if problem := _misfit(weights, state.model.state_dict()):
        raise CheckpointError(
            f"the checkpoint holds {problem}",
            fix="build the model with the plugins and options of the run, which are in its "
            "manifest.json",
        )
    captured = hooks.capture_model(state).items()
    found = digests_of(
        {name: one for name, one in captured if name not in weights}, state.all_gather
    )
    if merged(found) != digest:
        raise CheckpointError(
            f"the checkpoint holds {counted(len(weights), 'weight')} of a model whose others aren't "
            f"this one's: the digest of what it leaves out is {digest}, that of this model's "
            f"{counted(len(found), 'other weight')} is {merged(found)}",
            fix="build the model on the weights that it was trained on, from the same files, say",
        )


def _misfit(weights: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Returns which weights aren't the model's, by name or by shape, or ""."""
    what = "that this model lacks"
    found = [repr(name) for name in sorted(weights.keys() - own.keys())]
    if not found:
        what = "of other shapes"
        shapes = {name: (_shape(one), _shape(own[name])) for name, one in sorted(weights.items())}
        found = [
            f"{name!r} is {one}, not {its}" for name, (one, its) in shapes.items() if one != its
        ]
    return f"{counted(len(found), 'weight')} {what}: {', '.join(found[:3])}" if found else ""


def _shape(weight: Any) -> tuple[int, ...]:
    return tuple(getattr(weight, "shape", ()))
