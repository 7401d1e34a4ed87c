"""The callbacks' view of the State: its type, and its implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop.errors import ReadOnlyStateError
from eventloop.state import State
from eventloop.vocabulary import STATE, known_as

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torchmetrics import Metric

    from eventloop.clock import Clock, Time
    from eventloop.config.settings import Settings
    from eventloop.data.batches import Count
    from eventloop.mesh import Layout
    from eventloop.plugin.plugin_attributes import PluginFacts
    from eventloop.signals import StopKind, StopReason
    from eventloop.training.precision import Precision


class StateView(Protocol):
    """The State as callbacks see it; `State` documents the attributes.

    A type checker reports assignments before a run. `State` implements this protocol, so a function
    that only reads accepts both.
    """

    @property
    def settings(self) -> Settings: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def run_dir(self) -> Path: ...
    @property
    def manifest(self) -> Mapping[str, Any]: ...
    @property
    def observers(self) -> Sequence[Any]: ...
    @property
    def plugins(self) -> Mapping[str, Any]: ...
    @property
    def plugin_facts(self) -> Mapping[str, PluginFacts]: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def data_rank(self) -> int: ...
    @property
    def data_world_size(self) -> int: ...
    @property
    def data_group(self) -> dist.ProcessGroup | None: ...
    @property
    def mesh(self) -> DeviceMesh | None: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def wrapped_model(self) -> nn.Module: ...
    @property
    def criterion(self) -> Callable[[Any, Any], Tensor] | None: ...
    @property
    def optimizers(self) -> Mapping[str, Optimizer]: ...
    @property
    def schedulers(self) -> Mapping[str, Any]: ...
    @property
    def train_dataloader(self) -> Any: ...
    @property
    def eval_dataloaders(self) -> Mapping[str, Any]: ...
    @property
    def num_batches(self) -> int | None: ...
    @property
    def even_batches(self) -> bool: ...
    @property
    def batch(self) -> Any: ...
    @property
    def microbatch(self) -> Any: ...
    @property
    def microbatch_idx(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def microbatch_size(self) -> int | None: ...
    @property
    def active_model(self) -> nn.Module: ...
    @property
    def inputs(self) -> Any: ...
    @property
    def targets(self) -> Any: ...
    @property
    def count(self) -> Count: ...
    @property
    def outputs(self) -> Any: ...
    @property
    def loss(self) -> Tensor | None: ...
    @property
    def metrics(self) -> Mapping[str, Mapping[str, Metric]]: ...
    @property
    def train_metrics(self) -> Mapping[str, Tensor]: ...
    @property
    def eval_sets(self) -> Sequence[str]: ...
    @property
    def test_sets(self) -> frozenset[str]: ...
    @property
    def eval_name(self) -> str | None: ...
    @property
    def eval_batch_idx(self) -> int: ...
    @property
    def eval_metrics(self) -> Mapping[str, Mapping[str, Tensor]]: ...
    @property
    def duration(self) -> Time | None: ...
    @property
    def epoch_length(self) -> int | None: ...
    @property
    def until(self) -> Time: ...
    @property
    def resumed(self) -> bool: ...
    @property
    def attempt(self) -> int: ...
    @property
    def stop_reason(self) -> StopReason | None: ...
    @property
    def checkpoint_requested(self) -> bool: ...
    def resolve(self, time: Time) -> Time: ...
    def log(
        self, name: str, value: float | Tensor, reduce: Literal["mean", "sum"] | None = None
    ) -> None: ...
    def log_text(self, name: str, text: str | Mapping[str, Iterable[Any]]) -> None: ...
    def all_gather(self, value: Any) -> list[Any]: ...
    def count_true(self, answer: bool) -> int: ...
    def request_stop(self, reason: str, kind: StopKind = ...) -> None: ...
    def request_checkpoint(self) -> None: ...
    def plugin(self, name: str) -> Any: ...
    def owner(self, action: str) -> str: ...


# The protocol declares everything that a callback can read.
_SHOWN = frozenset(name for name in vars(StateView) if not name.startswith("_"))

_AS_ALGORITHM = (
    "a plugin that changes the training is an algorithm: register it in eventloop.algorithms, or pass "
    "it to Trainer(algorithms=...)"
)


def view_of(state: State, origin: str) -> StateView:
    """Returns a callback's view of the State.

    Args:
        state: the State of the run.
        origin: plugin and hook, for messages.
    """
    return cast("StateView", ReadOnlyState(state, origin))


class ReadOnlyState:
    """Implements `StateView`: its attributes can be read, but not assigned.

    Tensors and modules are the run's own, without protection; `--check` finds callbacks that write
    into them.
    """

    __slots__ = ("_origin", "_state")

    def __init__(self, state: State, origin: str) -> None:
        object.__setattr__(self, "_state", state)
        object.__setattr__(self, "_origin", origin)

    def __getattr__(self, name: str) -> Any:
        if name not in _SHOWN:
            message = f"state.{name} isn't available to a callback"
            if hasattr(State, name):
                raise self._refusal(message)
            hint = known_as(name, STATE, _SHOWN)
            raise self._refusal(f"{message}{hint}", _fix_of_unknown(name))
        value = getattr(self._state, name)
        if type(value) is dict:
            return ReadOnlyMapping(value, f"state.{name}", self._refusal)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        fix = _AS_ALGORITHM
        if not hasattr(State, name):
            fix = f"store it on the plugin: `self.{name} = ...`"
        raise self._refusal(f"a callback assigned state.{name}, but it may only read", fix)

    def __delattr__(self, name: str) -> None:
        raise self._refusal(f"a callback deleted state.{name}, but it may only read")

    def _refusal(self, message: str, fix: str = _AS_ALGORITHM) -> ReadOnlyStateError:
        return ReadOnlyStateError(message, plugin=self._origin, fix=fix)


def _fix_of_unknown(name: str) -> str:
    """Returns the fix for a name that isn't an attribute of State."""
    if name in STATE:
        return f"write `{STATE[name]}`"
    for similar_name in get_close_matches(name, _SHOWN, n=1):
        return f"write `state.{similar_name}`, or store a value of the plugin on `self`"
    return "store a value of the plugin on `self`; `StateView` lists the attributes for callbacks"


class ReadOnlyMapping(Mapping[str, Any]):
    """A mapping that refuses item assignment, also in nested mappings.

    Args:
        mapping: the mapping to read from.
        name: the expression for the mapping: `state.eval_metrics`.
        refuse: returns the error for a message.
    """

    __slots__ = ("_mapping", "_name", "_refuse")

    def __init__(
        self, mapping: Mapping[str, Any], name: str, refuse: Callable[[str], Exception]
    ) -> None:
        self._mapping = mapping
        self._name = name
        self._refuse = refuse

    def __getitem__(self, key: str) -> Any:
        value = self._mapping[key]
        if type(value) is dict:
            return ReadOnlyMapping(value, f"{self._name}[{key!r}]", self._refuse)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def __repr__(self) -> str:
        return repr(self._mapping)

    def __setitem__(self, key: str, value: object) -> None:
        raise self._refuse(f"a callback assigned {self._name}[{key!r}], but it may only read")

    def __delitem__(self, key: str) -> None:
        raise self._refuse(f"a callback deleted {self._name}[{key!r}], but it may only read")
