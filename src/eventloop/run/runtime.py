"""The core of one run: its own plugins, always the last in order, and the plans of all plugins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from eventloop.checkpoint.capture import Capture
from eventloop.checkpoint.saver import Saver
from eventloop.checkpoint.states import PluginStates
from eventloop.data.prefetch import mover_to
from eventloop.distributed.join import choose_device
from eventloop.errors import keep
from eventloop.loop import Loop
from eventloop.plugin.active import ActivePlugins
from eventloop.plugin.facts import facts_of
from eventloop.plugin.plans import told
from eventloop.plugin.records import Plugin
from eventloop.run.best_weights import BestWeights
from eventloop.run.run_manifest import RunFile, manifest_of
from eventloop.state import State
from eventloop.training.auto_microbatch import AutoMicrobatch
from eventloop.training.bad_loss import watches_of
from eventloop.training.bookkeeping import Bookkeeping
from eventloop.training.compiling import Compiled, compiled_of
from eventloop.training.defaults import Defaults
from eventloop.training.features import (
    ChannelsLast,
    Deterministic,
    GarbageCollection,
    TunedConvolutions,
)
from eventloop.training.numbers import Numbers
from eventloop.training.precision import choose_precision

if TYPE_CHECKING:
    from eventloop.checkpoint.storage import Storage
    from eventloop.config.settings import Settings
    from eventloop.data.sample_order import Stateful
    from eventloop.distributed.processes import Processes
    from eventloop.plugin.assembly import Assembly
    from eventloop.plugin.observe import Observer
    from eventloop.plugin.plans import Plans
    from eventloop.run.start import Start
    from eventloop.training.precision import Precision


class Core:
    """The State, the loop, and what else the core brings to a run.

    Args:
        settings: what of it there is: features, precision, the kind of accumulation.
        processes: those that train together.
        storage: where the run's files go.
        origin: what the manifest says of the task.
        start: how the run starts.
        criterion: the task's loss.
        observers: what is put around the implementations.

    Attributes:
        active: the plugins of the run, and the plans of all hooks; empty before `freeze`.
        capture: takes the run apart for a checkpoint, and puts it together again.
        best_weights: lends the model the weights of the best evaluation.
    """

    def __init__(
        self,
        settings: Settings,
        processes: Processes,
        storage: Storage,
        origin: Mapping[str, Any] | None,
        start: Start,
        criterion: Callable[[Any, Any], Tensor] | None,
        observers: Sequence[Observer],
    ) -> None:
        device = choose_device(settings.device, processes.local_rank)
        precision = choose_precision(settings.precision, device)
        self._numbers = numbers = Numbers(settings.log_interval, processes.reducer(device))
        self.active = active = ActivePlugins()
        plans = active.plans
        states = PluginStates(lambda: active.assembly.plugins)
        saver = Saver(plans, storage, settings, processes)
        self.best_weights = BestWeights(active, states, saver, storage, processes)
        fits = functools.partial(AutoMicrobatch, processes)
        retry = fits if settings.microbatch_size == "auto" else lambda accumulate: accumulate
        self.loop = Loop(
            plans,
            active.quiet,
            mover_to(device),
            processes,
            retry,
            numbers,
            self.best_weights,
        )
        self.bookkeeping = Bookkeeping(active, processes, numbers, device)
        training: dict[str, Stateful] = {
            "bookkeeping": self.bookkeeping,
            "loop": self.loop,
            "feeds": self.loop.feeds,
            "saver": saver,
        }
        own = {"loss": self.bookkeeping.loss}
        self.capture = Capture(plans, self.loop.feeds, training, own, states, processes)
        self.state = State(
            settings=settings,
            device=device,
            precision=precision,
            processes=processes,
            numbers=numbers,
            run_dir=storage.run_dir,
            active=active,
            update=self.loop.update,
            capture=self.capture.all,
            criterion=criterion,
            duration=start.duration(settings),
            observers=observers,
        )
        self._origin = origin
        self._compiled: tuple[Compiled, ...] = ()
        self._features = (*processes.hooks(settings), *features_of(settings, device, precision))
        self._plugins = (
            Defaults(plans, processes.wrap, processes.mean),
            self.bookkeeping,
            self.loop,
            *self._features,
            *watches_of(settings, self.bookkeeping.loss, processes, precision),
            saver,
            RunFile(start, is_named=settings.run_dir is not None),
        )

    @property
    def plugins(self) -> list[Plugin]:
        """The core's own plugins."""
        return [Plugin("core", "core", target) for target in self._plugins]

    @property
    def notes(self) -> tuple[str, ...]:
        """What the header says: what features switched on and off, and what plugins did."""
        having = (*self._features, *self._compiled)
        plugins = (one for one in self.active.assembly.plugins if one.role not in ("task", "core"))
        told = ((one.name, facts_of(one.target).note) for one in plugins)
        return (
            *(one.note for one in having if one.note),
            *(f"{name}: {note}" for name, note in told if note and isinstance(note, str)),
        )

    def freeze(self, assembly: Assembly) -> None:
        """Makes the plans of all hooks; once more where a plugin has dropped out."""
        state = self.state
        self._compiled = compiled_of(assembly, state)
        self.active.freeze(assembly, state, (*self._compiled, *state.observers))
        self._numbers.is_heard = len(assembly.implementations["log"]) > 0
        manifest = manifest_of(assembly, state.settings, state.device)
        state.manifest = {**manifest, "task": dict(self._origin or {})}


def close_all(hooks: Plans, state: State) -> None:
    """Closes every plugin; raises the first failure with the others noted on it."""
    failures = told(hooks.close, state)
    if failures:
        first, *others = failures
        for other in others:
            keep(first, other)
        raise first


class Feature(Protocol):
    """A plugin of the core."""

    @property
    def note(self) -> str:
        """What the header says of it; "" for nothing."""
        ...


def features_of(
    settings: Settings, device: torch.device, precision: Precision
) -> Iterator[Feature]:
    """Yields the features that a run asks for."""
    if settings.gc_interval is not None:
        yield GarbageCollection(settings.gc_interval)
    if settings.deterministic:
        yield Deterministic(device)
        return
    if device.type == "cuda":
        yield TunedConvolutions()
    if precision.name in ("bf16", "fp16"):
        yield ChannelsLast(precision)
