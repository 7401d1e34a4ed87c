"""A run: its State, its loop, and the core's plugins, which are always last in order."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from eventloop.checkpoint.best import BestWeights
from eventloop.checkpoint.capture import Capture
from eventloop.checkpoint.locations import local_copy
from eventloop.checkpoint.saver import Saver
from eventloop.checkpoint.states import PluginStates
from eventloop.data.batches import mover_to
from eventloop.data.token_weights import may_weigh_tokens
from eventloop.devices import choose_device, kind_of
from eventloop.errors import EventloopError, failures_of, note_later, notes_of
from eventloop.loop import Loop
from eventloop.plugin.observe import observers_of
from eventloop.plugin.plans import ActivePlugins, outcomes_of
from eventloop.plugin.records import Plugin
from eventloop.run.hidden_frames import hide_frames
from eventloop.run.run_manifest import RunFile, manifest_of
from eventloop.state import State
from eventloop.training.auto_microbatch import AutoMicrobatch
from eventloop.training.bad_loss import watches_of
from eventloop.training.bookkeeping import Bookkeeping
from eventloop.training.compiling import Compiled, compiled_of
from eventloop.training.default_actions import Defaults
from eventloop.training.evaluation import evaluation_mode_note
from eventloop.training.logged_numbers import Numbers
from eventloop.training.optimizers import untrained_note
from eventloop.training.out_of_memory import note_in_training
from eventloop.training.performance_settings import (
    ChannelsLast,
    Deterministic,
    GarbageCollection,
    TunedConvolutions,
)
from eventloop.training.precision import choose_precision
from eventloop.training.split_check import SplitCheck
from eventloop.training.target_shapes import shapes_must_match

if TYPE_CHECKING:
    from eventloop.checkpoint.locations import Storage
    from eventloop.config.configuration import Configuration
    from eventloop.config.settings import Settings
    from eventloop.distributed.processes import Processes
    from eventloop.plugin.registry import Registry
    from eventloop.run.open import Request, TaskDefaults
    from eventloop.run.resume import Start
    from eventloop.training.precision import Precision


class Run:
    """A run: its State, its loop and the core's plugins.

    Attributes:
        active: the active plugins, and the plans of all hooks; empty before `freeze`.
        best_weights: loads the weights of the best evaluation for the test sets.
        is_open: whether `close` hasn't been called yet.
    """

    def __init__(
        self,
        request: Request,
        configuration: Configuration,
        settings: Settings,
        task: TaskDefaults,
        processes: Processes,
        storage: Storage,
        start: Start,
    ) -> None:
        self.configuration = configuration
        self.task = task
        self.start = start
        self.processes = processes
        self._origin = request.origin
        self.is_open = True
        device = choose_device(settings.device, processes.local_rank)
        precision = choose_precision(settings.precision, device)
        self._numbers = numbers = Numbers(settings.log_interval, processes.reducer(device))
        self.active = active = ActivePlugins()
        plans = active.plans
        states = PluginStates(lambda: active.assembly.plugins)
        self.saver = saver = Saver(plans, storage, settings, processes)
        local = functools.partial(local_copy, storage=storage, processes=processes)
        self.best_weights = best = BestWeights(active, states, saver, local)
        fits = functools.partial(AutoMicrobatch, processes)
        retry = fits if settings.microbatch_size == "auto" else lambda accumulate: accumulate
        self.loop = loop = Loop(active, mover_to(device), processes, retry, numbers, best)
        self.bookkeeping = books = Bookkeeping(active, processes, numbers, device)
        training: Any = {"bookkeeping": books, "loop": loop, "feeds": loop.feeds, "saver": saver}
        # Each rank saves its own part of the epoch's mean loss.
        rank_state = {"loss": books.loss}
        self.capture = Capture(
            plans, loop.feeds, training, rank_state, states, processes, request.task
        )
        self.state = State(
            settings=settings,
            device=device,
            precision=precision,
            processes=processes,
            numbers=numbers,
            run_dir=storage.run_dir,
            active=active,
            update=loop.update,
            capture=self.capture.take,
            criterion=task.criterion,
            duration=start.duration or settings.max_duration,
            observers=(*observers_of(settings), *request.observers),
        )
        self.state.epoch_length = start.epoch_length
        self._compiled: tuple[Compiled, ...] = ()
        targets = (
            Defaults(active, processes.wrap, processes.mean),
            books,
            loop,
            *processes.hooks(settings),
            *features_of(settings, device, precision),
            *([] if settings.microbatch_size is None else [SplitCheck(active)]),
            *watches_of(settings, books.loss, processes, precision),
            saver,
            RunFile(start, is_named=settings.run_dir is not None),
            *request.core,
        )
        self.core_plugins = [Plugin("core", "core", target) for target in targets]

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes for the header: about the start, the model, features and plugins."""
        by_tokens = "loss: weighted by tokens, if labels are (N, T)"
        model_notes = [
            by_tokens if may_weigh_tokens(self.state) else "",
            untrained_note(self.state),
            evaluation_mode_note(self.state.model),
        ]
        core_notes = []
        plugin_notes = []
        for plugin, note in outcomes_of(self.active.plans.header_note, self.state):
            if plugin.role == "core":
                core_notes.append(note)
            else:
                plugin_notes.append(f"{plugin.name}: {note}")
        return (
            *self.start.notes,
            *filter(None, model_notes),
            *core_notes,
            *(compiled.note for compiled in self._compiled),
            *plugin_notes,
        )

    def freeze(self, assembly: Registry) -> None:
        """Creates the plans of all hooks; called again when a plugin is deactivated."""
        state = self.state
        self._compiled = compiled_of(assembly, state)
        self.active.freeze(assembly, state, (*self._compiled, *state.observers))
        self.processes.record_answers(self.active)
        # Without loggers, numbers needn't be copied to the host.
        loggers = (assembly.implementations[hook] for hook in ("log", "log_text"))
        self._numbers.is_heard = any(loggers)
        manifest = manifest_of(assembly, state.settings, state.device)
        state.manifest = {**state.manifest, **manifest, "task": dict(self._origin or {})}

    @contextmanager
    def guarded(self, *, closing: bool = False) -> Iterator[None]:
        """If the block raises, calls `exception`, and `close` if `closing`; adds their failures as notes."""
        state = self.state
        loop = self.loop
        plugins = self.active.assembly.plugins
        may_broadcast = any(plugin.facts.loss_may_broadcast for plugin in plugins)
        shapes = nullcontext() if may_broadcast else shapes_must_match()
        try:
            with self.processes.watched(), state.precision.in_force(), shapes:
                yield
        except BaseException as error:
            hide_frames(error)
            _note_moment(error, state)
            note_in_training(error, state)
            # Loggers first get the numbers up to the error, without other ranks, which may be gone.
            failures = failures_of(lambda: loop.deliver_everything(state, alone=True))
            failures += outcomes_of(self.active.plans.exception, state, error)
            if closing:
                failures += failures_of(self.close)
            for failure in failures:
                note_later(error, failure)
            raise

    def close(self) -> None:
        """Closes every plugin once; raises the first failure, with further failures as notes."""
        if not self.is_open:
            return
        self.is_open = False
        failures = outcomes_of(self.active.plans.close, self.state)
        if failures:
            for further_failure in failures[1:]:
                note_later(failures[0], further_failure)
            raise failures[0]


def _note_moment(error: BaseException, state: State) -> None:
    """Adds the epoch and batch to an error from outside of hooks, such as from a data loader.

    An error in a hook has a note with its plugin already.
    """
    is_own_error = isinstance(error, EventloopError) or not isinstance(error, Exception)
    has_origin = notes_of(error, "origin") or notes_of(error, "given")
    if not is_own_error and not has_origin:
        error.add_note(f"epoch {state.clock.epoch_number}, after batch {state.clock.batch}")


def features_of(settings: Settings, device: torch.device, precision: Precision) -> Iterator[object]:
    """Yields the features that the settings enable."""
    if settings.gc_interval is not None:
        yield GarbageCollection(settings.gc_interval)
    if settings.deterministic:
        yield Deterministic()
        return
    if not kind_of(device).is_host:
        yield TunedConvolutions()
    if precision.name in ("bf16", "fp16"):
        yield ChannelsLast(precision)
