"""What a run has changed of the structure it was built with: buffers, parameter groups, trained parameters.

The task builds the model and its optimizers anew when a run is resumed. A buffer that grows or comes
into being in training, and a parameter group that a plugin adds, are missing then: a checkpoint says
how to make them before their values are loaded. What can't be made again is named at the first save.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from eventloop.errors import CheckpointError, counted, first_of
from eventloop.training.weight_export import loaded_by_own_code

if TYPE_CHECKING:
    from eventloop.state import State

Shapes = Mapping[str, tuple[int, ...]]


class Structure:
    """The structure that a run was built with, to compare the current one with."""

    def __init__(self) -> None:
        self._parameters: Shapes = {}
        self._buffers: Shapes = {}
        self._modules: frozenset[str] = frozenset()
        self._is_trained: Mapping[str, bool] = {}
        self._flipped: frozenset[str] = frozenset()
        self._changed_trained: set[str] = set()
        self._groups: Mapping[str, list[list[int]]] = {}
        self._has_warned = False

    def remember(self, state: State) -> None:
        """Remembers model and optimizers as they are built, before anything is loaded."""
        model = state.model
        self._parameters = _shapes(model.named_parameters())
        self._buffers = _shapes(model.named_buffers())
        self._modules = frozenset(name for name, _ in model.named_modules())
        self._is_trained = _trained(model)
        self._groups = _groups(state)

    def remember_trained(self, state: State, changes: Mapping[str, Any] | None) -> None:
        """Remembers what was trained when the run began: after `after_load`, where plugins freeze and thaw.

        Args:
            changes: those of the checkpoint that the run resumes from; None for a new run.
        """
        if changes is None:
            trained = _trained(state.model)
            built = self._is_trained
            self._flipped = frozenset(
                name for name in trained if trained[name] != built.get(name, trained[name])
            )
        else:
            self._flipped = frozenset(changes.get("flipped", ()))
            self._changed_trained = set(changes.get("trained", ()))

    def _was_trained(self, name: str, default: bool) -> bool:
        """Returns whether a parameter was trained when the run began."""
        return self._is_trained.get(name, default) != (name in self._flipped)

    def changes(self, state: State) -> dict[str, Any]:
        """Returns what has changed, as JSON values; {} for a run that is as it was built.

        Warns once of what a resumed run can't make again.
        """
        saved = state.model.state_dict().keys()
        buffers = _shapes(state.model.named_buffers())
        changed = [name for name in buffers if buffers[name] != self._buffers.get(name)]
        gone = [name for name in self._buffers if name not in buffers]
        trained = _trained(state.model)
        self._changed_trained |= {
            name
            for name, is_trained in trained.items()
            if name in self._parameters and is_trained != self._was_trained(name, is_trained)
        }
        saved_buffers = [name for name in changed if name in saved]
        changes: dict[str, Any] = {
            "buffers": saved_buffers,
            "gone": gone,
            "trained": {
                name: is_trained
                for name, is_trained in trained.items()
                if name in self._changed_trained
            },
            "flipped": sorted(self._flipped),
            "groups": self._new_groups(state),
        }
        self._warn_of_losses(state, saved_buffers)
        return {name: change for name, change in changes.items() if change}

    def _new_groups(self, state: State) -> dict[str, list[list[str]]]:
        """Returns the names of the parameters of each group that was added, by optimizer."""
        names = {id(param): name for name, param in state.model.named_parameters()}
        added: dict[str, list[list[str]]] = {}
        for name, groups in _groups(state).items():
            new = groups[len(self._groups.get(name, groups)) :]
            if new and all(param in names for group in new for param in group):
                added[name] = [[names[param] for param in group] for group in new]
        return added

    def _warn_of_losses(self, state: State, buffers: list[str]) -> None:
        if self._has_warned:
            return
        losses = [*self._lost_tensors(state, buffers), *self._lost_groups(state)]
        if not losses or state.rank != 0:
            return
        self._has_warned = True
        warnings.warn(
            f"this run can't be resumed from its checkpoints: since it was built, {first_of(losses)}, "
            "which the task doesn't build. Build it with the model (in Task(model=...) or at `init`) or "
            "with the optimizer, and let the run change values only; the weights can be exported all "
            "the same",
            stacklevel=2,
        )

    def _lost_tensors(self, state: State, buffers: list[str]) -> Iterator[str]:
        parameters = _shapes(state.model.named_parameters())
        for name, shape in parameters.items():
            if name not in self._parameters:
                yield f"the parameter {name!r} was added"
            elif self._parameters[name] not in (shape, _LAZY):
                yield f"the parameter {name!r} has become {shape}, it was {self._parameters[name]}"
        for name in self._parameters.keys() - parameters.keys():
            yield f"the parameter {name!r} was removed"
        for name in buffers:
            if name.rpartition(".")[0] not in self._modules:
                yield f"the buffer {name!r} was added in a new module"

    def _lost_groups(self, state: State) -> Iterator[str]:
        added = self._new_groups(state)
        for name, groups in _groups(state).items():
            built = self._groups.get(name, groups)
            num_new = len(groups) - len(built)
            if num_new > 0 and name not in added:
                yield (
                    f"the optimizer {name!r} got {counted(num_new, 'parameter group')} with parameters "
                    "that aren't the model's"
                )
            if groups[: len(built)] != built:
                yield f"parameter groups of the optimizer {name!r} got other parameters"


def restore_trained(state: State, changes: Mapping[str, Any]) -> None:
    """Freezes and thaws parameters as they were when a checkpoint was saved.

    After `after_load`, at which plugins that thaw by the clock look at what the task has frozen.

    Args:
        changes: what `Structure.changes` returned.

    Raises:
        CheckpointError: the model that was built has other parameters.
    """
    parameters = dict(state.model.named_parameters())
    with _of_this_model():
        for name, is_trained in changes.get("trained", {}).items():
            parameters[name].requires_grad_(is_trained)


def restore_structure(state: State, changes: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Makes buffers and parameter groups as they were when a checkpoint was saved, without values.

    Args:
        changes: what `Structure.changes` returned.
        weights: the saved weights by name, with shapes and dtypes.

    Raises:
        CheckpointError: the model that was built has no place for them.
    """
    parameters = dict(state.model.named_parameters())
    with _of_this_model():
        for name in changes.get("buffers", ()):
            _place_buffer(state.model, name, weights[name])
        for name in changes.get("gone", ()):
            module, last = _owner_of(state.model, name)
            setattr(module, last, None)
        for name, groups in changes.get("groups", {}).items():
            for group in groups:
                state.optimizers[name].add_param_group({"params": [parameters[it] for it in group]})


