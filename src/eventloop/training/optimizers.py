"""Helpers for optimizers and schedulers: what they are, and whether a state fits them."""

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

# They have a fused implementation on CUDA (torch 2.13; Adagrad's is for the CPU alone).
_FUSED = (SGD, Adam, AdamW)
# What torch makes of every optimizer's step, with hooks and a label for profilers.
_WITH_HOOKS = Optimizer.profile_hook_step(Optimizer.step).__code__
_NEEDED = ("last_epoch", "_step_count", "base_lrs", "_last_lr")  # of every scheduler of torch's


@runtime_checkable
class FollowsMetric(Protocol):
    """A scheduler that steps after evaluations."""

    def begin(self, state: State) -> None:
        """Called when all is built and loaded."""

    def observe(self, state: State) -> None:
        """Called when all data sets have been evaluated, on every rank."""


def wants_closure(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer's step can't do without its closure, as that of LBFGS can't."""
    # Of the class, since schedulers put another function in the instance's place (torch 2.13).
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    return any(
        one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters
    )


def could_be_fused(optimizer: Optimizer, device: torch.device) -> bool:
    """Returns whether `fused=True` would be faster, and the task hasn't chosen.

    Only on CUDA, where a step is then one kernel or a few, and fp16 waits less: on the CPU small
    models gain nothing. `fused=False` and `foreach=True` are decisions.
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
    """Returns a line about trainable parameters that no optimizer has; "" if all have one.

    Frozen parameters don't count. Those of the task's loss do, where it is a module.
    """
    in_optimizers = set(map(id, params_of(state.optimizers.values())))
    if not in_optimizers:  # nothing is to be trained: `fit` refuses it
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
    """Raises TaskError if an optimizer has no parameter of the model, or two share one."""
    names = {id(one): name for name, one in state.model.named_parameters()}
    names |= {id(one): name for name, one in state.wrapped_model.named_parameters()}
    holders: dict[int, str] = {}
    for optimizer, one in state.optimizers.items():
        params = set(map(id, params_of([one])))
        if params and not params & names.keys():
            raise TaskError(
                f"the optimizer {optimizer!r} holds no parameter of the model, so that its steps "
                "would change nothing",
                fix="use the model that the function is given: optimizer=lambda model: "
                "SGD(model.parameters(), lr=0.1); parameters of a loss belong into the model",
            )
        for param in params:
            other = holders.setdefault(param, optimizer)
            if other != optimizer:
                raise TaskError(
                    f"the optimizers {other!r} and {optimizer!r} share the parameter "
                    f"{names.get(param, 'of no name')}, so that each batch would move it twice",
                    fix="give each optimizer parameters of its own",
                )


def step(optimizer: Optimizer) -> None:
    """Does what `optimizer.step()` does.

    Where neither a profiler nor a hook looks on, without what torch does around it for them: 15 us of a
    small step's 300. What tells so is private (checked with torch 2.13).
    """
    function: Any = getattr(optimizer.step, "__func__", None)  # schedulers of torch's replace it
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
    """Does what `optimizer.zero_grad()` does.

    Where that is torch's own, without what torch does around it for profilers and compilers: 10 µs
    of a small step's 200.
    """
    if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


def is_alike(one: Any, other: Any) -> bool:
    """Whether a value may take the place of another: of its type, a number for a number."""
    if other is None:
        return one is None or isinstance(one, bool | int | float | str)
    if isinstance(other, bool) or isinstance(one, bool):
        return type(one) is type(other) or one is None  # `fused`, once it is switched on
    if isinstance(other, int | float) or (isinstance(other, Tensor) and other.numel() == 1):
        if isinstance(one, Tensor):
            return one.numel() == 1
        return isinstance(one, int | float) and not math.isnan(one)
    if isinstance(other, list | tuple):
        if not isinstance(one, list | tuple):
            return False
        if isinstance(other, tuple) or len(one) == len(other):
            return len(one) == len(other) and all(map(is_alike, one, other))
        return not other or (bool(one) and all(is_alike(entry, other[0]) for entry in one))
    return isinstance(one, Mapping if isinstance(other, Mapping) else type(other))


def require_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Checks the saved state of an optimizer: its groups, and of torch's own the tensors.

    Raises:
        ValueError, LookupError, TypeError: it isn't one that this optimizer could have had.
    """
    groups = optimizer.param_groups
    saved = state["param_groups"]
    if len(groups) != len(saved):
        raise ValueError(f"{len(saved)} param_groups, not {len(groups)}; add all at the start")
    for idx, (now, then) in enumerate(zip(groups, saved, strict=True)):
        for name, value in now.items():
            if name not in then:
                raise ValueError(f"param_groups[{idx}] has no {name!r}")
            if name != "params" and not is_alike(then[name], value):
                raise ValueError(f"param_groups[{idx}].{name} is {_shown(then[name])}")
        params = then["params"]
        if not (isinstance(params, list | tuple) and all(type(one) is int for one in params)):
            raise ValueError(f"param_groups[{idx}].params aren't numbers")
    if not isinstance(state["state"], Mapping):
        raise TypeError(f"state is {a(type(state['state']).__name__)}")
    if type(optimizer).__module__.startswith("torch.optim"):
        options = inspect.signature(type(optimizer)).parameters.keys() & optimizer.defaults.keys()
        for now, then in zip(groups, saved, strict=True):
            # Its constructor knows the ranges of its options, and which shapes it takes.
            params = now["params"][:1] or [torch.zeros(1)]
            like = [torch.zeros((1,) * one.dim(), dtype=one.dtype) for one in params]
            type(optimizer)(like, **{name: then[name] for name in options})
        _require_tensors(optimizer, state)


def fitting_scheduler(scheduler: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what of a saved state a scheduler has a use for.

    torch's schedulers take whatever names there are for attributes; some are those of another
    version of torch, and left out.

    Raises:
        ValueError, LookupError: a value isn't like the scheduler's, or isn't there.
    """
    if not isinstance(scheduler, LRScheduler):
        return dict(state)
    now = scheduler.state_dict()
    if missing := [name for name in _NEEDED if name in now and name not in state]:
        raise KeyError(missing[0])
    for name, value in now.items():
        if name in state and not is_alike(state[name], value):
            raise ValueError(f"{name} is {_shown(state[name])}, not like {value!r}")
    excluded = vars(scheduler).keys() - now.keys()  # the optimizer, say
    return {
        name: one
        for name, one in state.items()
        if name not in excluded and (name in now or _declares(scheduler, name))
    }


def _declares(target: Any, name: str) -> bool:
    """Returns whether the code of a scheduler sets an attribute: no other is set by a name from a file.

    An attribute of its class, such as a method or a property, isn't data and would be hidden.
    """
    of_class = inspect.getattr_static(type(target), name, None)
    if callable(of_class) or hasattr(type(of_class), "__get__") or name.startswith("__"):
        return False
    return name in vars(target) or any(name in code.co_names for code in _codes(type(target)))


def _codes(kind: type) -> Iterator[CodeType]:
    for base in kind.__mro__:
        for value in vars(base).values():
            function = inspect.unwrap(value) if callable(value) else value
            if isinstance(function, FunctionType):
                yield function.__code__


def _require_tensors(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Checks that parameters of a group, of as many dimensions, have entries of the same names that fit."""
    for now, then in zip(optimizer.param_groups, state["param_groups"], strict=True):
        states = [
            (param, state["state"][number])
            for param, number in zip(now["params"], then["params"], strict=True)
            if number in state["state"]
        ]
        firsts: dict[int, Mapping[str, Any]] = {}  # Adafactor keeps other things of a matrix
        for param, one in states:
            if not isinstance(one, Mapping):
                raise TypeError(f"state holds {_shown(one)}")
            first = firsts.setdefault(param.dim(), one)
            if not one.keys() == first.keys():
                raise ValueError(f"state has {', '.join(map(str, one))} for one parameter alone")
            for name, value in one.items():
                if not _fits(value, first[name], param, optimizer):
                    raise ValueError(f"state.{name} is {_shown(value)}")


def _fits(value: Any, first: Any, param: Tensor, optimizer: Optimizer) -> bool:
    if isinstance(optimizer, torch.optim.LBFGS):  # keeps lists, of all parameters in a row
        return True
    if isinstance(value, Tensor):
        # Adafactor keeps rows and columns.
        sizes = zip(reversed(value.shape), reversed(param.shape), strict=False)
        fits = value.dim() <= param.dim() and all(one in (1, other) for one, other in sizes)
        return (value.numel() == 1 or fits) and isinstance(first, Tensor)
    if value is None:
        return first is None
    return isinstance(value, int | float) and isinstance(first, int | float)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)[:80]
