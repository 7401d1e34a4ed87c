"""The State: everything that the loop knows. `view.py` has the read-only view for callbacks."""

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

# The actions that a plugin may call for any batch.
CALLABLE = ("forward", "loss")
# Ends the name of a generator that draws the same on all ranks.
ALIKE = "/alike"
Update = Callable[["State", Callable[["State"], Tensor], Iterable[str]], "bool | StepOutcome"]


class State:
    """Everything that the loop knows; the only object that flows through the hooks.

    Algorithms may assign what the contract of an event allows. Callbacks get a view of the State that
    refuses assignment.

    Attributes:
        settings: how the task is trained; fixed.
        device: the device that this process trains on; fixed.
        precision: the precision of the passes over a batch; fixed.
        run_dir: the folder for the files of this run; fixed; the first write creates it.
        clock: the progress of the run in epochs, batches, samples, tokens and seconds. Only the loop
            advances it.
        model: the model without wrappers such as DDP; replaceable at `init`.
        criterion: the loss function of the task, which takes outputs and targets; None if the task
            has none; fixed.
        wrapped_model: the module that `forward` calls. A wrapper of `forward` may put another model
            here temporarily, and call `again()` to run that one.
        optimizers: the optimizers by name.
        schedulers: by interval, "ba" or "ep": pairs of optimizer name and scheduler.
        train_dataloader, eval_dataloaders: the results of the `build_` actions; eval data loaders by
            name.
        batch: the whole batch on the device, from `after_dataloader` to `batch_end`, in evaluation and
            in prediction; None in between.
        microbatch: the current slice of the batch, from `before_forward` to `after_backward`; else None.
        microbatch_idx: the index of the microbatch in the batch.
        microbatch_size: the largest number of samples of a microbatch; None for the whole batch.
        num_microbatches: the number of microbatches of the batch on this rank.
        num_batches: the number of batches of an epoch; None if the train data loader has no length.
        even_batches: whether each batch of the epoch is known to have as many samples on every rank.
            Ranks then don't exchange the numbers.
        count: the samples and tokens of the batch, on the host.
        outputs: the result of `forward` for the microbatch. It is None in the backward pass, unless a
            plugin implements one of `before_loss` to `after_backward`.
        loss: the loss of the microbatch, shape (), with its graph; from `after_train_batch` to
            `batch_end` the mean loss of the batch, detached; else None.
        metrics: the metric objects by data set: "train", "eval/NAME".
        train_metrics: the latest results in training by metric name, tensors; "loss" is the mean over
            the samples of the epoch, computed at the end of the epoch and at each evaluation.
        eval_sets: the names of the eval data loaders that an evaluation iterates over: all but
            `test_sets`; once, after the run, the `test_sets`.
        test_sets: the names of the eval data loaders that are evaluated only after the run;
            `build_eval_dataloaders` may set it.
        eval_name: the name of the current eval data loader; None outside of evaluation.
        eval_batch_idx: the index of the eval batch in its set.
        eval_metrics: the latest results by eval data loader and metric name, tensors.
        duration: the length of the run, `max_duration` when it was first started; fractions of the
            run refer to it. None if it isn't set.
        epoch_length: the number of batches of an epoch when the run was first started; fractions of
            an epoch refer to it. None if unknown.
        until: the end of the current fit, counted from the start of the run in a unit of the clock. An
            algorithm may change it at `fit_start`, to the same value on all ranks.
        resumed: whether the current epoch began before this fit.
        is_logging: whether `log` keeps numbers; False in a prediction, and inside of
            `eventloop.toolbox.evaluation_mode`.
        attempt: how many times the current batch was restarted.
        stop_reason: why the run stops; None while it continues.
        enclosed: the function that the current wrapper encloses, which `again` calls. Only the plans
            assign it.
        observers: context managers around every hook, for example a profiler; fixed.
        manifest: the plugins, their order, the settings and the versions of the run; plugins may add
            entries.
        checkpoint_requested: whether a checkpoint was requested since the latest checkpoint.
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
                # A property has raised an AttributeError: raise it again.
                return object.__getattribute__(self, name)
            names = [attr for attr in dir(type(self)) if not attr.startswith("_")]
            raise AttributeError(f"state has no {name!r}{known_as(name, OF_STATE, names)}")

    @property
    def rank(self) -> int:
        """The rank of this process, 0 to `world_size` - 1."""
        return self._processes.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine."""
        return self._processes.local_rank

    @property
    def world_size(self) -> int:
        """The number of processes that train together."""
        return self._processes.world_size

    @property
    def data_rank(self) -> int:
        """The index of this process's share of the samples, 0 to `data_world_size` - 1."""
        return self._processes.data_rank

    @property
    def data_world_size(self) -> int:
        """The number of shares of the samples: `world_size`, unless processes read the same samples."""
        return self._processes.data_world_size

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks with other samples and the same shard; None for all ranks."""
        return self._processes.data_group

    @property
    def mesh(self) -> DeviceMesh | None:
        """The device mesh that `build_mesh` returned; None for a single process."""
        return self._processes.mesh

    @property
    def layout(self) -> Layout:
        """The dimensions of the device mesh; its `label` names a rank in messages."""
        return self._processes.layout

    @property
    def plugins(self) -> Mapping[str, Any]:
        """The active plugin objects by folded name."""
        return self._active.by_name

    @property
    def plugin_facts(self) -> Mapping[str, PluginFacts]:
        """The attributes of the active plugins, such as `takes_turns`, by folded name."""
        return self._active.facts

    @property
    def active_model(self) -> nn.Module:
        """The module that a forward pass calls: `wrapped_model` for a microbatch, else `model`.

        Evaluation and prediction use `model`, so that no rank waits for another.
        """
        return self.model if self.microbatch is None else self.wrapped_model

    @property
    def inputs(self) -> Any:
        """The inputs of the current microbatch, else of the batch; assignment replaces them."""
        return batches.inputs_of(self.batch if self.microbatch is None else self.microbatch)

    @inputs.setter
    def inputs(self, inputs: Any) -> None:
        if self.microbatch is None:
            self.batch = batches.with_inputs(self.batch, inputs)
        else:
            self.microbatch = batches.with_inputs(self.microbatch, inputs)

    @property
    def targets(self) -> Any:
        """The targets of the current microbatch, else of the batch; assignment replaces them."""
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
        """Logs a number for the current moment. A tensor stays on its device until loggers receive it.

        Within a batch, values are averaged over microbatches, weighted like the loss, and then over
        updates. In the evaluation of a set, values are averaged over all samples of the set, and the
        mean is `SET/NAME` in `eval_metrics`. In a prediction, values are dropped.

        Args:
            name: any text; names of a plugin's numbers begin with the name of the plugin and a slash.
                Control characters are escaped and long names truncated where names are printed.
            value: a number, or a tensor of one entry. The tensor is copied without waiting for its device.
            reduce: how values of the ranks are combined. None keeps the value of rank 0 in training;
                "mean" averages over the ranks, weighted like the loss; "sum" adds the values of all
                ranks and microbatches, or eval batches.

        Raises:
            TypeError: `value` is not a single number.
            ValueError: `reduce` has another value.
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
        """Logs a text or a table for the current moment, for example texts that a model has generated.

        Only the text of rank 0 is kept; use `all_gather` to collect texts of all ranks. A second text
        with the same name and moment replaces the first. In the evaluation of a set, the name becomes
        `SET/NAME`. In a prediction, texts are dropped.

        Args:
            name: any text, as in `log`.
            text: a text, or the columns of a table by name, all of one length; cells are texts,
                numbers or None: {"prompt": [...], "completion": [...]}.

        Raises:
            TypeError, ValueError: `name` or `text` isn't one of these.
        """
        copied = copied_text(name, text)
        if self.is_logging and self.rank == 0:
            if self.eval_name is not None:
                name = metric_name(self.eval_name, name)
            self._numbers.record_text(name, copied)

    @contextmanager
    def evaluating(self, names: Iterable[str]) -> Iterator[None]:
        """Makes evaluations in the `with` block iterate over these eval data loaders only."""
        outer_sets = self.eval_sets
        self.eval_sets = tuple(names)
        try:
            yield
        finally:
            self.eval_sets = outer_sets

    def current_count(self) -> Count:
        """Returns the count of the current microbatch, else of the batch, by `count_batch`."""
        batch = self.batch if self.microbatch is None else self.microbatch
        return self._active.plans.count_batch(self, batch)

    def current_weight(self) -> float | Tensor:
        """Returns the weight of the current microbatch, else of the batch, by `weigh_microbatch`."""
        return self._active.plans.weigh_microbatch(self)

    def resolve(self, time: Time) -> Time:
        """Converts fractions of the run and of an epoch to a time that the clock can count.

        Call it from `after_load` on. The result is the same after a resume, even if the length of the
        data loader has changed.

        Raises:
            ValueError: the time is a fraction of an unknown length.
        """
        return resolve(time, self.duration, self.epoch_length)

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in the order of ranks. Collective: every rank must call it.

        Args:
            value: a small value that can be pickled, but no tensor on a device.
        """
        return self._processes.all_gather(value)

    def count_true(self, answer: bool) -> int:
        """Returns the number of ranks whose `answer` is true. Collective: every rank must call it.

        It is cheaper than `all_gather` and doesn't synchronize with the device, so that it may be called
        in a step.
        """
        return self._processes.count_true(answer)

    def request_stop(self, reason: str, kind: StopKind = "plugin") -> None:
        """Requests a stop after the current batch; the first reason is kept.

        Any rank may ask; with several, all stop at the same batch, at most 16 batches later.

        Args:
            reason: the reason as users read it.
            kind: decides the status of the run, see `StopReason`.
        """
        # A signal arrives while any plugin is being called, which isn't its cause.
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
        if (plugin := self.plugins.get(fold(name))) is None:
            raise PluginError(
                f"no active plugin is named {name!r}{closest(fold(name), self.plugins)}",
                fix="list the plugins with `eventloop plugins`",
            )
        return plugin

    def owner(self, action: str) -> str:
        """Returns the owner of an action: the name of an active plugin, "task" or "core".

        For methods that depend on it: if the core owns `loss`, the loss is a part of the outputs; if a
        plugin owns `train_batch`, the action `loss` may never be called.

        Raises:
            PluginError: the action has no implementation, or doesn't exist.
        """
        return self._active.assembly.owner(action).name

    def generator(self, name: str, *, alike: bool = False) -> torch.Generator:
        """Returns the random generator with this name, on `device`; always the same object.

        Its seed depends on the seed of the run, the name and `data_rank`: draws of a plugin don't affect
        other plugins, and ranks that read the same samples draw the same numbers.

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
        """Returns a second model that isn't trained, for example a teacher or a reference model.

        Call it at `init`, on every rank. The model is frozen and in evaluation mode. It is moved to
        `device`, or sharded by the plugin that shards the model of the run. It isn't part of `model`, of
        an optimizer or of a checkpoint: a resumed run builds it again, and is refused if the weights
        differ. If it is sharded, every rank must call it equally often.

        Args:
            name: its name in the manifest and in messages, for example the name of the plugin.
            build: returns the model. It doesn't affect the global random generators.

        Raises:
            PluginError: it is called too late, the name is taken, the model shares parameters with
                the model of the run, or the ranks have built different weights.
        """
        digests: dict[str, str] = self.manifest.get("companions", {})
        if self.metrics or name in digests:
            reason = "exists already" if name in digests else "is requested after the run was built"
            raise PluginError(
                f"the companion {name!r} {reason}", fix="call state.companion once, at `init`"
            )
        if isinstance(build, nn.Module) or not callable(build):
            raise PluginError(
                f"the companion {name!r} is {a(type(build).__name__)}, not a function that builds it",
                fix="write `state.companion(name, lambda: copy.deepcopy(state.model))`, say",
            )
        with kept_generators():
            companion = build()
        if not isinstance(companion, nn.Module):
            raise PluginError(
                f"the companion {name!r} is {a(type(companion).__name__)}, not an nn.Module",
                fix="give a function that returns the model",
            )
        if {*companion.parameters()} & {*self.model.parameters()}:
            raise PluginError(
                f"the companion {name!r} shares parameters with the model, which are trained",
                fix="give a copy: copy.deepcopy(model)",
            )
        companion.requires_grad_(False).eval()
        digest = digest_of(companion.state_dict(), lambda tensor: [tensor])
        if len({*self.all_gather(digest)}) > 1:
            raise PluginError(
                f"the companion {name!r} has other weights on each rank",
                fix="load the same weights on all ranks, or draw them from a seed",
            )
        self.manifest = {**self.manifest, "companions": {**digests, name: f"weights {digest}"}}
        return self._active.plans.wrap_companion(self, companion)

    def update(
        self, loss_fn: Callable[[State], Tensor], optimizers: Iterable[str] | None = None
    ) -> bool | StepOutcome:
        """Updates the weights of some optimizers once; for `train_batch` with several updates.

        Call it in `train_batch`, as its owner or in a wrapper. Like the default it runs forward and
        backward passes for each microbatch, clips gradients and steps, with all events, in the precision
        of the run and over all ranks. The actions `forward` and `loss` aren't called, and
        `before_train_batch` fires at the first update of a batch. Gradients are reset afterwards. The loss
        is logged as `train/loss.NAME`.

        Args:
            loss_fn: returns the loss of `state.microbatch`, shape (), a mean over its samples. It calls
                `state.model` or parts of it, and may assign `state.outputs` for `train_metrics`. It
                runs under autocast.
            optimizers: names of optimizers; by default all.

        Returns:
            The result of `optimizer_step`: True if the optimizers have stepped.

        Raises:
            PluginError: it isn't called in `train_batch`, or within another update; no optimizer has
                such a name; the loss is None, or depends on no parameter of these optimizers.
        """
        names = self.optimizers if optimizers is None else optimizers
        outer = self.enclosed
        # Plugins at the events of this update must not run what the caller encloses.
        self.enclosed = None
        try:
            return self._update(self, loss_fn, names)
        finally:
            self.enclosed = outer

    def training_pass(self) -> AbstractContextManager[Iterator[Any]]:
        """Returns the training batches of an epoch, on the device, without affecting the run.

        For algorithms that need another pass over the data: `with state.training_pass() as batches:`. Each
        rank gets its share, and shares may differ in length. Draws from the global random generators in
        the block don't affect the run; neither do its batches affect the position and order of the
        data. To use `state.call("forward")`, assign a batch to `state.batch` temporarily, outside of a
        step.

        Raises:
            TaskError: the data loader is neither a list nor over a map-style data set.
        """
        return training_pass(
            self.train_dataloader,
            self._processes,
            self.device,
            seed=self.settings.seed,
            epoch=self.clock.epoch,
        )

    def capture(self) -> Captured:
        """Returns the content of a checkpoint; for owners and wrappers of `save_checkpoint`.

        Collective: every rank must call it, between batches. Tensors aren't copied: they are on their
        devices, and change as training continues. `eventloop.toolbox.write_checkpoint` writes the
        content to a folder from which a run can be resumed.

        Returns:
            The parts by name, and the facts. The parts are complete on rank 0 only. If the model is
            sharded, each rank returns its own slices; `eventloop.toolbox.gathered` makes them whole.

        Raises:
            PluginError: it is called within a batch.
        """
        if self.batch is not None:
            raise PluginError(
                "state.capture() while a batch is under way would give half of it",
                fix="call it in save_checkpoint, batch_checkpoint or epoch_checkpoint",
            )
        return self._capture(self)

    def call(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a hook that a plugin declares with `hookspecs`; the State is its first argument.

        It also calls the actions `forward` and `loss`, for methods that evaluate a batch outside of its
        passes: they use `state.batch` and `state.outputs`, and no event fires. Call these between
        microbatches; inside of `eventloop.toolbox.evaluation_mode` they leave the run unchanged.

        Args:
            args, kwargs: arguments of the hook after the State, by position or by name; others have the
                defaults of the declaration.

        Returns:
            The answer to a question, the result of an action, the list of a collection; None for an
            event.

        Raises:
            PluginError: no active plugin declares such a hook, or it has other arguments; hooks of
                the loop can't be called.
        """
        return self._active.plan_to_call(hook)(self, *args, **kwargs)

    def again(self, *args: Any) -> Any:
        """Calls the implementation that the current wrapper encloses once more; returns its result.

        For wrappers of actions that need a second result, for example with other targets. The
        implementation sees the State as it is now.

        Args:
            args: arguments of the action after the State, in the order of its declaration:
                `state.again(shorter)` in a wrapper of `count_batch`. By default the current ones.

        Raises:
            PluginError: it isn't called in a wrapper of an action.
        """
        if self.enclosed is None:
            raise PluginError("state.again() works inside a wrapper of an action only")
        return self.enclosed(*args)
