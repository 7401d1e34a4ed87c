"""The states in a checkpoint: of plugins, metrics and random generators; a rank's shards of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map  # torch has no public one (torch 2.13)

from eventloop.checkpoint.loading import loading
from eventloop.checkpoint.safetensors_files import Box
from eventloop.checkpoint.saved_tensors import SavedTensor, read_all
from eventloop.devices import kind_of
from eventloop.errors import Note
from eventloop.naming import fold
from eventloop.plugin.mistakes import keeps_state
from eventloop.plugin.records import Plugin
from eventloop.rng import global_rng_states, set_global_rng_states, set_rng_state
from eventloop.state import ALIKE
from eventloop.training.metrics import metric_parts
from eventloop.training.sharded_tensors import shape_and_offsets, sharded
from eventloop.training.tensor_slices import TensorSlice

if TYPE_CHECKING:
    from torchmetrics import Metric

    from eventloop.state import State


class PluginStates:
    """The states of the active plugins.

    Args:
        plugins: called at each use, as a plugin can drop out.

    Attributes:
        carried: states of missing plugins, copied unchanged into the next checkpoint.
    """

    def __init__(self, plugins: Callable[[], Iterable[Plugin]]) -> None:
        self._plugins = plugins
        self.carried: dict[str, Any] = {}

    def take(self, *, per_rank: bool) -> dict[str, Any]:
        """Returns the plugins' states by folded name; an exception gets a note that names its plugin.

        Args:
            per_rank: whether to return those of plugins with a state per rank, or of the others.
        """
        found = {} if per_rank else dict(self.carried)
        for plugin in self._plugins():
            if keeps_state(plugin) and plugin.facts.state_per_rank == per_rank:
                target: Any = plugin.target
                with _blamed(plugin, "state_dict"):
                    found[fold(plugin.name)] = {
                        "version": plugin.version,
                        "state": target.state_dict(),
                    }
        return found

    def put(self, states: Mapping[str, Any], path: str = "plugins") -> None:
        """Restores each plugin's state; a plugin without a saved state starts fresh.

        Raises:
            CheckpointError: a plugin can't load its state, `path` in the checkpoint.
        """
        for plugin in self._plugins():
            one = states.get(fold(plugin.name))
            if one is not None and keeps_state(plugin):
                target: Any = plugin.target
                name = f"{path}.{fold(plugin.name)}"
                with _blamed(plugin, "load_state_dict"), loading(name, by=plugin.origin):
                    read = read_all(one["state"], but_slices=True)
                    target.load_state_dict(read, one["version"])


@contextmanager
def _blamed(plugin: Plugin, method: str) -> Iterator[None]:
    """Adds a note to an exception: which plugin raised it, in which method."""
    try:
        yield
    except BaseException as error:
        text = f"raised by plugin {plugin.origin} in {method}\n  fix  " + plugin.fix("fix it")
        error.add_note(Note(text, "origin"))
        raise


def counts_of(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Returns the states of this rank's metrics, by the names of the metrics and their parts."""
    return {
        name: {"num_updates": one._update_count, "values": dict(one.metric_state)}
        for name, one in metric_parts(metrics)
    }


def put_counts(metrics: Mapping[str, Metric], counts: Mapping[str, Any]) -> None:
    """Restores what `counts_of` returned; raises ValueError or LookupError if it doesn't fit."""
    for name, one in metric_parts(metrics):
        if name not in counts:
            continue
        values = counts[name]["values"]
        for field, fresh in dict(one.metric_state).items():
            setattr(one, field, _placed(values[field], fresh, f"{name}.{field}", one.device))
        # Private: torchmetrics has no public way to set it (1.9).
        one._update_count = counts[name]["num_updates"]


def _placed(
    value: Any, fresh: Tensor | list[Tensor], name: str, device: torch.device
) -> Tensor | list[Tensor]:
    """Returns a metric's saved state, on the device; raises ValueError for another type or shape.

    Args:
        fresh: the state of the metric before any update.
    """
    if isinstance(fresh, list):
        if not isinstance(value, list):
            raise ValueError(f"{name} is a tensor, not a list of them")
        return [part.to(device) if isinstance(part, Tensor) else part for part in value]
    if not isinstance(value, Tensor) or not _fits(value, fresh):
        raise ValueError(f"{name} isn't a tensor of shape {tuple(fresh.shape)}")
    return value.to(device)


