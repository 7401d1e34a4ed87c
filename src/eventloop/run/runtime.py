"""The core of one run: its own plugins, always the last in order, and the plans of all plugins."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from eventloop.checkpoint.capture import Capture
from eventloop.checkpoint.saver import Saver
from eventloop.checkpoint.states import PluginStates
from eventloop.checkpoint.storage import local_copy
from eventloop.checkpoint.weights import weights_and_states
from eventloop.data.prefetch import mover_to
from eventloop.distributed.join import choose_device
from eventloop.errors import keep
from eventloop.loop import Loop
from eventloop.naming import fold
from eventloop.plugin.assembly import Assembly, OrderPreferences
from eventloop.plugin.declared import HOOKS, checked
from eventloop.plugin.facts import facts_of
from eventloop.plugin.observe import Around, Observer, observe
from eventloop.plugin.plans import Plans, freeze, new_plans, nothing, told
from eventloop.plugin.records import Plugin
from eventloop.run.run_manifest import RunFile, manifest_of, tested
from eventloop.state import CALLABLE, State, connect
from eventloop.training.auto_microbatch import AutoMicrobatch
from eventloop.training.bad_loss import watches_of
from eventloop.training.bookkeeping import Bookkeeping
from eventloop.training.compiling import Compiled, compiled_of
from eventloop.training.defaults import Defaults
from eventloop.training.evaluation import current_count
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
    from eventloop.distributed.processes import Processes
    from eventloop.run.start import Start
    from eventloop.state import State
    from eventloop.training.precision import Precision
    from eventloop.urls import Place


class Core:
    """The State, the loop, and what else the core brings to a run.

    Args:
        settings: what of it there is: features, precision, the kind of accumulation.
        processes: those that train together.
        storage: where the run's files go.
        origin: what the manifest says of the task.
        start: how the run starts.

    Attributes:
        hooks: the plans of all hooks; empty before `freeze`.
        assembly: the plugins of the run; empty before `freeze`.
        observers: what is put around the implementations.
        capture: takes the run apart for a checkpoint, and puts it together again.
        tested_with: the checkpoint whose weights the test sets had; None for the last weights.
    """

    def __init__(
        self,
        settings: Settings,
        processes: Processes,
        storage: Storage,
        origin: Mapping[str, Any] | None,
        start: Start,
    ) -> None:
        device = choose_device(settings.device, processes.local_rank)
        precision = choose_precision(settings.precision, device)
        self._numbers = Numbers(settings.log_interval, processes.reducer(device))
        self.state = State(
            settings=settings,
            device=device,
            precision=precision,
            processes=processes,
            numbers=self._numbers,
            run_dir=storage.run_dir,
        )
        self.hooks = new_plans()
        fits = functools.partial(AutoMicrobatch, processes)
        retry = fits if settings.microbatch_size == "auto" else lambda accumulate: accumulate
        self.loop = Loop(self.hooks, new_plans(), mover_to(device), processes, retry, self._numbers)
        self.bookkeeping = Bookkeeping(self.hooks, processes, self._numbers, device)
        self._features = tuple(features_of(settings, device, precision))
        self._watches = watches_of(settings, self.bookkeeping.loss, processes, precision)
        self._rank_hooks = processes.hooks(settings)
        self._defaults = Defaults(self.hooks, processes.wrap, processes.mean)
        self._compiled: tuple[Compiled, ...] = ()
        self._origin = origin
        self._storage, self._processes = storage, processes
        self.tested_with: Place | None = None
        self.assembly = Assembly((), (), HOOKS, {}, OrderPreferences())
        self.observers: Sequence[Observer] = ()
        self._saver = Saver(self.hooks, storage, settings, processes)
        self._files = [RunFile(start, is_named=settings.run_dir is not None)]
        self.capture = self._new_capture()
        self.loop.best_weights = self.best_weights

    def _new_capture(self) -> Capture:
        return Capture(
            self.state,
            self.hooks,
            self.loop.feeds,
            {
                "clock": self.state.clock,
                "precision": self.state.precision,
                "bookkeeping": self.bookkeeping,
                "loop": self.loop,
                "feeds": self.loop.feeds,
                "saver": self._saver,
            },
            {"loss": self.bookkeeping.loss},
            PluginStates(lambda: self.assembly.plugins),
            self._processes,
        )

    @property
    def plugins(self) -> list[Plugin]:
        """The core's own plugins."""
        targets = (
            self._defaults,
            self.bookkeeping,
            self.loop,
            *self._rank_hooks,
            *self._features,
            *self._watches,
            self._saver,
            *self._files,
        )
        return [Plugin("core", "core", target) for target in targets]

    @property
    def notes(self) -> tuple[str, ...]:
        """What the header says: what features switched on and off, and what plugins did."""
        having = (*self._rank_hooks, *self._features, *self._compiled)
        plugins = (one for one in self.assembly.plugins if one.role not in ("task", "core"))
        told = ((one.name, facts_of(one.target).note) for one in plugins)
        return (
            *(one.note for one in having if one.note),
            *(f"{name}: {note}" for name, note in told if note and isinstance(note, str)),
        )

    @contextmanager
    def best_weights(self, state: State) -> Iterator[None]:
        """Lends the model the weights of the best evaluation, and averages those of that moment.

        Collective: every rank must call it. Where none was kept, the model stays as it is. What the
        test sets give with them gets into the manifest of the run.
        """
        self.tested_with = place = self._saver.best_place(state)
        if place is None:
            yield
            state.manifest = {**state.manifest, "tested": tested(state, None)}
            return
        plugins, names = self.capture.plugins, self.assembly.exporting
        path = local_copy(place, self._storage, self._processes)
        weights, states = weights_and_states(path, names)
        # As this rank has them: of shards, those that are its own.
        now = copy.deepcopy(dict(state.model.state_dict()))
        taken = plugins.take(per_rank=False).items()
        states_now = copy.deepcopy({name: one for name, one in taken if name in names})
        try:
            plugins.put(states)
            self.capture.restore_model(weights, strict=True)
            yield
            state.manifest = {**state.manifest, "tested": tested(state, place.name)}
        finally:
            plugins.put(states_now)
            self.hooks.restore_model(state, now, True)

    def freeze(self, assembly: Assembly) -> None:
        """Makes the plans of all hooks; once more where a plugin has dropped out."""
        self.assembly, state = assembly, self.state
        self._compiled = compiled_of(assembly, state)
        enters = (one.facts.around_calls for one in assembly.plugins)
        observers = (*self._compiled, *self.observers, *(Around(one) for one in enters if one))
        for name, hook in assembly.hooks.items():
            implementations = assembly.implementations[name].implementations
            if observers:
                implementations = observe(implementations, observers)
            plan = state.precision.enclose(name, freeze(hook, implementations, state))
            setattr(self.hooks, name, plan)
            is_told = hook.kind == "event" and hook.per == "microbatch"
            setattr(self.loop.quiet, name, nothing if is_told else plan)
        # What is evaluated is the task's loss, without what plugins wrap around it in training.
        owners = [one for one in assembly.implementations["loss"] if not one.wrapper]
        loss = freeze(assembly.hooks["loss"], owners, state)
        # A partial, since the mark of a hook's function would make the attribute a hook.
        self.bookkeeping.eval_loss = functools.partial(state.precision.enclose("loss", loss))
        self.bookkeeping.evaluates = _evaluates(assembly)
        state.manifest = manifest_of(assembly, state.settings, state.device)
        state.manifest["task"] = dict(self._origin or {})
        self._numbers.is_heard = len(assembly.implementations["log"]) > 0
        connect(
            state,
            plugins={fold(one.name): one.target for one in assembly.plugins if one.role != "core"},
            owner=assembly.owner,
            update=self.loop.update,
            capture=self.capture.all,
            current_count=functools.partial(current_count, state, self.hooks),
            callable_hooks={
                name: checked(hook, getattr(self.hooks, name))
                for name, hook in assembly.hooks.items()
                if hook.declared_by or name in CALLABLE
            },
            hint=assembly.hooks.hint,
        )


def close_all(hooks: Plans, state: State) -> None:
    """Closes every plugin; raises the first failure with the others noted on it."""
    failures = told(hooks.close, state)
    if failures:
        first, *others = failures
        for other in others:
            keep(first, other)
        raise first


def _evaluates(assembly: Assembly) -> bool:
    """Returns whether a plugin or the task evaluates by itself, with eval data or without.

    One that owns `evaluate`, or implements an event of evaluation, and not only to watch one.
    """
    if assembly.owner("evaluate").role != "core":
        return True
    events = [name for name, hook in assembly.hooks.items() if hook.per in ("eval", "eval batch")]
    return any(
        not one.plugin.facts.needs_eval_data
        for name in events
        for one in assembly.implementations[name]
        if one.hook.kind == "event" and one.plugin.role != "core"
    )


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
