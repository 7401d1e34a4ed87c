"""Helpers for optimizers and schedulers: their properties, and checks of saved states."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as optim
from torch.optim.lr_scheduler import LRScheduler

from eventloop.devices import kind_of
from eventloop.errors import TaskError, a, counted, first_of

if TYPE_CHECKING:
    from eventloop.state import State
    from eventloop.view import StateView

# Optimizers with a fused implementation on CUDA (torch 2.13; Adagrad has one only on the CPU).
_FUSED = (SGD, Adam, AdamW)
# torch replaces every optimizer's `step` by this wrapper, which runs hooks and labels profiles.
_WITH_HOOKS = Optimizer.profile_hook_step(Optimizer.step).__code__
# The state of every scheduler of torch has these entries.
_REQUIRED_ENTRIES = ("last_epoch", "_step_count", "base_lrs", "_last_lr")


@runtime_checkable
class FollowsMetric(Protocol):
    """A scheduler that steps after evaluations."""

    def begin(self, state: State) -> None:
        """Called when everything is built and loaded."""

    def observe(self, state: State) -> None:
        """Called on every rank after all eval sets have been evaluated."""


def wants_closure(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer's `step` requires a closure, as LBFGS's does."""
    # The method of the class: torch's schedulers replace the method of the instance (torch 2.13).
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    return any(
        parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        for parameter in parameters
    )


def could_be_fused(optimizer: Optimizer, device: torch.device) -> bool:
    """Returns whether `fused=True` would be faster and the task hasn't chosen an implementation.

    A fused step on CUDA takes one or a few kernels, and fp16 waits less often. On the CPU, small
    models gain nothing. `fused=False` and `foreach=True` count as a choice.
    """
    return (
        kind_of(device).fuses_optimizers
        and type(optimizer) in _FUSED
        and not any(
            group["fused"] is not None or group["foreach"] or group["differentiable"]
            for group in optimizer.param_groups
        )
    )