def fit_buffers(model: nn.Module, weights: Mapping[str, Any]) -> list[str]:
    """Resizes registered buffers to the shapes that they have among weights; returns their names.

    A buffer that is registered as None has come into being in training; another may have grown. Those
    of modules that load their weights by code of their own are left to it.
    """
    own_code = tuple(loaded_by_own_code(model))
    own = _shapes(model.named_buffers())
    placed = []
    for name, value in weights.items():
        if not hasattr(value, "shape") or own.get(name) == tuple(value.shape):
            continue
        if name.startswith(own_code):
            continue
        path, _, last = name.rpartition(".")
        modules = dict(model.named_modules())
        is_empty_buffer = path in modules and modules[path]._buffers.get(last, value) is None
        if (name in own and own[name] != _LAZY) or is_empty_buffer:
            _place_buffer(model, name, value)
            placed.append(name)
    return placed


@contextmanager
def _of_this_model() -> Iterator[None]:
    """Turns errors of a model that lacks what a checkpoint names into a CheckpointError."""
    try:
        yield
    except (LookupError, AttributeError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint has changes of the run that don't fit this model: {error}",
            fix="start the run with the task that wrote it, or a new one in another run_dir",
        ) from error


_LAZY = (-1,)


def _shapes(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, tuple[int, ...]]:
    return {name: _LAZY if is_lazy(tensor) else tuple(tensor.shape) for name, tensor in tensors}


def _trained(model: nn.Module) -> dict[str, bool]:
    return {name: param.requires_grad for name, param in model.named_parameters()}


def _groups(state: State) -> dict[str, list[list[int]]]:
    """Returns the identities of the parameters of each group, by optimizer."""
    return {
        name: [[id(param) for param in group["params"]] for group in optimizer.param_groups]
        for name, optimizer in state.optimizers.items()
    }


def _owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def _place_buffer(model: nn.Module, name: str, like: Any) -> None:
    """Puts an empty buffer of a saved tensor's shape and type into a module."""
    module, last = _owner_of(model, name)
    current = getattr(module, last, None)
    device = current.device if isinstance(current, Tensor) else _device_of(model)
    buffer = torch.empty(tuple(like.shape), dtype=like.dtype, device=device)
    if hasattr(module, last):
        setattr(module, last, buffer)
    else:
        module.register_buffer(last, buffer)


def _device_of(model: nn.Module) -> torch.device:
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else torch.device("cpu")
