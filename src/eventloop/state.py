"""The State: everything the loop knows now. What callbacks see of it is in `view.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop.clock import Clock, Time, resolve
from eventloop.data import batches
from eventloop.data.batches import Count
from eventloop.data.training_pass import training_pass
from eventloop.errors import PluginError, a, closest
from eventloop.naming import fold
from eventloop.rng import kept_generators, seed_of
from eventloop.signals import StopReason
from eventloop.training.logged_numbers import Numbers, copied_number
from eventloop.training.logged_text import copied_text
from eventloop.training.metrics import metric_name
from eventloop.training.weight_digest import digest_of
from eventloop.vocabulary import STATE as OF_STATE
from eventloop.vocabulary import known_as

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torchmetrics import Metric

    from eventloop.checkpoint.capture import Captured
    from eventloop.config.settings import Settings
    from eventloop.distributed.processes import Processes
    from eventloop.mesh import Layout
    from eventloop.plugin.observe import Observer
    from eventloop.plugin.plans import ActivePlugins
    from eventloop.plugin.plugin_attributes import PluginFacts
    from eventloop.signals import StopKind
    from eventloop.training.grad_scaling import StepOutcome
    from eventloop.training.precision import Precision

# The actions that a plugin may have done for a batch of its own choice.
CALLABLE = ("forward", "loss")
# Ends the name of a generator that draws the same on all ranks.
ALIKE = "/alike"
Update = Callable[["State", Callable[["State"], Tensor], Iterable[str]], "bool | StepOutcome"]


class State:
    """Everything the loop knows now; the only thing that flows through the hooks.

    Algorithms may write what an event's contract allows; callbacks see all of it through a view
    that refuses assignment.

    Attributes:
        settings: how the task is trained; fixed.
        device: where this process trains; fixed.
        precision: how the passes over a batch compute; fixed.
        run_dir: where this run's files go; fixed; created by the first write.
        clock: where the run is; the loop alone moves it.
        model: the bare model; replaceable at `init`.
        criterion: the task's loss, a function of outputs and targets; None where it gave none; fixed.
        wrapped_model: what `forward` calls; a wrapper of `forward` may lend the place to another
            model, and let it compute with `again()`.
        optimizers: by name.
        schedulers: by interval, "ba" or "ep": pairs of optimizer name and scheduler.
        train_dataloader, eval_dataloaders: what the `build_` actions gave; the latter by name.
        batch: the whole batch on the device, from `after_dataloader` to `batch_end`; in
            evaluation and prediction the batch there; None in between.
        microbatch: the slice of it under way, from `before_forward` to `after_backward`; else None.
        microbatch_idx: its number within the batch.
        microbatch_size: how many samples it has at most; None for the whole batch.
        num_microbatches: how many the batch has on this rank.
        num_batches: how many an epoch has; None where the train data loader doesn't know.
        even_batches: whether each batch of the epoch is known to have as many samples on all ranks,
            which then need to tell each other nothing about it.
        count: what the batch counts for: samples and tokens, on the host.
        outputs: what `forward` gave for the microbatch; None in its backward pass, unless a plugin acts at one of
            `before_loss` to `after_backward`.
        loss: the microbatch's, shape (), with its graph; from `after_train_batch` to `batch_end`
            the batch's mean, detached; else None.
        metrics: what the results are computed with, by data set: "train", "eval/NAME".
        train_metrics: the latest results in training by metric name, tensors; "loss" is the mean
            over the samples of the epoch, as it was when the epoch ended or was evaluated last.
        eval_sets: the eval data loaders that evaluations go over, by name: all but `test_sets`; when
            the run is over, once, those.
        test_sets: those that are evaluated then only; `build_eval_dataloaders` may set it.
        eval_name: the eval data loader under way; None outside evaluation.
        eval_batch_idx: the number of the eval batch under way within its set.
        eval_metrics: the latest results by data loader and metric name, tensors.
        duration: the length of the run, which fractions of it are of: `max_duration` when it was
            first started; None if it isn't set.
        epoch_length: how many batches an epoch had when the run was first started, which fractions
            of an epoch are of; None if unknown.
        until: when the fit under way ends, in a unit that the clock counts, from the start of the
            run; an algorithm may move it at `fit_start`, alike on all ranks.
        resumed: whether the epoch under way had begun before this fit.
        is_logging: whether `log` keeps what it is given; False in a prediction, and inside of
            `eventloop.toolbox.evaluation_mode`.
        attempt: how often the current batch was restarted, 0 at first.
        stop_reason: why the run should stop; None while it continues.
        enclosed: what the wrapper under way encloses, which `again` runs; the plans alone set it.
        observers: called around every hook, for example a profiler; fixed.
        manifest: what the run is made of: plugins, order, settings, versions; the core adds to it.
        checkpoint_requested: whether a checkpoint was requested since the last one.
    """

    __slots__ = (
        "_active",
        "_capture",
        "_generators",
        "_numbers",
        "_processes",
        "_update",
        "attempt",
        "batch",
        "checkpoint_requested",
        "clock",
        "count",
        "criterion",
        "device",
        "duration",
        "enclosed",
        "epoch_length",
        "eval_batch_idx",
        "eval_dataloaders",
        "eval_metrics",
        "eval_name",
        "eval_sets",
        "even_batches",
        "is_logging",
        "loss",
        "manifest",
        "metrics",
        "microbatch",
        "microbatch_idx",
        "microbatch_size",
        "model",
        "num_batches",
        "num_microbatches",
        "observers",
        "optimizers",
        "outputs",
        "precision",
        "resumed",
        "run_dir",
        "schedulers",
        "settings",
        "stop_reason",
        "test_sets",
        "train_dataloader",
        "train_metrics",
        "until",
        "wrapped_model",
    )

    def __init__(
        self,
        *,
        settings: Settings,
        device: torch.device,
        precision: Precision,
        processes: Processes,
        numbers: Numbers,
        run_dir: Path,
        active: ActivePlugins,
        update: Update,
        capture: Callable[[State], Captured],
        criterion: Callable[[Any, Any], Tensor] | None,
        duration: Time | None,
        observers: Sequence[Observer],
    ) -> None:
        self.settings: Final = settings
        self.device: Final = device
        self.precision: Final = precision
        self._processes = processes
        self.run_dir: Final = run_dir
        self.clock: Final = Clock()
        self._generators: dict[str, torch.Generator] = {}
        self._numbers = numbers
        self._active = active
        self._update = update
        self._capture = capture
        self.criterion: Final = criterion
        self.duration: Final = duration
        self.observers: Final = observers

        self.enclosed: Callable[..., Any] | None = None
        self.model: nn.Module = nn.Identity()
        self.wrapped_model: nn.Module = self.model
        self.optimizers: Mapping[str, Optimizer] = {}
        self.schedulers: Mapping[str, Any] = {}
        self.train_dataloader: Any = ()
        self.eval_dataloaders: Mapping[str, Any] = {}
        self.batch: Any = None
        self.microbatch: Any = None
        self.microbatch_idx = 0
        self.num_microbatches = 1
        size = settings.microbatch_size
        self.microbatch_size = None if size == "auto" else size
        self.num_batches: int | None = None
        self.even_batches = False
        self.count = Count(0, 0)
        self.outputs: Any = None
        self.loss: Tensor | None = None
        self.metrics: Mapping[str, Mapping[str, Metric]] = {}
        self.train_metrics: dict[str, Tensor] = {}
        self.eval_sets: Sequence[str] = ()
        self.test_sets: frozenset[str] = frozenset()
        self.eval_name: str | None = None
        self.eval_batch_idx = 0
        self.eval_metrics: dict[str, dict[str, Tensor]] = {}
        self.epoch_length: int | None = None
        self.until = settings.max_duration or Time("1ep")
        self.resumed = False
        self.is_logging = True
        self.attempt = 0
        self.stop_reason: StopReason | None = None
        self.checkpoint_requested = False
        self.manifest: Mapping[str, Any] = {}

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            if name in dir(type(self)):
                return object.__getattribute__(self, name)  # raises what a property has raised
            known = [one for one in dir(type(self)) if not one.startswith("_")]
            raise AttributeError(f"state has no {name!r}{known_as(name, OF_STATE, known)}")

    @property
    def rank(self) -> int:
        """This process's number of `world_size`."""
        return self._processes.rank

    @property
    def local_rank(self) -> int:
        """This process's number on its machine."""
        return self._processes.local_rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self._processes.world_size

    @property
    def data_rank(self) -> int:
        """The number of this process's samples, of `data_world_size`."""
        return self._processes.data_rank

    @property
    def data_world_size(self) -> int:
        """Over how many processes samples are split: `world_size`, unless some share them."""
        return self._processes.data_world_size

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The processes that differ from this one in their samples alone; None for all of them."""
        return self._processes.data_group

    @property
    def mesh(self) -> DeviceMesh | None:
        """The processes as `build_mesh` has arranged them, by dimension; None for a single one."""
        return self._processes.mesh

    @property
    def layout(self) -> Layout:
        """How `build_mesh` has arranged the processes; its `label` is what messages call a rank."""
        return self._processes.layout

    @property
    def plugins(self) -> Mapping[str, Any]:
        """The active plugins themselves, by folded name."""
        return self._active.by_name

    @property
    def plugin_facts(self) -> Mapping[str, PluginFacts]:
        """What the active plugins say about themselves in attributes, by folded name."""
        return self._active.facts

    @property
    def active_model(self) -> nn.Module:
        """What a forward pass calls now: `wrapped_model` for a microbatch, else `model`.

        In evaluation and prediction no rank waits for another.
        """
        return self.model if self.microbatch is None else self.wrapped_model

    @property
    def inputs(self) -> Any:
        """The inputs of the microbatch under way, else of the batch; assignment replaces them."""
        return batches.inputs_of(self.batch if self.microbatch is None else self.microbatch)

    @inputs.setter
    def inputs(self, inputs: Any) -> None:
        if self.microbatch is None:
            self.batch = batches.with_inputs(self.batch, inputs)
        else:
            self.microbatch = batches.with_inputs(self.microbatch, inputs)

    @property
    def targets(self) -> Any:
        """The targets of the microbatch under way, else of the batch; assignment replaces them."""
        return batches.targets_of(self.batch if self.microbatch is None else self.microbatch)

    @targets.setter
    def targets(self, targets: Any) -> None:
        if self.microbatch is None:
            self.batch = batches.with_targets(self.batch, targets)
        else:
            self.microbatch = batches.with_targets(self.microbatch, targets)

    def log(
        self, name: str, value: float | Tensor, reduce: Literal["mean", "sum"] | None = None
    ) -> None:
        """Logs a number for the current moment; it is kept on its device until it is delivered.

        Within a batch, values are averaged over microbatches (weighted like the loss) and then
        over updates. While an eval set is evaluated, it is the mean over all samples of the set,
        named SET/NAME in `eval_metrics`. In a prediction it is dropped.

        Args:
            name: a plugin's numbers start with its name and a slash. Any text will do:
                printing shows control characters as text, and truncates a long one.
            value: a number, or a tensor of one entry, which is copied, not awaited.
            reduce: None keeps rank 0's value in training; "mean" takes the mean over the ranks,
                weighted likewise; "sum" adds up what ranks and microbatches, or eval batches, have.

        Raises:
            TypeError: `value` is not a single number.
            ValueError: `reduce` is something else.
        """
        value = copied_number(name, value, reduce)
        if self.eval_name is not None:
            weight = 1 if self.batch is None else self.current_weight()
            self._numbers.of_set.record(name, value, weight, reduce)
        elif self.microbatch is not None:
            self._numbers.record_part(name, value, self.microbatch_idx, reduce)
        elif self.is_logging:
            self._numbers.record(name, value, reduce)

    def log_text(self, name: str, text: str | Mapping[str, Iterable[Any]]) -> None:
        """Logs a text or a table for the current moment, for example what a model generates.

        Rank 0's is kept; `all_gather` collects those of the others. A later one of the same name
        and moment replaces it. While an eval set is evaluated its name is SET/NAME. In a prediction
        it is dropped.

        Args:
            name: as in `log`; any text will do.
            text: a text, or the columns of a table by name, with as many cells each, which are
                texts, numbers or None: {"prompt": [...], "completion": [...]}.

        Raises:
            TypeError, ValueError: `name` or `text` is something else.
        """
        copied = copied_text(name, text)
        if self.is_logging and self.rank == 0:
            if self.eval_name is not None:
                name = metric_name(self.eval_name, name)
            self._numbers.record_text(name, copied)

    @contextmanager
    def evaluating(self, names: Iterable[str]) -> Iterator[None]:
        """Has evaluations inside of it go over these eval data loaders."""
        outer_sets = self.eval_sets
        self.eval_sets = tuple(names)
        try:
            yield
        finally:
            self.eval_sets = outer_sets

    def current_count(self) -> Count:
        """Returns the samples of the microbatch under way, else of the batch, by `count_batch`."""
        batch = self.batch if self.microbatch is None else self.microbatch
        return self._active.plans.count_batch(self, batch)

    def current_weight(self) -> float | Tensor:
        """Returns the weight of the microbatch under way, else of the batch, by `weigh_microbatch`."""
        return self._active.plans.weigh_microbatch(self)

    def resolve(self, time: Time) -> Time:
        """Returns a time that the clock can count: no fraction of the run, none of an epoch.

        The same before and after a resume, whatever has become of the data loader; from
        `after_load` on.

        Raises:
            ValueError: a fraction of an unknown length.
        """
        return resolve(time, self.duration, self.epoch_length)

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the value of every rank, in order; collective: every rank must call it.

        Args:
            value: something small that can be pickled; not a tensor on a device.
        """
        return self._processes.all_gather(value)

    def count_true(self, answer: bool) -> int:
        """Returns on how many ranks `answer` is true; collective: every rank must call it.

        Cheaper than `all_gather`, and may be called in a step: no device is read.
        """
        return self._processes.count_true(answer)

    def request_stop(self, reason: str, kind: StopKind = "plugin") -> None:
        """Requests a stop after the current batch; the first reason is kept.

        Any rank may ask; with several, all stop at the same batch, at most 16 batches later.

        Args:
            reason: says why.
            kind: how the run is listed, and treated: see `StopReason`.
        """
        # A signal interrupts a plugin that has nothing to do with it.
        plugin = None if kind == "signal" else self._active.calling_plugin()
        self._processes.exchange.request_stop(self, StopReason(reason, kind, plugin))

    def request_checkpoint(self) -> None:
        """Requests a checkpoint after the current batch.

        Any rank may ask; with several, it is saved within a quarter of a second or a batch.
        """
        self._processes.exchange.request_checkpoint(self)

    def plugin(self, name: str) -> Any:
        """Returns the active plugin with this name.

        Raises:
            PluginError: no active plugin has it.
        """
        if (found := self.plugins.get(fold(name))) is None:
            raise PluginError(
                f"no active plugin is named {name!r}{closest(fold(name), self.plugins)}",
                fix="list the plugins with `eventloop plugins`",
            )
        return found

    def owner(self, action: str) -> str:
        """Returns the owner of an action: the name of an active plugin, "task" or "core".

        For methods that suit some owners only: a loss that is the core's is a part of the model's
        outputs, a `train_batch` that isn't the core's may ask for no `loss`.

        Raises:
            PluginError: it has no implementation, or there is no such action.
        """
        return self._active.assembly.owner(action).name

    def generator(self, name: str, *, alike: bool = False) -> torch.Generator:
        """Returns the random generator with this name, on `device`; always the same object.

        Its seed depends on the run's seed, the name and `data_rank`, so a plugin's draws don't affect
        others, and ranks that share their samples draw the same.

        Args:
            alike: whether all ranks draw the same numbers, for example noise on weights; they must
                draw equally often.
        """
        name = f"{name}{ALIKE}" if alike else name
        if name not in self._generators:
            is_alike = name.endswith(ALIKE)
            text = f"{self.settings.seed}/{name}{'' if is_alike else f'/{self.data_rank}'}"
            generator = torch.Generator(self.device)
            self._generators[name] = generator.manual_seed(seed_of(text, 7))
        return self._generators[name]

    def generators(self) -> Mapping[str, torch.Generator]:
        """Returns all generators that were requested, by name."""
        return self._generators

    def companion(self, name: str, build: Callable[[], nn.Module]) -> nn.Module:
        """Returns a second model that only computes, placed as the run's is: a teacher, a reference.

        Called at `init` or later, before the run is loaded, alike on all ranks. The model is frozen and in
        evaluation mode, on `device`, or sharded by the plugin that shards the run's. It isn't part of
        `model`, of an optimizer or of a checkpoint: a resumed run builds it again, and is refused if
        its weights are others. Where it is sharded, every rank must call it equally often.

        Args:
            name: in the manifest and in messages; that of the plugin, say.
            build: returns the model; the global random generators are as before afterwards.

        Raises:
            PluginError: it comes too late, the name is taken, the model shares parameters with the
                run's, or the ranks have built different weights.
        """
        known: dict[str, str] = self.manifest.get("companions", {})
        if self.metrics or name in known:
            late = "is there already" if name in known else "is asked for when all is built"
            raise PluginError(
                f"the companion {name!r} {late}", fix="call state.companion once, at `init`"
            )
        if isinstance(build, nn.Module) or not callable(build):
            raise PluginError(
                f"the companion {name!r} is {a(type(build).__name__)}, not a function that builds it",
                fix="write `state.companion(name, lambda: copy.deepcopy(state.model))`, say",
            )
        with kept_generators():
            made = build()
        if not isinstance(made, nn.Module):
            raise PluginError(
                f"the companion {name!r} is {a(type(made).__name__)}, not an nn.Module",
                fix="give a function that returns the model",
            )
        if {*made.parameters()} & {*self.model.parameters()}:
            raise PluginError(
                f"the companion {name!r} shares parameters with the model, which are trained",
                fix="give a copy: copy.deepcopy(model)",
            )
        digest = digest_of(made.requires_grad_(False).eval().state_dict(), lambda one: [one])
        if len({*self.all_gather(digest)}) > 1:
            raise PluginError(
                f"the companion {name!r} has other weights on each rank",
                fix="load the same weights on all ranks, or draw them from a seed",
            )
        self.manifest = {**self.manifest, "companions": {**known, name: f"weights {digest}"}}
        return self._active.plans.wrap_companion(self, made)

    def update(
        self, loss_fn: Callable[[State], Tensor], optimizers: Iterable[str] | None = None
    ) -> bool | StepOutcome:
        """Makes one update of some optimizers; for owners of `train_batch` that make several.

        Called in `train_batch`, by its owner or a wrapper. It does what the default does once: for
        each microbatch the passes and backward, then clipping and a step, with their events, in
        the run's precision, over all ranks. The actions `forward` and `loss` aren't asked;
        `before_train_batch` fires at the first update of a batch. Afterwards no parameter has a
        gradient. Logged as `train/loss.NAME`.

        Args:
            loss_fn: returns the loss of `state.microbatch`, shape (), a mean over its samples; calls
                `state.model` or parts of it, and may leave `state.outputs`, which `train_metrics` take.
                Runs under autocast.
            optimizers: their names; all unless given.

        Returns:
            The result of `optimizer_step`: True if the optimizers did step.

        Raises:
            PluginError: no `train_batch` is under way, or another update is; no optimizer has such
                a name; the loss is None, or depends on no parameter of theirs.
        """
        names = self.optimizers if optimizers is None else optimizers
        outer = self.enclosed
        self.enclosed = None  # is the caller's, and not its events'
        try:
            return self._update(self, loss_fn, names)
        finally:
            self.enclosed = outer

    def training_pass(self) -> AbstractContextManager[Iterator[Any]]:
        """Returns the training batches of an epoch, on the device, without affecting the run.

        For algorithms that need an additional pass over the data: `with state.training_pass() as
        batches:`. Each rank gets its part; lengths may differ. Draws from the global random
        generators inside the block, for example in a forward pass, don't affect the run; position,
        order and workers of the run's own batches stay as they are. For `state.call("forward")` assign a
        batch to `state.batch`, outside of a step and for as long as it is needed.

        Raises:
            TaskError: the data loader isn't a list, nor one over a map-style data set.
        """
        return training_pass(
            self.train_dataloader,
            self._processes,
            self.device,
            seed=self.settings.seed,
            epoch=self.clock.epoch,
        )

    def capture(self) -> Captured:
        """Returns what a checkpoint of now holds; for owners and wrappers of `save_checkpoint`.

        Collective: every rank must call it, between batches. The tensors are the run's own, on their
        devices: they change as training continues. `eventloop.toolbox.write_checkpoint`
        writes both to a folder, which `resume` takes.

        Returns:
            The parts by name, whole on rank 0 and of no use on the others, and the facts. Where the
            model is in slices, each rank has its own, which `eventloop.toolbox.gathered`
            makes whole.

        Raises:
            PluginError: a batch is under way.
        """
        if self.batch is not None:
            raise PluginError(
                "state.capture() while a batch is under way would give half of it",
                fix="call it in save_checkpoint, batch_checkpoint or epoch_checkpoint",
            )
        return self._capture(self)

    def call(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a hook that a plugin declares with `hookspecs`; the State itself is passed first.

        The actions `forward` and `loss`, too, for methods that look at a batch outside of its passes:
        for `batch`, or what it was replaced with, and `outputs`. No event fires. Only between
        microbatches; inside of `eventloop.toolbox.evaluation_mode` it leaves no trace.

        Args:
            args, kwargs: the hook's arguments after the State, by position or by name; the
                declaration's defaults are used for the rest.

        Returns:
            A question's answer, an action's result, a collection's list; None for an event.

        Raises:
            PluginError: no active plugin declares such a hook, or it takes other arguments; the
                loop's own are the loop's to call.
        """
        return self._active.plan_to_call(hook)(self, *args, **kwargs)

    def again(self, *args: Any) -> Any:
        """Runs what the current wrapper encloses again; returns its result.

        Only in a wrapper of an action, for methods that need a second result, for example with
        other targets. It uses the State as it is now.

        Args:
            args: other arguments for the action, after the State and in the order of its
                declaration: `state.again(shorter)` in a wrapper of `count_batch`.

        Raises:
            PluginError: no wrapper of an action is under way.
        """
        if self.enclosed is None:
            raise PluginError("state.again() works inside a wrapper of an action only")
        return self.enclosed(*args)
