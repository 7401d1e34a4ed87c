"""The task: model, data, loss, optimizer and metrics, as values that are converted to hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from eventloop.data import batches
from eventloop.data.batches import Count
from eventloop.data.loaders import loader_of
from eventloop.data.microbatches import microbatches_of
from eventloop.errors import TaskError, a, closest
from eventloop.hook_markers import hookimpl
from eventloop.naming import brief, listed
from eventloop.task.schedulers import schedulers_hook
from eventloop.task.value_checks import argument_meant, check_values, make_optimizers
from eventloop.training.default_actions import keys_of
from eventloop.training.metrics import fresh_metrics
from eventloop.training.target_shapes import watched_once
from eventloop.vocabulary import names_unknown

if TYPE_CHECKING:
    from eventloop.state import State

_BATCH_ARGUMENTS = ("batch", "inputs", "targets", "state")


class Task:
    """A training task: model, data, loss, optimizer, metrics.

    Every value can also be provided by a hook. For a value that isn't set, the default of the core or
    of a plugin is used.

    Args:
        model: an `nn.Module`, or a function that returns an `nn.Module`; it is called after seeding.
        loss: takes outputs and targets, returns a tensor of shape (); optional if the outputs
            have `.loss`.
        train_dataloader: an iterable of batches, with `batch_size` per rank, or a function that
            returns an iterable. The function may take `state`; a stream is split by its `data_rank`
            and `data_world_size`.
        eval_dataloaders: an iterable of batches, a mapping of iterables by name, or a function that
            returns either.
        test_dataloaders: the same, but evaluated only at the end of the run: with the best weights if
            `checkpoint_best` is set, otherwise with the last weights.
        optimizer: takes the model, returns an optimizer or a mapping of optimizers by name; called
            after surgery and wrapping.
        scheduler: takes an optimizer, returns a torch scheduler, or a schedule of
            `eventloop.schedules`. Its other parameters can be max_duration, steps_per_epoch,
            total_steps, state. A mapping by name for several optimizers.
        scheduler_interval: "ba": the scheduler steps once per batch; "ep": once per epoch.
        metrics: torchmetrics and functions by name. A torchmetric is copied for each eval data loader; a
            function of outputs and targets is averaged over the samples. The mean loss is added as
            `loss`, unless the mapping has `"loss": None`; {} means no metrics and no loss. For
            different metrics for each eval set, a mapping of such mappings by the name of the eval
            set; an eval set without an entry has only the loss.
        train_metrics: the same for training, computed at log intervals.
        forward: returns the outputs; takes any of model, batch, inputs, targets, state.
        num_tokens: returns the number of tokens of a batch; takes any of batch, inputs, targets,
            state.
        num_samples: returns the number of samples of a batch or microbatch; takes the same arguments.
            By default the size of the leading dimension, which all tensors must share; required
            if they don't, as in graphs.
        loss_weight: returns the weight of a batch in the mean loss; takes the same arguments. By
            default the number of samples, or of labels other than -100 if the model computes its own
            loss from labels of shape (N, T).
        loss_splits: whether the loss of a batch is the mean of the losses of its microbatches. If it
            isn't, because the loss compares samples of a batch with each other, set it to False:
            microbatches are then an error.
        settings: defaults for the settings, `{"max_duration": "10ep"}`.
        algorithms, callbacks: plugins that belong to the task.
        name: the name of the run and of its folder; by default the name of the task file, of the model's
            class or function, or of the script or notebook.

    Raises:
        TypeError: a value has the wrong type.
    """

    @names_unknown(argument_meant)
    def __init__(
        self,
        *,
        model: nn.Module | Callable[[], nn.Module],
        loss: Callable[[Any, Any], Tensor] | None = None,
        train_dataloader: Any = None,
        eval_dataloaders: Any = None,
        test_dataloaders: Any = None,
        optimizer: Callable[[nn.Module], Optimizer | Mapping[str, Optimizer]] | None = None,
        scheduler: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
        scheduler_interval: Literal["ba", "ep"] = "ba",
        metrics: Any = None,
        train_metrics: Any = None,
        forward: Callable[..., Any] | None = None,
        num_tokens: Callable[..., int] | None = None,
        num_samples: Callable[..., int] | None = None,
        loss_weight: Callable[..., float | Tensor] | None = None,
        loss_splits: bool = True,
        settings: Mapping[str, Any] | None = None,
        algorithms: Sequence[object] = (),
        callbacks: Sequence[object] = (),
        name: str = "",
    ) -> None:
        check_values(
            model=model, loss=loss, forward=forward, optimizer=optimizer, scheduler=scheduler
        )
        if scheduler_interval not in ("ba", "ep"):
            raise ValueError(f"scheduler_interval={scheduler_interval!r} is none of 'ba', 'ep'")
        if scheduler_interval != "ba" and scheduler is None:
            raise ValueError(
                f"scheduler_interval={scheduler_interval!r} has no effect without a scheduler: "
                "set Task(scheduler=...), or remove it"
            )
        self.model = model
        self.loss = loss
        self.train_dataloader = train_dataloader
        self.eval_dataloaders = eval_dataloaders
        self.test_dataloaders = test_dataloaders
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scheduler_interval = scheduler_interval
        self.metrics = metrics
        self.train_metrics = train_metrics
        self.forward = forward
        self.num_tokens = num_tokens
        self.num_samples = num_samples
        self.loss_weight = loss_weight
        self.loss_splits = loss_splits
        self.settings = dict(settings or {})
        self.algorithms = listed(algorithms, "algorithms")
        self.callbacks = listed(callbacks, "callbacks")
        self.name = name

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in self.described().items())
        return f"Task({arguments})"

    def described(self) -> dict[str, str]:
        """Returns a short description of each value that was set."""
        descriptions = {}
        for parameter in inspect.signature(Task).parameters.values():
            value = getattr(self, parameter.name)
            if value != parameter.default and value not in ({}, ()):
                descriptions[parameter.name] = brief(value)
        return descriptions

    def hooks(self) -> SimpleNamespace:
        """Returns a plugin that implements exactly the hooks for which the task has a value."""
        hooks: dict[str, Callable[..., Any]] = {"build_model": _model_hook(self.model)}
        if (loader := self.train_dataloader) is not None:
            hooks["build_train_dataloader"] = lambda state: _iterable(
                _called(loader, state), "train_dataloader"
            )
        loaders = (self.eval_dataloaders, self.test_dataloaders)
        if any(loader is not None for loader in loaders):
            hooks["build_eval_dataloaders"] = _eval_dataloaders_hook(*loaders)
        if (optimizer := self.optimizer) is not None:
            hooks["build_optimizers"] = lambda state: make_optimizers(optimizer, state.model)
        if self.scheduler is not None:
            hooks["build_schedulers"] = schedulers_hook(self.scheduler, self.scheduler_interval)
        if self.metrics is not None or self.train_metrics is not None:
            hooks["build_metrics"] = _metrics_hook(self.metrics, self.train_metrics)
        if self.forward is not None:
            hooks["forward"] = _on_microbatch(self.forward, "forward", tuple(_SOURCES))
        if self.loss is not None:
            hooks["loss"] = _loss_hook(self.loss)
        if self.num_tokens is not None or self.num_samples is not None:
            hooks["count_batch"] = _count_hook(self.num_tokens, self.num_samples)
        if self.loss_weight is not None:
            hooks["weigh_microbatch"] = _on_microbatch(
                self.loss_weight, "loss_weight", _BATCH_ARGUMENTS
            )
        if not self.loss_splits:
            hooks["split_batch"] = _in_one_piece
        # Only hooks with a value: any implementation of an action replaces the core's default.
        plugin = SimpleNamespace(**{name: hookimpl(hook) for name, hook in hooks.items()})
        loss = self.loss
        if isinstance(loss, nn.Module):  # it may have parameters, or buffers such as class weights
            initial_buffers: dict[str, tuple[Tensor, int]] = {}
            plugin.init = hookimpl(
                lambda state: initial_buffers.update(_buffers(loss.to(state.device)))
            )
            plugin.state_dict = lambda: _changed_state(loss, initial_buffers)
            plugin.load_state_dict = lambda saved, _: loss.load_state_dict(saved, strict=False)
        return plugin


def _buffers(module: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Returns a module's buffers by name, each with its version counter."""
    return {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}


