"""Weights that a checkpoint leaves out because the task builds them; a digest verifies them."""

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
    state: State, hooks: Plans, weights: dict[str, Any], known_digests: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the weights to save, and a fact with the digest of the others, if any. Collective.

    Args:
        state: the State of the run.
        hooks: the plans of the run.
        weights: all weights of the model.
        known_digests: the digests of the weights that earlier checkpoints left out; new digests are
            added.

    Raises:
        PluginError: a weight that isn't saved has changed.
    """
    names = {*hooks.select_weights(state, [*weights])}
    left_out = {
        name: weight
        for name, weight in weights.items()
        if name not in names and isinstance(weight, Tensor | TensorSlice)
    }
    if not any(state.all_gather(bool(left_out))):
        return weights, {}
    digests = digests_of(left_out, state.all_gather)
    for name, digest in digests.items():
        if known_digests.setdefault(name, digest) != digest:
            raise PluginError(
                f"{name!r} has changed in training, but checkpoints leave it out",
                by=state.owner("select_weights"),
                fix="return the names of all trained weights from select_weights",
            )
    saved = {name: weight for name, weight in weights.items() if name not in left_out}
    return saved, {LEFT_OUT: merged(digests)}


def require_same_rest(state: State, hooks: Plans, weights: Mapping[str, Any], digest: str) -> None:
    """Checks that the model has the weights that a checkpoint leaves out. Collective.

    Args:
        state: the State of the run.
        hooks: the plans of the run.
        weights: the checkpoint's weights.
        digest: of the weights that the checkpoint leaves out.

    Raises:
        CheckpointError: the model's other weights differ, or it lacks weights of the checkpoint.
    """
    if problem := _misfit(weights, state.model.state_dict()):
        raise CheckpointError(
            f"the checkpoint holds {problem}",
            fix="build the model with the plugins and options of the run, which are in its "
            "manifest.json",
        )
    captured = hooks.capture_model(state).items()
    own_digests = digests_of(
        {name: weight for name, weight in captured if name not in weights}, state.all_gather
    )
    if merged(own_digests) != digest:
        raise CheckpointError(
            f"the checkpoint holds {counted(len(weights), 'weight')}, and the model's other weights "
            f"differ from the weights that it leaves out: their digest is {digest}, and the digest of "
            f"this model's {counted(len(own_digests), 'other weight')} is {merged(own_digests)}",
            fix="build the model from the same pretrained weights as in the run, from the same files",
        )


def _misfit(weights: Mapping[str, Any], model_state: Mapping[str, Any]) -> str:
    """Describes the weights that don't fit the model, by name or by shape; "" if all fit."""
    problem = "that this model lacks"
    misfits = [repr(name) for name in sorted(weights.keys() - model_state.keys())]
    if not misfits:
        problem = "of other shapes"
        shapes = {
            name: (_shape(saved_shape), _shape(model_state[name]))
            for name, saved_shape in sorted(weights.items())
        }
        misfits = [
            f"{name!r} is {saved_shape}, not {own_shape}"
            for name, (saved_shape, own_shape) in shapes.items()
            if saved_shape != own_shape
        ]
    return (
        f"{counted(len(misfits), 'weight')} {problem}: {', '.join(misfits[:3])}" if misfits else ""
    )


def _shape(weight: Any) -> tuple[int, ...]:
    return tuple(getattr(weight, "shape", ()))
