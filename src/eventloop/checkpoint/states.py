"""The states of plugins, metrics and random generators in a checkpoint; shards of saved tensors."""

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
        plugins: returns the active plugins; called at each use, because a plugin can drop out.

    Attributes:
        carried: states of missing plugins, copied unchanged into the next checkpoint.
    """

    def __init__(self, plugins: Callable[[], Iterable[Plugin]]) -> None:
        self._plugins = plugins
        self.carried: dict[str, Any] = {}

    def take(self, *, per_rank: bool) -> dict[str, Any]:
        """Returns the plugins' states by folded name; an exception gets a note that names its plugin.

        Args:
            per_rank: whether to return the states of plugins with `state_per_rank`, or of the others.
        """
        states = {} if per_rank else dict(self.carried)
        for plugin in self._plugins():
            if keeps_state(plugin) and plugin.facts.state_per_rank == per_rank:
                target: Any = plugin.target
                with _blamed(plugin, "state_dict"):
                    states[fold(plugin.name)] = {
                        "version": plugin.version,
                        "state": target.state_dict(),
                    }
        return states

    def put(self, states: Mapping[str, Any], path: str = "plugins") -> None:
        """Restores each plugin's state; a plugin without a saved state starts fresh.

        Raises:
            CheckpointError: a plugin can't load its state; the message has `path`.
        """
        for plugin in self._plugins():
            saved = states.get(fold(plugin.name))
            if saved is not None and keeps_state(plugin):
                target: Any = plugin.target
                name = f"{path}.{fold(plugin.name)}"
                with _blamed(plugin, "load_state_dict"), loading(name, by=plugin.origin):
                    plugin_state = read_all(saved["state"], but_slices=True)
                    target.load_state_dict(plugin_state, saved["version"])


@contextmanager
def _blamed(plugin: Plugin, method: str) -> Iterator[None]:
    """Adds a note to an exception, with the plugin and the method that raised it."""
    try:
        yield
    except BaseException as error:
        text = f"raised by plugin {plugin.origin} in {method}\n  fix  " + plugin.fix("fix it")
        error.add_note(Note(text, "origin"))
        raise


def counts_of(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Returns the states of this rank's metrics by name; parts of a collection have their own."""
    return {
        name: {"num_updates": metric._update_count, "values": dict(metric.metric_state)}
        for name, metric in metric_parts(metrics)
    }


def put_counts(metrics: Mapping[str, Metric], counts: Mapping[str, Any]) -> None:
    """Restores the result of `counts_of`.

    Raises:
        ValueError, LookupError: it doesn't fit the metrics.
    """
    for name, metric in metric_parts(metrics):
        if name not in counts:
            continue
        values = counts[name]["values"]
        for state_name, fresh in dict(metric.metric_state).items():
            setattr(
                metric,
                state_name,
                _placed(values[state_name], fresh, f"{name}.{state_name}", metric.device),
            )
        # Private: torchmetrics has no public way to set it (1.9).
        metric._update_count = counts[name]["num_updates"]


def _placed(
    value: Any, fresh: Tensor | list[Tensor], name: str, device: torch.device
) -> Tensor | list[Tensor]:
    """Returns a metric's saved state, moved to the device.

    Args:
        value: the saved state.
        fresh: the state of the metric before any update.
        name: for messages.
        device: the device of the metric.

    Raises:
        ValueError: the saved state has another type or shape.
    """
    if isinstance(fresh, list):
        if not isinstance(value, list):
            raise ValueError(f"{name} is a tensor, not a list of tensors")
        return [tensor.to(device) if isinstance(tensor, Tensor) else tensor for tensor in value]
    if not isinstance(value, Tensor) or not _fits(value, fresh):
        raise ValueError(f"{name} isn't a tensor of shape {tuple(fresh.shape)}")
    return value.to(device)