def _fits(value: Tensor, fresh: Tensor) -> bool:
    """Whether a saved state can have grown from a fresh one by updates."""
    if fresh.numel() == 0:
        return True
    try:
        shape = torch.broadcast_shapes(value.shape, fresh.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return shape == value.shape and value.is_complex() == fresh.is_complex()


class Generators:
    """The random generators of this rank: of the host, the device and the plugins.

    In a resumed run they are restored when training continues, after the events of its entry,
    which may draw. A checkpoint saved before that holds the states that were loaded.
    """

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None

    def state_dict(self, state: State) -> Mapping[str, Any]:
        """Returns the RNG states, or those that `go_on` will restore."""
        return _rng_states(state) if self._loaded is None else self._loaded

    def load_state_dict(self, rng_states: Mapping[str, Any]) -> None:
        """Stores what `state_dict` returned, for `go_on`."""
        self._loaded = rng_states

    def join(self, state: State, rng_states: Mapping[str, Any]) -> None:
        """Stores, for a new rank, the states that all ranks share, from another's `state_dict`."""
        named = rng_states["named"].items()
        if alike := {name: one for name, one in named if name.endswith(ALIKE)}:
            own = _rng_states(state)
            self._loaded = {**own, "named": {**own["named"], **alike}}

    def go_on(self, state: State) -> None:
        """Restores the RNG states of the loaded checkpoint, once; raises CheckpointError.

        On a device of another type, its generators are left as seeded.
        """
        if self._loaded is not None:
            with loading(f"rank{state.rank}.generators"):
                _put(state, self._loaded)
            self._loaded = None


def _rng_states(state: State) -> dict[str, Any]:
    rng_states: dict[str, Any] = {
        "host": global_rng_states(),
        "named": {name: one.get_state() for name, one in state.generators().items()},
    }
    if (of_device := kind_of(state.device).get_rng_state()) is not None:
        rng_states["device"] = of_device
    return rng_states


def _put(state: State, rng_states: Mapping[str, Any]) -> None:
    set_global_rng_states(rng_states["host"])
    kind = kind_of(state.device)
    of_device = rng_states.get("device")
    own = kind.get_rng_state()
    if of_device is not None and own is not None and of_device.shape == own.shape:
        kind.set_rng_state(of_device)
    for name, one in rng_states["named"].items():
        generator = state.generator(name)
        if one.shape == generator.get_state().shape:
            set_rng_state(generator, one)


class UnreadTensor(Tensor):
    """A saved tensor that is loaded temporarily while it is copied from.

    Any other operation loads it permanently, so a model can transform weights before it loads
    them.
    """

    _saved: SavedTensor
    _held: Tensor | None

    @staticmethod
    def __new__(cls, saved: SavedTensor) -> UnreadTensor:
        """Creates one with the shape and dtype of a saved tensor."""
        # Torch's documentation of subclasses has it, though it has no public name (torch 2.13).
        made: UnreadTensor = torch.Tensor._make_wrapper_subclass(
            cls, saved.shape, dtype=saved.dtype, device=torch.device("cpu")
        )
        made._saved = saved
        made._held = None
        return made

    def entries(self, *, to_stay: bool) -> Tensor:
        """Returns the entries as a plain tensor on the host."""
        held = self._saved.read() if self._held is None else self._held
        if to_stay:
            self._held = held
        return held

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_source = func is torch.ops.aten.copy_.default and not isinstance(args[0], cls)

        def read(one: Any) -> Any:
            return one.entries(to_stay=not is_source) if isinstance(one, cls) else one

        return func(*tree_map(read, args), **tree_map(read, kwargs or {}))


def unread(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Returns weights by name, with `UnreadTensor`s instead of saved tensors."""
    return {
        name: UnreadTensor(one) if isinstance(one, SavedTensor) else read_all(one)
        for name, one in weights.items()
    }


def read_states(saved: Mapping[str, Any], optimizer: Optimizer) -> Any:
    """Loads an optimizer's state dict; tensors with their parameter's shape go to its device."""
    order = [param for group in optimizer.param_groups for param in group["params"]]
    if not isinstance(states := saved.get("state"), Mapping):
        return read_all(saved)
    rest = read_all({key: one for key, one in saved.items() if key != "state"})
    read = {
        idx: _read_like(one, order[idx] if isinstance(idx, int) and 0 <= idx < len(order) else None)
        for idx, one in states.items()
    }
    return rest | {"state": read}


def _read_like(saved: Any, param: Tensor | None) -> Any:
    if isinstance(saved, Mapping):
        return {key: _read_like(one, param) for key, one in saved.items()}
    if sharded(param) is not None:
        return shards_like(saved, param)
    value = read_all(saved)
    if param is None or not isinstance(value, Tensor) or not value.ndim:
        return value
    return value.to(param.device) if value.shape == param.shape else value


def shard_of(value: Any, like: Tensor, placements: Sequence[Any] | None = None) -> Tensor:
    """Returns this rank's shard of a whole tensor, on the device of `like`, without communication.

    Args:
        value: a tensor, the same on every rank; a `SavedTensor`, of which only the shard is read;
            or this rank's `TensorSlice`.
        like: a tensor with the same sharding; if it isn't sharded, all entries are returned.
        placements: the sharding, if it differs from that of `like`.
    """
    one = sharded(like)
    if isinstance(value, TensorSlice):
        return value.tensor.to(like.device)
    if one is None:
        return (value.read() if isinstance(value, SavedTensor) else value).to(like.device)
    spread = one.placements if placements is None else placements
    shape, offsets = shape_and_offsets(value.shape, one, spread)
    if isinstance(value, SavedTensor):
        return value.read_slice(offsets, shape).to(like.device)
    return Box(offsets, shape).of(value).to(like.device, copy=True)


def shards_like(value: Any, like: Any) -> Any:
    """Returns a whole tensor as a DTensor that is sharded as another is, on its device.

    One of another shape is whole on every rank. What is sharded already stays what it is, and so does a
    tensor where `like` is a plain one; a saved tensor is read.
    """
    one = sharded(like)
    if one is None or not isinstance(value, Tensor | SavedTensor | TensorSlice) or not value.shape:
        return value.read() if isinstance(value, SavedTensor) else value
    if sharded(value) is not None:
        return value
    from torch.distributed.tensor import DTensor, Replicate

    shape = torch.Size(value.shape)
    is_alike = shape == one.shape
    placements = one.placements if is_alike else [Replicate()] * one.device_mesh.ndim
    entries = shard_of(value, one, placements)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        entries, one.device_mesh, placements, run_check=False, shape=shape, stride=strides
    )
