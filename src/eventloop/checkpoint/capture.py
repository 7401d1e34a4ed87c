"""Collects the content of a checkpoint, in parts by subject, copies it, and restores a run.

The parts `model`, `optimizers`, `training` (the progress of the run) and `plugins` are the same on
all ranks; the state of a single rank is in `rank0`, `rank1` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from eventloop.checkpoint.checkpoint_export import with_names_of
from eventloop.checkpoint.encoding import MAX_DEPTH, flatten, is_dense, map_leaves
from eventloop.checkpoint.left_out_weights import require_same_rest, selected
from eventloop.checkpoint.loading import loading
from eventloop.checkpoint.optimizer_layouts import layouts_of, restore_layouts
from eventloop.checkpoint.run_objects import RunObjects
from eventloop.checkpoint.saved_tensors import read_all
from eventloop.checkpoint.states import (
    Generators,
    counts_of,
    put_counts,
    read_states,
    shards_like,
    unread,
)
from eventloop.checkpoint.structure import Structure, restore_structure
from eventloop.devices import DeviceKind, kind_of
from eventloop.errors import CheckpointError
from eventloop.naming import full_name, json_value
from eventloop.signals import status_of
from eventloop.training.metrics import scalars_of
from eventloop.training.optimizers import fitting_scheduler
from eventloop.training.sharded_tensors import sharded
from eventloop.training.tensor_slices import TensorSlice, holds_slices

if TYPE_CHECKING:
    from eventloop.checkpoint.states import PluginStates
    from eventloop.data.feed import Feeds
    from eventloop.data.sampling_state import Stateful
    from eventloop.distributed.processes import Processes
    from eventloop.plugin.plans import Plans
    from eventloop.state import State

_PLAIN = (type(None), bool, int, float, str)  # immutable types, which needn't be copied
_SLICED = ("model", "optimizers", "plugins")  # parts of which a rank may have slices


class Captured(NamedTuple):
    """The content of a checkpoint: nests by name, and a description in JSON values."""

    parts: dict[str, Any]
    facts: dict[str, Any]


class Capture:
    """Collects the content of a run's checkpoint, and restores a run from it.

    Args:
        training: objects with training state other than clock and precision, by their key in the
            checkpoint.
        rank_objects: objects with state of this rank only, by their key in the checkpoint.
        task: the task of the run.

    Attributes:
        structure: the structure that the run was built with.
        objects: the state of the run's objects that isn't in their `state_dict`.
        changed_structure: the changes of the structure in the loaded checkpoint.
    """

    def __init__(
        self,
        hooks: Plans,
        feeds: Feeds,
        training: Mapping[str, Stateful],
        rank_objects: Mapping[str, Stateful],
        plugins: PluginStates,
        processes: Processes,
        task: object,
    ) -> None:
        self._processes = processes
        self._hooks = hooks
        self._feeds = feeds
        self._training = training
        self._rank_objects = rank_objects
        self.plugins = plugins
        self.generators = Generators()
        self.structure = Structure()
        self.objects = RunObjects(task)
        self.changed_structure: Mapping[str, Any] = {}
        self._left_out: dict[str, str] = {}

    def take(self, state: State) -> Captured:
        """Returns a checkpoint's content, see `State.capture`. Collective: every rank must call it.

        The tensors aren't copied, so training changes them.

        Returns:
            On rank 0, the facts and all parts. Other ranks' results are unused, unless the model is
            sharded: then each rank returns its slices and its own state, and rank 0 also the state
            that all ranks share.
        """
        hooks = self._hooks
        weights = dict(hooks.capture_model(state))
        saved, left_out = selected(state, hooks, weights, self._left_out)
        _require_own_memory(saved)
        facts = checkpoint_facts(state) | left_out
        parts: dict[str, Any] = {
            "model": saved,
            "optimizers": dict(hooks.capture_optimizers(state)),
            "training": {
                **{
                    name: dict(stateful.state_dict())
                    for name, stateful in self._of_training(state).items()
                },
                "schedulers": {
                    interval: [
                        {"optimizer": name, "state": stateful.state_dict()}
                        for name, stateful in pairs
                    ]
                    for interval, pairs in state.schedulers.items()
                },
                "results": {"eval": state.eval_metrics, "train": state.train_metrics},
                "microbatch_size": state.microbatch_size,
                "structure": self.structure.changes(state),
                "optimizer_layouts": layouts_of(state.optimizers),
            },
            "plugins": self.plugins.take(per_rank=False),
        }
        rank_state = {
            **{name: dict(stateful.state_dict()) for name, stateful in self._rank_objects.items()},
            "feed": _savable(self._feeds.current.state_dict()),
            "generators": dict(self.generators.state_dict(state)),
            "metrics": counts_of(state.metrics["train"]),
            "plugins": self.plugins.take(per_rank=True),
            "objects": self.objects.state_dict(is_loader_assigned=self._feeds.is_assigned(state)),
        }
        self.objects.warn_of_losses(rank_state)
        if holds_slices(weights):
            shared_parts = parts if state.rank == 0 else {name: parts[name] for name in _SLICED}
            return Captured(shared_parts | {f"rank{state.rank}": rank_state}, facts)
        rank_states = (
            self._processes.gather(_moved(rank_state, "cpu"))
            if state.world_size > 1
            else [rank_state]
        )
        parts |= {f"rank{rank}": saved for rank, saved in enumerate(rank_states)}
        return Captured(parts, facts)

    def _of_training(self, state: State) -> dict[str, Stateful]:
        return {"clock": state.clock, "precision": state.precision, **self._training}

    def put(self, state: State, parts: Mapping[str, Any], left_out: str | None) -> None:
        """Restores the state that all ranks share.

        Args:
            state: the State of the run.
            parts: of the checkpoint.
            left_out: the digest of the weights that the parts lack; None if they have all weights.

        Raises:
            CheckpointError: the parts don't fit this run.
        """
        hooks = self._hooks
        training = parts["training"]
        weights = with_names_of(state.model, parts["model"])
        self.changed_structure = training.get("structure", {})
        restore_structure(state, self.changed_structure, weights)
        try:
            restore_model(state, hooks, weights, left_out)
            states = _optimizer_states(state, hooks, parts["optimizers"])
            hooks.restore_optimizers(state, states)
            restore_layouts(state.optimizers, training.get("optimizer_layouts", {}))
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the checkpoint doesn't fit this model and its optimizers: {error}",
                fix="start the run with the task that wrote it, or a new one in another run_dir",
            ) from error
        for name, stateful in self._of_training(state).items():
            with loading(f"training.{name}"):
                stateful.load_state_dict(training[name])
        _put_schedulers(state, training["schedulers"])
        results = training["results"]
        state.eval_metrics |= _moved(results["eval"], state.device)
        state.train_metrics |= _moved(results["train"], state.device)
        state.microbatch_size = training["microbatch_size"]
        self.plugins.put(parts["plugins"])

    def put_own(self, state: State, parts: Mapping[str, Any], rank: int | None) -> None:
        """Restores this rank's own state; a new rank keeps the state it has.

        Args:
            state: the State of the run.
            parts: of the checkpoint.
            rank: the saved rank that had this rank's samples; None for a new rank.
        """
        rank_state = None if rank is None else parts[f"rank{rank}"]
        # The position in the data is the same on all ranks, so a new rank takes rank 0's.
        rank_parts = rank_state or parts["rank0"]
        part_name = f"rank{rank or 0}"
        with loading(f"{part_name}.feed"):
            self._feeds.current.load_state_dict(rank_parts["feed"])
        for name, stateful in self._rank_objects.items():
            with loading(f"{part_name}.{name}"):
                stateful.load_state_dict(rank_parts[name])
        with loading(f"{part_name}.objects"):
            self.objects.load_state_dict(rank_parts["objects"])
        if rank_state is not None:
            with loading(f"{part_name}.metrics"):
                put_counts(state.metrics["train"], rank_state["metrics"])
            self.plugins.put(rank_state["plugins"], f"{part_name}.plugins")
            self.generators.load_state_dict(rank_state["generators"])
        else:
            self.generators.join(state, parts["rank0"]["generators"])


def restore_model(
    state: State,
    hooks: Plans,
    weights: Mapping[str, Any],
    left_out: str | None,
    *,
    strict: bool = True,
) -> None:
    """Loads weights by calling the action `restore_model`.

    An implementation that supports slices gets `SavedTensor`s. The core's implementation reads and
    loads one tensor at a time, so that the host never holds a second copy of the model.

    Args:
        state: the State of the run.
        hooks: the plans of the run.
        weights: by name.
        left_out: the digest of the weights that are missing, which the model must have already; None
            if none are missing.
        strict: as in `Module.load_state_dict`.

    Raises:
        CheckpointError: the model has other weights than those left out, or files have changed.
    """
    weights = with_names_of(state.model, weights)
    if left_out is not None and strict:
        require_same_rest(state, hooks, weights, left_out)
        weights = {**state.model.state_dict(), **weights}
    model_state = state.model.state_dict()
    saved = weights
    if any(sharded(tensor) is not None for tensor in model_state.values()):
        weights = {
            name: shards_like(tensor, model_state.get(name)) for name, tensor in weights.items()
        }
    elif not _is_sharded(state, hooks):
        is_core = state.owner("restore_model") == "core"
        weights = unread(weights) if is_core else read_all(weights)
    try:
        hooks.restore_model(state, weights, strict)
    except RuntimeError:
        # torch reports an error of reading as an error of shapes; reading again raises the original.
        for tensor in saved.values():
            read_all(tensor)
        raise


def _optimizer_states(state: State, hooks: Plans, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the optimizers' states, loaded unless a plugin that supports slices restores them."""
    if _is_sharded(state, hooks) and state.owner("restore_optimizers") != "core":
        return saved
    optimizers = state.optimizers
    return {
        name: read_states(optimizer_state, optimizers[name])
        if name in optimizers
        else read_all(optimizer_state)
        for name, optimizer_state in saved.items()
    }