def _changed_state(
    loss: nn.Module, initial_buffers: Mapping[str, tuple[Tensor, int]]
) -> dict[str, Any]:
    """Returns the trained parameters of a loss, and the buffers that were replaced or written to.

    Unchanged buffers aren't saved, since the task builds them again.
    """
    names = {name for name, param in loss.named_parameters() if param.requires_grad}
    for name, (buffer, version) in _buffers(loss).items():
        initial_buffer, initial_version = initial_buffers.get(name, (None, None))
        if buffer is not initial_buffer or version != initial_version:
            names.add(name)
    return {name: value for name, value in loss.state_dict().items() if name in names}


def _model_hook(
    model_or_factory: nn.Module | Callable[[], nn.Module],
) -> Callable[[State], nn.Module]:
    def build_model(state: State) -> nn.Module:
        model = model_or_factory
        if not isinstance(model, nn.Module):
            model = model()
        if not isinstance(model, nn.Module):
            raise TaskError(
                f"the task's model is {a(type(model).__name__)}, not an nn.Module",
                fix="set Task(model=Net()), or Task(model=Net) to build it after seeding",
            )
        # A model on the meta device has no memory yet; the strategy allocates it on the right device.
        is_meta = any(param.device.type == "meta" for param in model.parameters())
        return model if is_meta else model.to(state.device)

    return build_model