def params_of(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Returns the parameters of optimizers, group by group."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [param for group in groups for param in group["params"]]


def untrained_note(state: StateView) -> str:
    """Returns a line about trainable parameters that are in no optimizer; "" if there are none.

    Includes the parameters of the task's loss if the loss is a module.
    """
    in_optimizers = set(map(id, params_of(state.optimizers.values())))
    if not in_optimizers:  # `fit` raises an error for this
        return ""
    named = list(state.model.named_parameters())
    if isinstance(state.criterion, nn.Module):
        named += state.criterion.named_parameters("loss")
    trainable = [(name, param) for name, param in named if param.requires_grad]
    missing = [name for name, param in trainable if id(param) not in in_optimizers]
    if not missing:
        return ""
    return (
        f"in no optimizer, so they stay as they are: {first_of(missing)} ({len(missing)} of "
        f"{counted(len(trainable), 'trainable parameter')}); add them to an optimizer, or freeze them with "
        "requires_grad_(False)"
    )


def check_optimizers(state: State) -> None:
    """Raises TaskError if an optimizer has no parameter of the model, or two share a parameter."""
    names = {id(param): name for name, param in state.model.named_parameters()}
    names |= {id(param): name for name, param in state.wrapped_model.named_parameters()}
    optimizer_of_param: dict[int, str] = {}
    for optimizer_name, optimizer in state.optimizers.items():
        params = set(map(id, params_of([optimizer])))
        if params and not params & names.keys():
            raise TaskError(
                f"the optimizer {optimizer_name!r} holds no parameter of the model, so its steps "
                "would change nothing",
                fix="use the model that is passed to the function: optimizer=lambda model: "
                "SGD(model.parameters(), lr=0.1); make the parameters of a loss part of the model",
            )
        for param in params:
            earlier_name = optimizer_of_param.setdefault(param, optimizer_name)
            if earlier_name != optimizer_name:
                raise TaskError(
                    f"the optimizers {earlier_name!r} and {optimizer_name!r} share the parameter "
                    f"{names.get(param, 'of no name')}, so each batch would update it twice",
                    fix="give each optimizer different parameters",
                )


def step(optimizer: Optimizer) -> None:
    """Does the same as `optimizer.step()`.

    Skips torch's wrapper for profilers and hooks if there are none, which saves 15 us of the 300 us of
    a small step. Relies on private attributes (checked with torch 2.13).
    """
    # torch's schedulers replace `step` on the instance.
    function: Any = getattr(optimizer.step, "__func__", None)
    if (
        getattr(function, "__code__", None) is not _WITH_HOOKS
        or profiler._is_profiler_enabled
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optim._global_optimizer_pre_hooks
        or optim._global_optimizer_post_hooks
    ):
        optimizer.step()
    else:
        function.__wrapped__(optimizer)


def drop_gradients(optimizer: Optimizer) -> None:
    """Does the same as `optimizer.zero_grad()`.

    Unless an optimizer overrides it, skips torch's code for profilers and compilers, which saves 10 µs
    of the 200 µs of a small step.
    """
    if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


def is_alike(value: Any, reference: Any) -> bool:
    """Returns whether a loaded value may replace another: the same type, or a number for a number."""
    if reference is None:
        return value is None or isinstance(value, bool | int | float | str)
    if isinstance(reference, bool) or isinstance(value, bool):
        # A group that was created with fused=None may have been saved after fused was switched on.
        return type(value) is type(reference) or value is None
    if isinstance(reference, Tensor) and reference.numel() != 1:
        return isinstance(value, type(reference))
    if isinstance(reference, int | float | Tensor):
        if isinstance(value, Tensor):
            return value.numel() == 1
        return isinstance(value, int | float) and not math.isnan(value)
    if isinstance(reference, list | tuple):
        return _is_alike_sequence(value, reference)
    return isinstance(value, Mapping if isinstance(reference, Mapping) else type(reference))


def _is_alike_sequence(values: Any, reference: list[Any] | tuple[Any, ...]) -> bool:
    if not isinstance(values, list | tuple):
        return False
    if len(values) == len(reference):
        return all(map(is_alike, values, reference))
    if isinstance(reference, tuple):
        return False
    # A list may grow in a run; its entries are then all like the first.
    return not reference or (
        bool(values) and all(is_alike(value, reference[0]) for value in values)
    )


def require_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Checks the saved state of an optimizer: its groups and, for torch's optimizers, its tensors.

    Raises:
        ValueError, LookupError, TypeError: the state can't be a state of this optimizer.
    """
    groups = optimizer.param_groups
    saved_groups = state["param_groups"]
    if len(groups) != len(saved_groups):
        raise ValueError(
            f"{len(saved_groups)} param_groups, not {len(groups)}; add all at the start"
        )
    for idx, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=True)):
        for name, value in group.items():
            if name not in saved_group:
                raise ValueError(f"param_groups[{idx}] has no {name!r}")
            if name != "params" and not is_alike(saved_group[name], value):
                raise ValueError(f"param_groups[{idx}].{name} is {_shown(saved_group[name])}")
        numbers = saved_group["params"]
        is_list = isinstance(numbers, list | tuple)
        if not is_list or not all(type(number) is int for number in numbers):
            raise ValueError(f"param_groups[{idx}].params aren't numbers")
    if not isinstance(state["state"], Mapping):
        raise TypeError(f"state is {a(type(state['state']).__name__)}")
    if type(optimizer).__module__.startswith("torch.optim"):
        options = inspect.signature(type(optimizer)).parameters.keys() & optimizer.defaults.keys()
        for group, saved_group in zip(groups, saved_groups, strict=True):
            # The constructor checks the ranges of options, and which shapes of parameters it accepts.
            params = group["params"][:1] or [torch.zeros(1)]
            tiny_params = [torch.zeros((1,) * param.dim(), dtype=param.dtype) for param in params]
            type(optimizer)(tiny_params, **{name: saved_group[name] for name in options})
        _require_tensors(optimizer, state)


def fitting_scheduler(scheduler: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a saved state that a scheduler can load.

    torch's schedulers set an attribute for every entry, whatever its name. Entries that this version of
    torch doesn't know are left out.

    Raises:
        ValueError, LookupError: a value has another type than the scheduler's, or is missing.
    """
    if not isinstance(scheduler, LRScheduler):
        return dict(state)
    current_state = scheduler.state_dict()
    for name in _REQUIRED_ENTRIES:
        if name in current_state and name not in state:
            raise KeyError(name)
    for name, value in current_state.items():
        if name in state and not is_alike(state[name], value):
            raise ValueError(f"{name} is {_shown(state[name])}, not like {value!r}")
    excluded = vars(scheduler).keys() - current_state.keys()  # for example the optimizer
    fitting = {}
    for name, value in state.items():
        if name not in excluded and (name in current_state or _declares(scheduler, name)):
            fitting[name] = value
    return fitting


def _declares(target: Any, name: str) -> bool:
    """Returns whether the code of a scheduler mentions an attribute, so that a file may set it.

    Methods and properties of the class don't count: setting them on the instance would hide them.
    """
    class_attribute = inspect.getattr_static(type(target), name, None)
    is_descriptor = hasattr(type(class_attribute), "__get__")
    if callable(class_attribute) or is_descriptor or name.startswith("__"):
        return False
    return name in vars(target) or any(name in code.co_names for code in _codes(type(target)))


def _codes(kind: type) -> Iterator[CodeType]:
    for base in kind.__mro__:
        for value in vars(base).values():
            function = inspect.unwrap(value) if callable(value) else value
            if isinstance(function, FunctionType):
                yield function.__code__


def _require_tensors(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Checks the states of parameters: their shapes, and the same entries for all parameters of a group.

    Only parameters with the same number of dimensions are compared: Adafactor has other entries for a
    matrix than for a vector.
    """
    for group, saved_group in zip(optimizer.param_groups, state["param_groups"], strict=True):
        reference_states: dict[int, Mapping[str, Any]] = {}
        for param, number in zip(group["params"], saved_group["params"], strict=True):
            if number not in state["state"]:
                continue
            param_state = state["state"][number]
            if not isinstance(param_state, Mapping):
                raise TypeError(f"state holds {_shown(param_state)}")
            reference = reference_states.setdefault(param.dim(), param_state)
            if param_state.keys() != reference.keys():
                names = ", ".join(map(str, param_state))
                raise ValueError(f"state has {names} for only one of the parameters")
            for name, value in param_state.items():
                if not _fits(value, reference[name], param, optimizer):
                    raise ValueError(f"state.{name} is {_shown(value)}")


def _fits(value: Any, reference: Any, param: Tensor, optimizer: Optimizer) -> bool:
    if isinstance(optimizer, torch.optim.LBFGS):  # stores lists over all parameters, flattened
        return True
    if isinstance(value, Tensor):
        # Adafactor stores means of rows and of columns, whose shapes broadcast to the parameter's.
        sizes = zip(reversed(value.shape), reversed(param.shape), strict=False)
        broadcasts = all(size in (1, param_size) for size, param_size in sizes)
        fits = value.dim() <= param.dim() and broadcasts
        return (value.numel() == 1 or fits) and isinstance(reference, Tensor)
    if value is None:
        return reference is None
    return isinstance(value, int | float) and isinstance(reference, int | float)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)[:80]