def _is_sharded(state: State, hooks: Plans) -> bool:
    return state.world_size > 1 and holds_slices(hooks.capture_model(state))


def _require_own_memory(weights: Mapping[str, Any]) -> None:
    """Raises CheckpointError if entries of a tensor share memory, which couldn't be loaded."""
    for name, tensor in weights.items():
        if (
            not isinstance(tensor, Tensor)
            or tensor.layout is not torch.strided
            or not tensor.numel()
        ):
            continue
        if any(
            size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise CheckpointError(
                f"{name!r} of the model can't be saved: it is an expanded tensor, into which "
                "no values can be loaded",
                fix="clone it, so that it has its own memory: `.expand(3).clone()`",
            )


def _put_schedulers(state: State, saved: Mapping[str, Any]) -> None:
    current_names = {key: [name for name, _ in pairs] for key, pairs in state.schedulers.items()}
    saved_names = {
        key: [saved_scheduler["optimizer"] for saved_scheduler in pairs]
        for key, pairs in saved.items()
    }
    if current_names != saved_names:
        raise CheckpointError(
            f"the checkpoint has schedulers for {saved_names}, this run has them for {current_names}",
            fix="start the run with the task that wrote it, or a new one in another run_dir",
        )
    for interval, pairs in state.schedulers.items():
        for idx, ((name, scheduler), saved_scheduler) in enumerate(
            zip(pairs, saved[interval], strict=True)
        ):
            with loading(f"training.schedulers.{interval}[{idx}]"):
                scheduler.load_state_dict(fitting_scheduler(scheduler, saved_scheduler["state"]))
            # torch warns if a scheduler steps before its optimizer. This optimizer has stepped, but in
            # another process; there is no public way to tell torch (2.13).
            vars(state.optimizers[name])["_opt_called"] = True


def _savable(feed: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of a feed, without batches of types that a checkpoint can't store."""
    return {**feed, "first": _savable_batch(feed["first"]), "ahead": _savable_batch(feed["ahead"])}


def _savable_batch(batch: Any) -> Any:
    try:
        flatten(map_leaves(batch, lambda value: value), "first")
    except CheckpointError:
        return None
    return batch


def _moved(nest: Any, device: torch.device | str) -> Any:
    return map_leaves(
        nest, lambda value: value.detach().to(device) if isinstance(value, Tensor) else value
    )


def checkpoint_facts(state: State) -> dict[str, Any]:
    """Returns a checkpoint's description in JSON values, with the latest known metrics."""
    return {
        "moment": state.clock.moment()._asdict(),
        "world_size": state.world_size,
        "mesh": astuple(state.layout),
        "duration": None if state.duration is None else str(state.duration),
        "epoch_length": state.epoch_length,
        "stop_reason": state.stop_reason and str(state.stop_reason),
        "stopped_by": state.stop_reason and state.stop_reason.plugin,
        "status": state.stop_reason and status_of(state.stop_reason),
        # The results of test sets are in the manifest, with the checkpoint whose weights they used.
        "metrics": scalars_of(state.eval_metrics, only=state.eval_metrics.keys() - state.test_sets),
        "manifest": dict(state.manifest),
    }


def described(optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Returns the class of each optimizer and the hyperparameters it was created with."""
    return {
        name: {
            "kind": full_name(type(optimizer)),
            "groups": [
                {key: _value(group.get(key, value)) for key, value in optimizer.defaults.items()}
                for group in optimizer.param_groups
            ],
        }
        for name, optimizer in optimizers.items()
    }


def _value(value: Any) -> Any:
    return json_value(value.tolist() if isinstance(value, Tensor) else value)


class Snapshot:
    """Copies nests of tensors to the host.

    Copies from a GPU are asynchronous: call `wait` before reading them. Each copy reuses the
    pinned memory of the previous one.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self._kinds: set[DeviceKind] = set()
        self._events: list[torch.Event] = []

    def take(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the nest with copies of its tensors, which overwrite the previous call's copies."""
        self._last = self._buffers
        self._buffers = {}
        copied_parts = {name: self._copy((name,), value) for name, value in parts.items()}
        events = (kind.record() for kind in self._kinds)
        self._events = [event for event in events if event is not None]
        self._last = {}
        return copied_parts

    def wait(self) -> None:
        """Waits until the copies are complete; can be called from another thread."""
        for event in self._events:
            event.synchronize()

    def _copy(self, path: tuple[object, ...], value: Any) -> Any:
        """Copies a nest; the writer refuses values that can't be saved."""
        if len(path) > MAX_DEPTH + 1:
            return value
        if isinstance(value, Tensor):
            return self._copy_tensor(path, value.detach()) if is_dense(value) else value
        if isinstance(value, TensorSlice):
            local_part = value.tensor.detach()
            if value.is_copy:
                local_part = local_part.new_empty((0,) * local_part.ndim)
            offsets = (0,) * local_part.ndim if value.is_copy else value.offsets
            return TensorSlice(self._copy_tensor(path, local_part), value.shape, offsets)
        if isinstance(value, Mapping):
            copies: dict[Any, Any] = {}
            for key, entry in value.items():
                copies[key] = entry if type(entry) in _PLAIN else self._copy((*path, key), entry)
            return copies
        if type(value) in (list, tuple):
            items = [self._copy((*path, idx), entry) for idx, entry in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _copy_tensor(self, path: tuple[object, ...], tensor: Tensor) -> Tensor:
        kind = kind_of(tensor.device)
        copy = kind.host_copy(tensor, self._last.get(path))
        if kind.streams is not None:  # only copies in pinned memory are kept for reuse
            self._buffers[path] = copy
            self._kinds.add(kind)
        return copy