def _eval_dataloaders_hook(
    eval_dataloaders: Any, test_dataloaders: Any
) -> Callable[[State], Mapping[str, Any]]:
    def build_eval_dataloaders(state: State) -> Mapping[str, Any]:
        eval_loaders = _named_loaders(state, eval_dataloaders, "eval_dataloaders", "eval")
        test_loaders = _named_loaders(state, test_dataloaders, "test_dataloaders", "test")
        shared_names = eval_loaders.keys() & test_loaders.keys()
        if shared_names:
            raise TaskError(
                f"the eval set {min(shared_names)!r} is also the name of a test set",
                fix="use another name: test_dataloaders={'test': loader}",
            )
        if test_loaders:
            state.test_sets = frozenset(test_loaders)
        return eval_loaders | test_loaders

    return build_eval_dataloaders


def _named_loaders(
    state: State, dataloaders: Any, argument: str, default_name: str
) -> dict[str, Any]:
    """Returns data loaders by name.

    Args:
        dataloaders: the value of the argument: a data loader, a mapping, a function, or None.
        argument: the argument of `Task`, for messages.
        default_name: the name of a single data loader.
    """
    if dataloaders is None:
        return {}
    loaders = _called(dataloaders, state)
    is_sequence = isinstance(loaders, list | tuple)
    # A list of batches is a single data loader.
    if is_sequence and any(isinstance(loader, DataLoader) for loader in loaders):
        raise TaskError(
            f"the task's {argument} are {a(type(loaders).__name__)} of {len(loaders)}, without names",
            fix=f"name them: {argument}={{'valid': valid_loader, 'test': test_loader}}",
        )
    named = loaders if isinstance(loaders, Mapping) else {default_name: loaders}
    return {
        str(name): _iterable(_called(loader, state), f"{argument}[{name!r}]")
        for name, loader in named.items()
    }


def _metrics_hook(for_eval: Any, for_training: Any) -> Callable[..., Mapping[str, Any]]:
    def build_metrics(state: State, dataset: str) -> Mapping[str, Any]:
        metrics = for_training if dataset == "train" else for_eval
        if dataset != "train" and isinstance(metrics, Mapping):
            eval_set = dataset.removeprefix("eval/")
            metrics = _metrics_of_set(metrics, eval_set, state.eval_dataloaders)
        if isinstance(metrics, Mapping) and not metrics:
            metrics = {"loss": None}  # an empty mapping switches the mean loss off, too
        return {} if metrics is None else fresh_metrics(metrics, state)

    return build_metrics


def _metrics_of_set(metrics: Mapping[str, Any], name: str, eval_sets: Mapping[str, Any]) -> Any:
    """Returns the metrics of an eval set.

    Args:
        metrics: by name; or mappings by the name of the eval set.

    Returns:
        `metrics` if it isn't grouped by eval set; None if it has no group for this eval set.
    """
    if not any(isinstance(value, Mapping) for value in metrics.values()):
        return metrics
    unknown_sets = metrics.keys() - eval_sets
    if unknown_sets:
        unknown_set = min(unknown_sets)
        raise TaskError(
            f"the task's metrics name the eval set {unknown_set!r}{closest(unknown_set, eval_sets)}",
            fix=f"use metrics by name, or by name of an eval set: {', '.join(eval_sets)}",
        )
    return metrics.get(name)


def _on_microbatch(function: Callable[..., Any], argument: str, allowed: Sequence[str]) -> Any:
    call = _call_by_name(function, argument, allowed)

    def hook(state: State) -> Any:
        return call(state, state.batch if state.microbatch is None else state.microbatch)

    return hook


def _loss_hook(function: Callable[[Any, Any], Tensor]) -> Callable[[State], Tensor]:
    call = watched_once(function, "the loss")

    def loss(state: State) -> Tensor:
        nonlocal call
        targets = state.targets
        if targets is None:
            raise _no_targets(state)
        value = call(state.outputs, targets)
        # Later calls skip the check of the first call. Within a compiled region, calling another
        # function would cause a recompilation.
        if call is not function and state.settings.compile is False:
            call = function
        if value is None:
            raise TaskError(
                "the task's loss returned None",
                function=_described(function),
                fix="return the loss, a tensor of shape ()",
            )
        return value

    return loss


def _no_targets(state: State) -> TaskError:
    accepted_keys, other_keys = keys_of(state.model, state.batch)
    problem = (
        f"the task's loss takes targets, but a batch of {batches.describe(state.batch)} has none"
    )
    if accepted_keys:
        problem += f"; forward takes {', '.join(map(repr, accepted_keys))}"
    fix = (
        "let the data loader yield pairs (inputs, targets) or mappings with 'labels', implement the "
        "action loss, or evaluate without the loss: Task(metrics={'loss': None})"
    )
    if other_keys:
        fix = f"rename {other_keys[-1]!r} to 'labels' in the data set or collate_fn, {fix}"
    return TaskError(problem, fix=fix)


