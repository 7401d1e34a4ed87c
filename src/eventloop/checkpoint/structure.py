"""Changes of a run's structure since it was built: buffers, parameter groups, trained parameters.

When a run is resumed, the task builds the model and its optimizers again. Buffers that were created
or have grown in training, and parameter groups that a plugin has added, are missing then, so a
checkpoint says how to create them before their values are loaded. Changes that can't be repeated
cause a warning at the first save.
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
    """The structure that a run was built with, for a comparison with the current structure."""

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
        """Records the structure of model and optimizers as built, before anything is loaded."""
        model = state.model
        self._parameters = _shapes(model.named_parameters())
        self._buffers = _shapes(model.named_buffers())
        self._modules = frozenset(name for name, _ in model.named_modules())
        self._is_trained = _trained(model)
        self._groups = _groups(state)

    def remember_trained(self, state: State, changes: Mapping[str, Any] | None) -> None:
        """Records the trained parameters, after `after_load`, where plugins freeze and thaw.

        Args:
            state: the State of the run.
            changes: the changes in the checkpoint that the run resumes from; None for a new run.
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
        """Returns the changes since the run was built, as JSON values; {} if there are none.

        Warns once about changes that a resumed run can't repeat.
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
        """Returns the parameter names of each added group, by optimizer."""
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
            "with the optimizer, and let the run change only values; the weights can still be exported",
            stacklevel=2,
        )

    def _lost_tensors(self, state: State, buffers: list[str]) -> Iterator[str]:
        parameters = _shapes(state.model.named_parameters())
        for name, shape in parameters.items():
            if name not in self._parameters:
                yield f"the parameter {name!r} was added"
            elif self._parameters[name] not in (shape, _LAZY):
                yield f"the parameter {name!r} has changed from {self._parameters[name]} to {shape}"
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

    Call it after `after_load`, at which plugins that thaw by the clock read which parameters the task
    has frozen.

    Args:
        state: the State of the run.
        changes: the result of `Structure.changes`.

    Raises:
        CheckpointError: the model has other parameters.
    """
    parameters = dict(state.model.named_parameters())
    with _of_this_model():
        for name, is_trained in changes.get("trained", {}).items():
            parameters[name].requires_grad_(is_trained)


def restore_structure(state: State, changes: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Creates buffers and parameter groups as they were when a checkpoint was saved, without values.

    Args:
        state: the State of the run.
        changes: the result of `Structure.changes`.
        weights: the saved weights by name, with shapes and dtypes.

    Raises:
        CheckpointError: the changes don't fit the model.
    """
    parameters = dict(state.model.named_parameters())
    with _of_this_model():
        for name in changes.get("buffers", ()):
            _place_buffer(state.model, name, weights[name])
        for name in changes.get("gone", ()):
            module, buffer_name = _owner_of(state.model, name)
            setattr(module, buffer_name, None)
        for name, groups in changes.get("groups", {}).items():
            for group in groups:
                state.optimizers[name].add_param_group(
                    {"params": [parameters[param_name] for param_name in group]}
                )


def fit_buffers(model: nn.Module, weights: Mapping[str, Any]) -> list[str]:
    """Resizes registered buffers to their shapes in the weights; returns their names.

    A buffer that is registered as None may have been created in training, and others may have grown.
    Buffers of modules with their own loading code are left to that code.
    """
    own_code = tuple(loaded_by_own_code(model))
    own_shapes = _shapes(model.named_buffers())
    placed = []
    for name, value in weights.items():
        if not hasattr(value, "shape") or own_shapes.get(name) == tuple(value.shape):
            continue
        if name.startswith(own_code):
            continue
        path, _, buffer_name = name.rpartition(".")
        modules = dict(model.named_modules())
        is_empty_buffer = path in modules and modules[path]._buffers.get(buffer_name, value) is None
        if (name in own_shapes and own_shapes[name] != _LAZY) or is_empty_buffer:
            _place_buffer(model, name, value)
            placed.append(name)
    return placed


@contextmanager
def _of_this_model() -> Iterator[None]:
    """Turns errors of a model that doesn't fit the changes into a CheckpointError."""
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
    """Returns the ids of each group's parameters, by optimizer."""
    return {
        name: [[id(param) for param in group["params"]] for group in optimizer.param_groups]
        for name, optimizer in state.optimizers.items()
    }


def _owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, local_name = name.rpartition(".")
    return model.get_submodule(path), local_name


def _place_buffer(model: nn.Module, name: str, saved_tensor: Any) -> None:
    """Sets an uninitialised buffer with a saved tensor's shape and dtype in a module."""
    module, buffer_name = _owner_of(model, name)
    current = getattr(module, buffer_name, None)
    device = current.device if isinstance(current, Tensor) else _device_of(model)
    buffer = torch.empty(tuple(saved_tensor.shape), dtype=saved_tensor.dtype, device=device)
    if hasattr(module, buffer_name):
        setattr(module, buffer_name, buffer)
    else:
        module.register_buffer(buffer_name, buffer)


def _device_of(model: nn.Module) -> torch.device:
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else torch.device("cpu")