def _fits(value: Tensor, fresh: Tensor) -> bool:
    """Returns whether updates can have turned the fresh state into a state of the saved shape."""
    if fresh.numel() == 0:
        return True
    try:
        shape = torch.broadcast_shapes(value.shape, fresh.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return shape == value.shape and value.is_complex() == fresh.is_complex()


class Generators:
    """The random generators of this rank: the host's, the device's and the plugins'.

    In a resumed run they are restored when training continues, after the events at its start, which
    may draw. A checkpoint saved before that holds the states that were loaded.
    """

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None

    def state_dict(self, state: State) -> Mapping[str, Any]:
        """Returns the RNG states, or those that `go_on` will restore."""
        return _rng_states(state) if self._loaded is None else self._loaded

    def load_state_dict(self, rng_states: Mapping[str, Any]) -> None:
        """Stores the result of `state_dict`, for `go_on`."""
        self._loaded = rng_states

    def join(self, state: State, rng_states: Mapping[str, Any]) -> None:
        """Stores the states that all ranks share, for a new rank, from another rank's `state_dict`."""
        named = rng_states["named"].items()
        if shared_states := {name: rng_state for name, rng_state in named if name.endswith(ALIKE)}:
            own_states = _rng_states(state)
            self._loaded = {**own_states, "named": {**own_states["named"], **shared_states}}

    def go_on(self, state: State) -> None:
        """Restores the RNG states of the loaded checkpoint, once.

        If the checkpoint was saved on a device of another type, the device's generators stay as
        seeded.

        Raises:
            CheckpointError: a state doesn't fit its generator.
        """
        if self._loaded is not None:
            with loading(f"rank{state.rank}.generators"):
                _put(state, self._loaded)
            self._loaded = None


def _rng_states(state: State) -> dict[str, Any]:
    rng_states: dict[str, Any] = {
        "host": global_rng_states(),
        "named": {name: generator.get_state() for name, generator in state.generators().items()},
    }
    if (device_state := kind_of(state.device).get_rng_state()) is not None:
        rng_states["device"] = device_state
    return rng_states


def _put(state: State, rng_states: Mapping[str, Any]) -> None:
    set_global_rng_states(rng_states["host"])
    kind = kind_of(state.device)
    device_state = rng_states.get("device")
    current_device_state = kind.get_rng_state()
    if (
        device_state is not None
        and current_device_state is not None
        and device_state.shape == current_device_state.shape
    ):
        kind.set_rng_state(device_state)
    for name, rng_state in rng_states["named"].items():
        generator = state.generator(name)
        if rng_state.shape == generator.get_state().shape:
            set_rng_state(generator, rng_state)


class UnreadTensor(Tensor):
    """A saved tensor that is loaded only while it is copied into another tensor.

    Any other operation loads it permanently, so that a model can transform weights before it loads
    them.
    """

    _saved: SavedTensor
    _loaded_entries: Tensor | None

    @staticmethod
    def __new__(cls, saved: SavedTensor) -> UnreadTensor:
        """Creates an instance with the shape and dtype of a saved tensor."""
        # Private, but torch's documentation of tensor subclasses uses it (torch 2.13).
        unread_tensor: UnreadTensor = torch.Tensor._make_wrapper_subclass(
            cls, saved.shape, dtype=saved.dtype, device=torch.device("cpu")
        )
        unread_tensor._saved = saved
        unread_tensor._loaded_entries = None
        return unread_tensor

    def entries(self, *, to_stay: bool) -> Tensor:
        """Returns the entries as a plain tensor on the host.

        Args:
            to_stay: whether to keep them in memory for later calls.
        """
        entries = self._saved.read() if self._loaded_entries is None else self._loaded_entries
        if to_stay:
            self._loaded_entries = entries
        return entries

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_source = func is torch.ops.aten.copy_.default and not isinstance(args[0], cls)

        def read(argument: Any) -> Any:
            return (
                argument.entries(to_stay=not is_source) if isinstance(argument, cls) else argument
            )

        return func(*tree_map(read, args), **tree_map(read, kwargs or {}))


def unread(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Returns weights by name, with `UnreadTensor`s instead of saved tensors."""
    return {
        name: UnreadTensor(value) if isinstance(value, SavedTensor) else read_all(value)
        for name, value in weights.items()
    }


def read_states(saved: Mapping[str, Any], optimizer: Optimizer) -> Any:
    """Loads an optimizer's state dict; tensors of a parameter's shape go to the parameter's device."""
    order = [param for group in optimizer.param_groups for param in group["params"]]
    if not isinstance(states := saved.get("state"), Mapping):
        return read_all(saved)
    param_groups = read_all({key: entry for key, entry in saved.items() if key != "state"})
    loaded_states = {
        idx: _read_like(
            entry, order[idx] if isinstance(idx, int) and 0 <= idx < len(order) else None
        )
        for idx, entry in states.items()
    }
    return param_groups | {"state": loaded_states}


def _read_like(saved: Any, param: Tensor | None) -> Any:
    if isinstance(saved, Mapping):
        return {key: _read_like(entry, param) for key, entry in saved.items()}
    if sharded(param) is not None:
        return shards_like(saved, param)
    value = read_all(saved)
    if param is None or not isinstance(value, Tensor) or not value.ndim:
        return value
    return value.to(param.device) if value.shape == param.shape else value


def shard_of(value: Any, reference: Tensor, placements: Sequence[Any] | None = None) -> Tensor:
    """Returns this rank's shard of a whole tensor, on the device of `reference`, without communication.

    Args:
        value: a tensor, the same on every rank; a `SavedTensor`, of which only the shard is read;
            or this rank's `TensorSlice`.
        reference: a tensor with the same sharding; if it isn't sharded, all entries are returned.
        placements: the sharding, if it differs from the sharding of `reference`.
    """
    sharded_tensor = sharded(reference)
    if isinstance(value, TensorSlice):
        return value.tensor.to(reference.device)
    if sharded_tensor is None:
        return (value.read() if isinstance(value, SavedTensor) else value).to(reference.device)
    used_placements = sharded_tensor.placements if placements is None else placements
    shape, offsets = shape_and_offsets(value.shape, sharded_tensor, used_placements)
    if isinstance(value, SavedTensor):
        return value.read_slice(offsets, shape).to(reference.device)
    return Box(offsets, shape).of(value).to(reference.device, copy=True)


def shards_like(value: Any, reference: Any) -> Any:
    """Returns a whole tensor as a DTensor with the sharding and device of `reference`.

    If its shape differs from `reference`, it is replicated on every rank. A tensor that is sharded already
    is returned unchanged; so is any tensor if `reference` isn't sharded, except that a saved tensor is
    loaded.
    """
    sharded_tensor = sharded(reference)
    if (
        sharded_tensor is None
        or not isinstance(value, Tensor | SavedTensor | TensorSlice)
        or not value.shape
    ):
        return value.read() if isinstance(value, SavedTensor) else value
    if sharded(value) is not None:
        return value
    from torch.distributed.tensor import DTensor, Replicate

    shape = torch.Size(value.shape)
    is_alike = shape == sharded_tensor.shape
    placements = (
        sharded_tensor.placements if is_alike else [Replicate()] * sharded_tensor.device_mesh.ndim
    )
    entries = shard_of(value, sharded_tensor, placements)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        entries,
        sharded_tensor.device_mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=strides,
    )