def _count_hook(
    num_tokens: Callable[..., int] | None, num_samples: Callable[..., int] | None
) -> Callable[..., Count]:
    count_tokens = _call_by_name(num_tokens or (lambda: 0), "num_tokens", _BATCH_ARGUMENTS)
    count_samples = None
    if num_samples is not None:
        count_samples = _call_by_name(num_samples, "num_samples", _BATCH_ARGUMENTS)

    def count_batch(state: State, batch: Any) -> Count:
        samples = tokens = 0
        for microbatch in microbatches_of(batch):
            if count_samples is None:
                samples += loader_of(state.train_dataloader).num_samples(microbatch)
            else:
                samples += _checked_count(
                    count_samples(state, microbatch), "num_samples", at_least=1
                )
            # Tokens are counted before the batch is moved to the device, where reading them waits.
            if state.batch is None:
                count = count_tokens(state, microbatch)
                tokens += count if type(count) is int else _checked_count(count, "num_tokens")
        return Count(samples, tokens)

    return count_batch


def _in_one_piece(state: State) -> list[Any]:
    """Returns the batch unsplit: the `split_batch` of a task with `loss_splits=False`."""
    parts = microbatches_of(state.batch)
    requested_size = state.settings.microbatch_size
    if len(parts) > 1 or requested_size is not None:
        problem = f"the batch has {len(parts)} parts"
        if requested_size:
            problem = f"microbatch_size is {requested_size}"
        raise TaskError(
            f"{problem}, but the task's loss can't be split: loss_splits=False",
            fix="train on whole batches, or use eventloop-gradcache, which joins the outputs of "
            "microbatches before the loss",
        )
    return [*parts]


def _checked_count(count: object, argument: str, *, at_least: int | None = None) -> int:
    """Returns a count as an int; raises TaskError if it isn't an integer of at least this size."""
    if not isinstance(count, Integral) or isinstance(count, bool):
        raise TaskError(
            f"the task's {argument} returned {count!r}, {a(type(count).__name__)}, not an int",
            fix="count on the host: inputs.numel(), len(batch), or int(mask.sum())",
        )
    if at_least is not None and count < at_least:
        raise TaskError(
            f"the task's {argument} returned {count}, less than {at_least}",
            fix="let the data loader skip batches without samples",
        )
    return int(count)


def _described(function: Callable[..., Any]) -> str:
    """Returns the name of a function, with the line where it is defined, if known."""
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    return f"{name}, {code.co_filename}:{code.co_firstlineno}" if code else name


# How to get each argument that the task's functions may take.
_SOURCES: dict[str, Callable[[State, Any], Any]] = {
    "model": lambda state, batch: state.active_model,
    "batch": lambda state, batch: batch,
    "inputs": lambda state, batch: batches.inputs_of(batch),
    "targets": lambda state, batch: batches.targets_of(batch),
    "state": lambda state, batch: state,
}


def _call_by_name(
    function: Callable[..., Any], argument: str, allowed: Sequence[str]
) -> Callable[[State, Any], Any]:
    """Returns a function of State and batch that passes the values that `function` names.

    Args:
        argument: the argument of `Task`, for messages.
        allowed: the names that its parameters may have.

    Raises:
        TypeError: a parameter has another name.
    """
    sources = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in allowed:
            sources[name] = _SOURCES[name]
        elif parameter.default is parameter.empty:
            raise TypeError(
                f"Task({argument}=...) requires the unknown argument {name!r}{closest(name, allowed)}; "
                f"its parameters may be {', '.join(allowed)}"
            )

    def call(state: State, batch: Any) -> Any:
        return function(**{name: source(state, batch) for name, source in sources.items()})

    return call


def _called(value: Any, state: State) -> Any:
    """Calls a factory, with the State if it has a parameter `state`; returns other values unchanged."""
    # A data loader or a mapping may be callable, too, but isn't a factory.
    if not callable(value) or isinstance(value, Iterable):
        return value
    try:
        return value(state) if "state" in inspect.signature(value).parameters else value()
    except ValueError as error:
        fix = batches.fix_for_no_samples(error)
        if fix:
            raise TaskError(
                "the data set of a data loader is empty", function=_described(value), fix=fix
            ) from error
        raise


def _iterable(loader: Any, argument: str) -> Any:
    if not isinstance(loader, Iterable):
        raise TaskError(
            f"the task's {argument} is {a(type(loader).__name__)}, which is not iterable",
            fix=f"set Task({argument.partition('[')[0]}=DataLoader(...)), or a function that returns "
            "a DataLoader",
        )
    return loader
