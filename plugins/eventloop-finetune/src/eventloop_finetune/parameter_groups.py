"""Fine-tuning: groups of parameters by patterns of their names, and parts that thaw at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from eventloop import TaskError, Time, hookimpl
from eventloop.toolbox import closest

if TYPE_CHECKING:
    from collections.abc import Generator

    from eventloop import State


def param_groups(
    model: nn.Module, options: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns groups of a model's parameters for an optimizer, each with options of its own.

    A parameter has the options of all patterns that its name matches, the later ones first in
    doubt; those with the same options are one group. One that no pattern matches has the
    optimizer's own. Frozen parameters are left out.

    Args:
        options: by pattern, as `fnmatch` takes it: `{"backbone.*": {"lr": 1e-5}}`. A pattern
            without `*`, `?` or `[` is the name of a parameter, or of a module with all that it has.

    Raises:
        ValueError: a pattern matches no parameter.
    """
    named = dict(model.named_parameters())
    for pattern in options:
        _matching(pattern, named)
    groups: list[dict[str, Any]] = []
    for name, param in named.items():
        if not param.requires_grad:
            continue
        own: dict[str, Any] = {}
        for pattern, given in options.items():
            if _matches(name, pattern):
                own |= given
        for group in groups:
            if {key: one for key, one in group.items() if key != "params"} == own:
                group["params"].append(param)
                break
        else:
            groups.append({"params": [param], **own})
    return groups


def freeze(model: nn.Module, *patterns: str) -> list[str]:
    """Freezes the parameters that a pattern matches; returns their names.

    Called before optimizers are built, and before the model is wrapped: in the function that makes
    it, say.

    Args:
        patterns: as in `param_groups`.

    Raises:
        ValueError: a pattern matches no parameter.
    """
    named = dict(model.named_parameters())
    names = [name for pattern in patterns for name in _matching(pattern, named)]
    for name in names:
        named[name].requires_grad_(False)
    return names


class Unfreeze:
    """An algorithm that leaves parts of a model as they are until a time has come.

    The optimizer has their parameters from the start. In one process nothing is computed for them
    until then; on several ranks, whose exchange of gradients is fixed when the model is wrapped,
    their gradients are computed, and dropped before they are clipped. What is frozen when training
    starts stays so.

    Args:
        until: by pattern, as in `param_groups`, the time from which its parameters are trained:
            `{"backbone.*": "2ep", "backbone.layer4": "0.1dur"}`. Of several patterns the last one
            counts.

    Raises:
        ValueError: a time makes no sense.
    """

    name = "unfreeze"

    def __init__(self, until: Mapping[str, str | Time]) -> None:
        self._until = {pattern: Time(time) for pattern, time in until.items()}
        self._waiting: dict[str, tuple[nn.Parameter, Time]] = {}

    @hookimpl
    def after_load(self, state: State) -> None:
        """Freezes what has to wait.

        Raises:
            TaskError: a pattern matches no parameter of the model, or a time can't be counted.
        """
        named = dict(state.model.named_parameters())
        self._waiting = {}
        for pattern, time in self._until.items():
            try:
                names = _matching(pattern, named)
                resolved = state.resolve(time)
            except ValueError as error:
                raise TaskError(f"unfreeze: {error}") from None
            for name in names:
                if named[name].requires_grad:
                    self._waiting[name] = (named[name], resolved)
        self._thaw(state)
        if state.world_size == 1:
            for param, _ in self._waiting.values():
                param.requires_grad_(False)

    @hookimpl
    def batch_start(self, state: State) -> None:
        """Thaws what has waited long enough."""
        if self._waiting:
            self._thaw(state)

    @hookimpl(wrapper=True, tryfirst=True)
    def clip_gradients(self, state: State, optimizers: Any) -> Generator[None, Any, Any]:
        """Drops the gradients of what waits, on several ranks."""
        for param, _ in self._waiting.values():
            param.grad = None
        return (yield)

    def _thaw(self, state: State) -> None:
        for name, (param, time) in list(self._waiting.items()):
            if state.clock.reached(time):
                param.requires_grad_(True)
                del self._waiting[name]


class SaveTrained:
    """An algorithm whose checkpoints leave out the parameters that are frozen.

    The task has to build these again, with the same weights; a digest in each checkpoint proves it.
    """

    name = "save-trained"

    @hookimpl
    def select_weights(self, state: State, names: Sequence[str]) -> list[str]:
        """Returns all names but those of frozen parameters."""
        named = state.model.named_parameters(remove_duplicate=False)
        frozen = {name for name, param in named if not param.requires_grad}
        return [name for name in names if name not in frozen]


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    found = [name for name in names if _matches(name, pattern)]
    if not found:
        raise ValueError(f"{pattern!r} matches no parameter of the model{closest(pattern, names)}")
    return found


def _matches(name: str, pattern: str) -> bool:
    if any(one in pattern for one in "*?["):
        return fnmatchcase(name, pattern)
    return name == pattern or name.startswith(f"{pattern}.")
