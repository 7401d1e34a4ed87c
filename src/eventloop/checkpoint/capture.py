"""Collects the content of a checkpoint, in parts by subject, copies it, and restores a run.

`model`, `optimizers`, `training` (the progress of the run) and `plugins` are the same on all
ranks; the state of a single rank is in `rank0`, `rank1` and so on.
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

_PLAIN = (type(None), bool, int, float, str)  # what is copied with the dict that holds it
_SLICED = ("model", "optimizers", "plugins")  # what a rank may hold slices of


class Captured(NamedTuple):
    """The content of a checkpoint: nests by name, and a description in JSON values."""

    parts: dict[str, Any]
    facts: dict[str, Any]


class Capture:
    """Collects the content of a run's checkpoint, and restores a run from it.

    Args:
        training: objects with training state besides clock and precision, by their key in the
            checkpoint.
        own: objects with state of this rank only, likewise.
        task: the task of the run.

    Attributes:
        structure: what the run was built with.
        objects: the state of the run's objects beside their `state_dict`.
        changed_structure: what the loaded checkpoint says that its run had changed of it.
    """

    def __init__(
        self,
        hooks: Plans,
        feeds: Feeds,
        training: Mapping[str, Stateful],
        own: Mapping[str, Stateful],
        plugins: PluginStates,
        processes: Processes,
        task: object,
    ) -> None:
        self._processes = processes
        self._hooks = hooks
        self._feeds = feeds
        self._training = training
        self._own = own
        self.plugins = plugins
        self.generators = Generators()
        self.structure = Structure()
        self.objects = RunObjects(task)
        self.changed_structure: Mapping[str, Any] = {}
        self._left_out: dict[str, str] = {}

    def take(self, state: State) -> Captured:
        """Returns a checkpoint's content, see `State.capture`. Collective: every rank must call it.

        The tensors are the run's own, not copies: training changes them.

        Returns:
            All parts on rank 0, beside the facts; on other ranks nothing of use. Where the model is in
            slices, each rank's own, and what it alone knows; on rank 0 besides what all know.
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
                **{name: dict(one.state_dict()) for name, one in self._of_training(state).items()},
                "schedulers": {
                    interval: [
                        {"optimizer": name, "state": one.state_dict()} for name, one in pairs
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
        own = {
            **{name: dict(one.state_dict()) for name, one in self._own.items()},
            "feed": _savable(self._feeds.current.state_dict()),
            "generators": dict(self.generators.state_dict(state)),
            "metrics": counts_of(state.metrics["train"]),
            "plugins": self.plugins.take(per_rank=True),
            "objects": self.objects.state_dict(is_loader_assigned=self._feeds.is_assigned(state)),
        }
        self.objects.warn_of_losses(own)
        if holds_slices(weights):
            of_all = parts if state.rank == 0 else {name: parts[name] for name in _SLICED}
            return Captured(of_all | {f"rank{state.rank}": own}, facts)
        of_ranks = self._processes.gather(_moved(own, "cpu")) if state.world_size > 1 else [own]
        parts |= {f"rank{rank}": one for rank, one in enumerate(of_ranks)}
        return Captured(parts, facts)

    def _of_training(self, state: State) -> dict[str, Stateful]:
        return {"clock": state.clock, "precision": state.precision, **self._training}

    def put(self, state: State, parts: Mapping[str, Any], left_out: str | None) -> None:
        """Restores the run but what ranks have of their own; raises CheckpointError.

        Args:
            left_out: the digest of the weights that the parts don't have; None if they have all.
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
        for name, one in self._of_training(state).items():
            with loading(f"training.{name}"):
                one.load_state_dict(training[name])
        _put_schedulers(state, training["schedulers"])
        results = training["results"]
        state.eval_metrics |= _moved(results["eval"], state.device)
        state.train_metrics |= _moved(results["train"], state.device)
        state.microbatch_size = training["microbatch_size"]
        self.plugins.put(parts["plugins"])

    def put_own(self, state: State, parts: Mapping[str, Any], rank: int | None) -> None:
        """Restores this rank's own state; a new rank keeps the state it has.

        Args:
            rank: the one that had this rank's samples; None for a new one.
        """
        own = None if rank is None else parts[f"rank{rank}"]
        # Where the data is, all know: rank 0's word is that of a rank that wasn't there.
        known = own or parts["rank0"]
        part = f"rank{rank or 0}"
        with loading(f"{part}.feed"):
            self._feeds.current.load_state_dict(known["feed"])
        for name, one in self._own.items():
            with loading(f"{part}.{name}"):
                one.load_state_dict(known[name])
        with loading(f"{part}.objects"):
            self.objects.load_state_dict(known["objects"])
        if own is not None:
            with loading(f"{part}.metrics"):
                put_counts(state.metrics["train"], own["metrics"])
            self.plugins.put(own["plugins"], f"{part}.plugins")
            self.generators.load_state_dict(own["generators"])
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
    """Loads weights by the action of that name; only one that supports slices gets `SavedTensor`s.

    The core's implementation reads and loads one tensor at a time.

    Args:
        left_out: the digest of what the weights lack, which the model must have already; None if they
            are whole.

    Raises:
        CheckpointError: it has something else, or its files have changed.
    """
    weights = with_names_of(state.model, weights)
    if left_out is not None and strict:
        require_same_rest(state, hooks, weights, left_out)
        weights = {**state.model.state_dict(), **weights}
    own = state.model.state_dict()
    saved = weights
    if any(sharded(one) is not None for one in own.values()):
        weights = {name: shards_like(one, own.get(name)) for name, one in weights.items()}
    elif not _is_sharded(state, hooks):
        is_core = state.owner("restore_model") == "core"
        weights = unread(weights) if is_core else read_all(weights)
    try:
        hooks.restore_model(state, weights, strict)
    except RuntimeError:
        for one in saved.values():  # torch puts what a read raises among errors of shapes
            read_all(one)
        raise


def _optimizer_states(state: State, hooks: Plans, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the optimizers' states; unless a plugin supports slices, reads them tensor by tensor."""
    if _is_sharded(state, hooks) and state.owner("restore_optimizers") != "core":
        return saved
    optimizers = state.optimizers
    return {
        name: read_states(one, optimizers[name]) if name in optimizers else read_all(one)
        for name, one in saved.items()
    }


def _is_sharded(state: State, hooks: Plans) -> bool:
    return state.world_size > 1 and holds_slices(hooks.capture_model(state))


def _require_own_memory(weights: Mapping[str, Any]) -> None:
    """Raises CheckpointError if entries of a tensor share memory: it couldn't be loaded."""
    for name, one in weights.items():
        if not isinstance(one, Tensor) or one.layout is not torch.strided or not one.numel():
            continue
        if any(size > 1 and not step for size, step in zip(one.shape, one.stride(), strict=True)):
            raise CheckpointError(
                f"{name!r} of the model can't be saved: it is an expanded tensor, into which "
                "nothing can be loaded",
                fix="give it memory of its own: `.expand(3).clone()`",
            )


def _put_schedulers(state: State, saved: Mapping[str, Any]) -> None:
    now = {key: [name for name, _ in pairs] for key, pairs in state.schedulers.items()}
    then = {key: [one["optimizer"] for one in pairs] for key, pairs in saved.items()}
    if now != then:
        raise CheckpointError(
            f"the checkpoint has schedulers for {then}, this run has them for {now}",
            fix="start the run with the task that wrote it, or a new one in another run_dir",
        )
    for interval, pairs in state.schedulers.items():
        for idx, ((name, scheduler), one) in enumerate(zip(pairs, saved[interval], strict=True)):
            with loading(f"training.schedulers.{interval}[{idx}]"):
                scheduler.load_state_dict(fitting_scheduler(scheduler, one["state"]))
            # torch warns of a scheduler that steps before its optimizer has; this one's has, in
            # another process. Private, and there is no public way to say so (torch 2.13).
            vars(state.optimizers[name])["_opt_called"] = True


def _savable(feed: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of a feed, without batches that a checkpoint can't hold."""
    return {**feed, "first": _savable_batch(feed["first"]), "ahead": _savable_batch(feed["ahead"])}


def _savable_batch(batch: Any) -> Any:
    try:
        flatten(map_leaves(batch, lambda value: value), "first")
    except CheckpointError:
        return None
    return batch


def _moved(nest: Any, device: torch.device | str) -> Any:
    return map_leaves(nest, lambda one: one.detach().to(device) if isinstance(one, Tensor) else one)


def checkpoint_facts(state: State) -> dict[str, Any]:
    """Returns a checkpoint's description in JSON values; the metrics are the latest known."""
    return {
        "moment": state.clock.moment()._asdict(),
        "world_size": state.world_size,
        "mesh": astuple(state.layout),
        "duration": None if state.duration is None else str(state.duration),
        "epoch_length": state.epoch_length,
        "stop_reason": state.stop_reason and str(state.stop_reason),
        "stopped_by": state.stop_reason and state.stop_reason.plugin,
        "status": state.stop_reason and status_of(state.stop_reason),
        # What test sets gave is in the manifest, with whose weights they had.
        "metrics": scalars_of(state.eval_metrics, only=state.eval_metrics.keys() - state.test_sets),
        "manifest": dict(state.manifest),
    }


def described(optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Returns the class of each optimizer and the hyperparameters it was created with."""
    return {
        name: {
            "kind": full_name(type(one)),
            "groups": [
                {key: _value(group.get(key, value)) for key, value in one.defaults.items()}
                for group in one.param_groups
            ],
        }
        for name, one in optimizers.items()
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
        """Returns the nest with copies of its tensors, which overwrite those of the call before."""
        self._last = self._buffers
        self._buffers = {}
        taken = {name: self._copy((name,), value) for name, value in parts.items()}
        events = (kind.record() for kind in self._kinds)
        self._events = [event for event in events if event is not None]
        self._last = {}
        return taken

    def wait(self) -> None:
        """Waits until the copies are complete; can be called from another thread."""
        for event in self._events:
            event.synchronize()

    def _copy(self, path: tuple[object, ...], value: Any) -> Any:
        """Copies a nest; values that can't be saved are refused later, by the writer."""
        if len(path) > MAX_DEPTH + 1:
            return value
        if isinstance(value, Tensor):
            return self._copy_tensor(path, value.detach()) if is_dense(value) else value
        if isinstance(value, TensorSlice):
            held = value.tensor.detach()
            if value.is_copy:
                held = held.new_empty((0,) * held.ndim)
            offsets = (0,) * held.ndim if value.is_copy else value.offsets
            return TensorSlice(self._copy_tensor(path, held), value.shape, offsets)
        if isinstance(value, Mapping):
            copies: dict[Any, Any] = {}
            for key, one in value.items():
                copies[key] = one if type(one) in _PLAIN else self._copy((*path, key), one)
            return copies
        if type(value) in (list, tuple):
            items = [self._copy((*path, idx), one) for idx, one in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _copy_tensor(self, path: tuple[object, ...], tensor: Tensor) -> Tensor:
        kind = kind_of(tensor.device)
        copy = kind.host_copy(tensor, self._last.get(path))
        if kind.streams is not None:  # others are given back when they are written
            self._buffers[path] = copy
            self._kinds.add(kind)
        return copy
