"""The states that a checkpoint keeps besides weights: of plugins, metrics and random generators."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eventloop.checkpoint.saved_tensors import read_all
from eventloop.checkpoint.schema import loading
from eventloop.errors import Note
from eventloop.naming import fold
from eventloop.plugin.mistakes import keeps_state
from eventloop.plugin.records import Plugin
from eventloop.rng import get_rng_state, global_generators, set_rng_state
from eventloop.state import ALIKE

if TYPE_CHECKING:
    from torchmetrics import Metric

    from eventloop.state import State


class PluginStates:
    """The states of the active plugins.

    Args:
        plugins: gives the active plugins; asked at each use, as one may drop out.

    Attributes:
        kept: states of plugins that aren't here, which the next checkpoint holds unchanged.
    """

    def __init__(self, plugins: Callable[[], Iterable[Plugin]]) -> None:
        self._plugins = plugins
        self.kept: dict[str, Any] = {}

    def take(self, *, per_rank: bool) -> dict[str, Any]:
        """Returns the states by folded name.

        Args:
            per_rank: of those plugins that keep one a rank, or of the others.

        Raises:
            BaseException: what a plugin raises, with a note that names it.
        """
        found = {} if per_rank else dict(self.kept)
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
        """Restores each plugin's state; one without a state starts afresh.

        Args:
            path: of the states in the checkpoint.

        Raises:
            CheckpointError: a plugin can't go on from what is there.
            BaseException: what else a plugin raises, with a note that names it.
        """
        for plugin in self._plugins():
            one = states.get(fold(plugin.name))
            if one is not None and keeps_state(plugin):
                target: Any = plugin.target
                name = f"{path}.{fold(plugin.name)}"
                with _blamed(plugin, "load_state_dict"), loading(name, by=plugin.origin):
                    kept = read_all(one["state"], but_slices=True)
                    target.load_state_dict(kept, one["version"])


@contextmanager
def _blamed(plugin: Plugin, method: str) -> Iterator[None]:
    """Notes on an exception which plugin raised it, in which of its methods."""
    try:
        yield
    except BaseException as error:
        text = f"raised by plugin {plugin.origin} in {method}\n  fix  {plugin.fix('fix it')}"
        error.add_note(Note(text, "origin"))
        raise


def counts_of(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Returns what this rank's metrics have counted, by their names and those of their parts."""
    return {
        name: {"num_updates": one.update_count, "values": dict(one.metric_state)}
        for name, one in _parts(metrics)
    }


def put_counts(metrics: Mapping[str, Metric], counts: Mapping[str, Any]) -> None:
    """Restores metrics from what `counts_of` returned; those that it doesn't know stay empty.

    Raises:
        ValueError, LookupError: it isn't what these metrics count.
    """
    for name, one in _parts(metrics):
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
    """Returns what was counted, on the device.

    Args:
        fresh: what the metric has counted of nothing.

    Raises:
        ValueError: it isn't of that kind.
    """
    if isinstance(fresh, list):
        if not isinstance(value, list):
            raise ValueError(f"{name} is a tensor, not a list of them")
        return [part.to(device) for part in value]
    if not isinstance(value, Tensor) or not _fits(value, fresh):
        raise ValueError(f"{name} isn't a tensor of shape {tuple(fresh.shape)}")
    return value.to(device)


def _fits(value: Tensor, fresh: Tensor) -> bool:
    """Whether a count may have come of a fresh one, to which batches are added."""
    if fresh.numel() == 0:
        return True
    try:
        shape = torch.broadcast_shapes(value.shape, fresh.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return shape == value.shape and value.is_complex() == fresh.is_complex()


def _parts(metrics: Mapping[str, Metric]) -> Iterator[tuple[str, Metric]]:
    """Yields the metrics and those that they are made of, with their names."""
    if not metrics:
        return
    from torchmetrics import Metric  # where there are none it needn't be imported

    for name, metric in metrics.items():
        for path, one in metric.named_modules():
            if isinstance(one, Metric):
                yield f"{name}.{path}".rstrip("."), one


class Generators:
    """The random generators of this rank: those of the host, the device, the plugins.

    Those of a run that was loaded are put back when it goes on, after the events of its entry,
    which may draw. Whatever is saved before that has them where the checkpoint had them.
    """

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None

    def state_dict(self, state: State) -> Mapping[str, Any]:
        """Returns where they stand, or will stand when the run goes on."""
        return _standing(state) if self._loaded is None else self._loaded

    def load_state_dict(self, standing: Mapping[str, Any]) -> None:
        """Takes what `state_dict` returned, for `go_on`."""
        self._loaded = standing

    def join(self, state: State, standing: Mapping[str, Any]) -> None:
        """Takes what is alike on all ranks from another rank's `state_dict`, for a new rank."""
        named = standing["named"].items()
        if alike := {name: one for name, one in named if name.endswith(ALIKE)}:
            own = _standing(state)
            self._loaded = {**own, "named": {**own["named"], **alike}}

    def go_on(self, state: State) -> None:
        """Puts them where the checkpoint that was loaded had them, once.

        On a device of another kind its generators begin anew.

        Raises:
            CheckpointError: no generators of their kinds stand there.
        """
        if self._loaded is not None:
            with loading(f"rank{state.rank}.generators"):
                _put(state, self._loaded)
            self._loaded = None


def _standing(state: State) -> dict[str, Any]:
    standing: dict[str, Any] = {
        "host": {name: get_rng_state(one) for name, one in global_generators().items()},
        "named": {name: one.get_state() for name, one in state.generators().items()},
    }
    if state.device.type == "cuda":
        standing["device"] = torch.cuda.get_rng_state(state.device)
    return standing


def _put(state: State, standing: Mapping[str, Any]) -> None:
    if "numpy" in standing["host"]:
        importlib.import_module("numpy")
    for name, one in global_generators().items():
        if name in standing["host"]:
            set_rng_state(one, standing["host"][name])
    if "device" in standing and state.device.type == "cuda":
        torch.cuda.set_rng_state(standing["device"], state.device)
    for name, one in standing["named"].items():
        generator = state.generator(name)
        if one.shape == generator.get_state().shape:
            set_rng_state(generator, one)
