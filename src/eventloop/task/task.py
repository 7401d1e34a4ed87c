"""The task: what is trained, as values that are turned into hooks."""

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

_OF_BATCH = ("batch", "inputs", "targets", "state")


class Task:
    """What is trained: model, data, loss, optimizer, metrics.

    Every value can also be provided by a hook. A value that is left out is the core's default, or
    a plugin's.

    Args:
        model: an `nn.Module`, or a function that returns one; it is called after seeding.
        loss: takes outputs and targets, returns a tensor of shape (); optional if the outputs
            have `.loss`.
        train_dataloader: an iterable of batches, with `batch_size` per rank, or a function that
            returns one; it may take `state`, whose `data_rank` of `data_world_size` a stream splits by.
        eval_dataloaders: one iterable, or several by name, or a function that returns either.
        test_dataloaders: likewise, but evaluated once, at the end of the run: with the weights of
            the best evaluation if `checkpoint_best` is set, otherwise with the last.
        optimizer: takes the model, returns an optimizer or several by name; called after surgery
            and wrapping.
        scheduler: takes an optimizer, returns a torch scheduler, or one of `eventloop.schedules`.
            Its other parameters can be max_duration, steps_per_epoch, total_steps, state. A
            mapping by name for several optimizers.
        scheduler_interval: "ba": the scheduler steps once per batch; "ep": once per epoch.
        metrics: by name: torchmetrics, copied for each eval data loader, and functions of outputs
            and targets, averaged over the samples. The mean loss is added as `loss`, unless that
            is None here; {} means no metrics at all. Or by name of the eval set, each with such a
            mapping; a set that isn't there has the loss alone.
        train_metrics: the same for training, computed at log intervals.
        forward: returns the outputs; takes any of model, batch, inputs, targets, state.
        num_tokens: returns the number of tokens of a batch; takes any of batch, inputs, targets,
            state.
        num_samples: likewise, the number of samples of a batch or microbatch; by default the
            leading dimension, which all tensors share; where they don't, as in graphs, it has to be given.
        loss_weight: likewise, the weight of a batch in the mean loss; by default its samples, or its
            labels other than -100 if the model computes its own loss from labels of shape (N, T).
        loss_splits: whether the loss of a batch is a mean over the losses of its parts; False if it
            compares samples of a batch with each other, so that microbatches are an error.
        settings: defaults for the settings, `{"max_duration": "10ep"}`.
        algorithms, callbacks: plugins that belong to the task.
        name: the name of the run, after which its folder is called; by default that of the task file, of
            the model's class or function, or of the script or notebook.

    Raises:
        TypeError: a value is of the wrong kind.
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
                "give Task(scheduler=...), or leave it out"
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
        given = ", ".join(f"{name}={value}" for name, value in self.described().items())
        return f"Task({given})"

    def described(self) -> dict[str, str]:
        """Returns a short description of each value that was set."""
        parameters = inspect.signature(Task).parameters.values()
        values = ((one, getattr(self, one.name)) for one in parameters)
        return {
            one.name: brief(value)
            for one, value in values
            if value != one.default and value not in ({}, ())
        }

    def hooks(self) -> SimpleNamespace:
        """Returns a plugin that implements exactly the hooks for which the task has a value."""
        given: dict[str, Callable[..., Any]] = {"build_model": _model_hook(self.model)}
        if (loader := self.train_dataloader) is not None:
            given["build_train_dataloader"] = lambda state: _iterable(
                _called(loader, state), "train_dataloader"
            )
        loaders = (self.eval_dataloaders, self.test_dataloaders)
        if any(one is not None for one in loaders):
            given["build_eval_dataloaders"] = _eval_dataloaders_hook(*loaders)
        if (optimizer := self.optimizer) is not None:
            given["build_optimizers"] = lambda state: make_optimizers(optimizer, state.model)
        if self.scheduler is not None:
            given["build_schedulers"] = schedulers_hook(self.scheduler, self.scheduler_interval)
        if self.metrics is not None or self.train_metrics is not None:
            given["build_metrics"] = _metrics_hook(self.metrics, self.train_metrics)
        if self.forward is not None:
            given["forward"] = _on_microbatch(self.forward, "forward", tuple(_SOURCES))
        if self.loss is not None:
            given["loss"] = _loss_hook(self.loss)
        if self.num_tokens is not None or self.num_samples is not None:
            given["count_batch"] = _count_hook(self.num_tokens, self.num_samples)
        if self.loss_weight is not None:
            given["weigh_microbatch"] = _on_microbatch(self.loss_weight, "loss_weight", _OF_BATCH)
        if not self.loss_splits:
            given["split_batch"] = _in_one_piece
        plugin = SimpleNamespace(**{name: hookimpl(hook) for name, hook in given.items()})
        if isinstance(loss := self.loss, nn.Module):  # with weights of the classes, say
            built: dict[str, tuple[Tensor, int]] = {}
            plugin.init = hookimpl(lambda state: built.update(_buffers(loss.to(state.device))))
            plugin.state_dict = lambda: _changed(loss, built)
            plugin.load_state_dict = lambda saved, _: loss.load_state_dict(saved, strict=False)
        return plugin


def _buffers(module: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Returns a module's buffers by name, each with how often it was written to."""
    return {name: (one, one._version) for name, one in module.named_buffers()}


def _changed(loss: nn.Module, built: Mapping[str, tuple[Tensor, int]]) -> dict[str, Any]:
    """Returns what is trained of a loss, and the buffers that were replaced or written to."""
    names = {name for name, one in loss.named_parameters() if one.requires_grad}
    for name, (one, version) in _buffers(loss).items():
        then = built.get(name)
        if then is None or one is not then[0] or version != then[1]:
            names.add(name)
    return {name: one for name, one in loss.state_dict().items() if name in names}


def _model_hook(given: nn.Module | Callable[[], nn.Module]) -> Callable[[State], nn.Module]:
    def build_model(state: State) -> nn.Module:
        model = given if isinstance(given, nn.Module) else given()
        if not isinstance(model, nn.Module):
            raise TaskError(
                f"the task's model is {a(type(model).__name__)}, not an nn.Module",
                fix="give Task(model=Net()), or Task(model=Net) to build it after seeding",
            )
        # What a strategy makes without memory it moves itself.
        is_meta = any(one.device.type == "meta" for one in model.parameters())
        return model if is_meta else model.to(state.device)

    return build_model


def _eval_dataloaders_hook(given: Any, for_test: Any) -> Callable[[State], Mapping[str, Any]]:
    def build_eval_dataloaders(state: State) -> Mapping[str, Any]:
        named = _named_loaders(state, given, "eval_dataloaders", "eval")
        tests = _named_loaders(state, for_test, "test_dataloaders", "test")
        if both := named.keys() & tests.keys():
            raise TaskError(
                f"the eval set {min(both)!r} is a test set, too",
                fix="name it otherwise: test_dataloaders={'test': loader}",
            )
        if tests:
            state.test_sets = frozenset(tests)
        return named | tests

    return build_eval_dataloaders


def _named_loaders(state: State, given: Any, what: str, alone: str) -> dict[str, Any]:
    """Returns data loaders by name; a single one gets a default name."""
    if given is None:
        return {}
    loaders = _called(given, state)
    if isinstance(loaders, list | tuple) and any(isinstance(one, DataLoader) for one in loaders):
        raise TaskError(
            f"the task's {what} are {a(type(loaders).__name__)} of {len(loaders)}, without names",
            fix=f"name them: {what}={{'valid': loader, 'test': other}}",
        )
    named = loaders if isinstance(loaders, Mapping) else {alone: loaders}
    return {
        str(name): _iterable(_called(loader, state), f"{what}[{name!r}]")
        for name, loader in named.items()
    }


def _metrics_hook(for_eval: Any, for_training: Any) -> Callable[..., Mapping[str, Any]]:
    def build_metrics(state: State, dataset: str) -> Mapping[str, Any]:
        given = for_training if dataset == "train" else for_eval
        if dataset != "train" and isinstance(given, Mapping):
            given = _of_set(given, dataset.removeprefix("eval/"), state.eval_dataloaders)
        if isinstance(given, Mapping):
            given = given or {"loss": None}
        return {} if given is None else fresh_metrics(given, state)

    return build_metrics


def _of_set(metrics: Mapping[str, Any], name: str, known: Mapping[str, Any]) -> Any:
    """Returns the metrics of an eval set if they are given by set, None without; all of them otherwise."""
    if not any(isinstance(one, Mapping) for one in metrics.values()):
        return metrics
    if wrong := metrics.keys() - known:
        raise TaskError(
            f"the task's metrics name the eval set {min(wrong)!r}{closest(min(wrong), known)}",
            fix=f"give metrics by name, or by name of an eval set: {', '.join(known)}",
        )
    return metrics.get(name)


def _on_microbatch(given: Callable[..., Any], what: str, allowed: Sequence[str]) -> Any:
    call = _by_name(given, what, allowed)

    def hook(state: State) -> Any:
        return call(state, state.batch if state.microbatch is None else state.microbatch)

    return hook


def _loss_hook(given: Callable[[Any, Any], Tensor]) -> Callable[[State], Tensor]:
    call = watched_once(given, "the loss")

    def loss(state: State) -> Tensor:
        nonlocal call
        if (targets := state.targets) is None:
            taken, left = keys_of(state.model, state.batch)
            raise TaskError(
                f"the task's loss takes targets, but a batch of {batches.describe(state.batch)} "
                f"has none" + (f"; forward takes {', '.join(map(repr, taken))}" if taken else ""),
                fix=(f"call {left[-1]!r} 'labels' in the data set or collate_fn, " if left else "")
                + "let the data loader give pairs (inputs, targets) or mappings with 'labels', "
                "implement the action loss, or evaluate without the loss: "
                "Task(metrics={'loss': None})",
            )
        found = call(state.outputs, targets)
        # Another function in a compiled region would be compiled anew.
        if call is not given and state.settings.compile is False:
            call = given
        if found is None:
            raise TaskError(
                "the task's loss returned None",
                function=_described(given),
                fix="return the loss, a tensor of shape ()",
            )
        return found

    return loss


def _count_hook(
    num_tokens: Callable[..., int] | None, num_samples: Callable[..., int] | None
) -> Callable[..., Count]:
    tokens_of = _by_name(num_tokens or (lambda: 0), "num_tokens", _OF_BATCH)
    samples_of = _by_name(num_samples, "num_samples", _OF_BATCH) if num_samples else None

    def count_batch(state: State, batch: Any) -> Count:
        samples = tokens = 0
        for part in microbatches_of(batch):
            if samples_of is None:
                samples += loader_of(state.train_dataloader).num_samples(part)
            else:
                samples += _whole(samples_of(state, part), "num_samples", at_least=1)
            if state.batch is None:  # on the device, reading its tokens could wait
                of_part = tokens_of(state, part)
                tokens += of_part if type(of_part) is int else _whole(of_part, "num_tokens")
        return Count(samples, tokens)

    return count_batch


def _in_one_piece(state: State) -> list[Any]:
    """Returns the batch: `split_batch` of a task whose loss doesn't split."""
    parts = microbatches_of(state.batch)
    asked = state.settings.microbatch_size
    if len(parts) > 1 or asked is not None:
        what = f"microbatch_size is {asked}" if asked else f"the batch has {len(parts)} parts"
        raise TaskError(
            f"{what}, but the task's loss doesn't split: loss_splits=False",
            fix="train on each batch in one piece, or with eventloop-gradcache in microbatches whose "
            "outputs are joined before the loss",
        )
    return [*parts]


def _whole(count: object, what: str, *, at_least: int | None = None) -> int:
    if not isinstance(count, Integral) or isinstance(count, bool):
        raise TaskError(
            f"the task's {what} gave {count!r}, {a(type(count).__name__)}, not an int",
            fix="count on the host: inputs.numel(), len(batch), or int(mask.sum())",
        )
    if at_least is not None and count < at_least:
        raise TaskError(
            f"the task's {what} gave {count}, less than {at_least}",
            fix="let the data loader leave out a batch that counts for nothing",
        )
    return int(count)


def _described(function: Callable[..., Any]) -> str:
    """Describes a function: its name, and where it is defined, if that is known."""
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    return f"{name}, {code.co_filename}:{code.co_firstlineno}" if code else name


_SOURCES: dict[str, Callable[[State, Any], Any]] = {
    "model": lambda state, batch: state.active_model,
    "batch": lambda state, batch: batch,
    "inputs": lambda state, batch: batches.inputs_of(batch),
    "targets": lambda state, batch: batches.targets_of(batch),
    "state": lambda state, batch: state,
}


def _by_name(
    function: Callable[..., Any], what: str, allowed: Sequence[str]
) -> Callable[[State, Any], Any]:
    """Returns what calls it with the values that it names; raises TypeError if one is unknown."""
    sources = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in allowed:
            sources[name] = _SOURCES[name]
        elif parameter.default is parameter.empty:
            raise TypeError(
                f"Task({what}=...) wants {name!r}, which isn't there{closest(name, allowed)}; "
                f"its parameters may be {', '.join(allowed)}"
            )

    def call(state: State, batch: Any) -> Any:
        return function(**{name: source(state, batch) for name, source in sources.items()})

    return call


def _called(given: Any, state: State) -> Any:
    """Calls a factory, with the State if it takes it; a data loader or mapping is not a factory."""
    if not callable(given) or isinstance(given, Iterable):
        return given
    try:
        return given(state) if "state" in inspect.signature(given).parameters else given()
    except ValueError as error:
        if fix := batches.fix_for_no_samples(error):
            raise TaskError(
                "the data set of a data loader is empty", function=_described(given), fix=fix
            ) from error
        raise


def _iterable(loader: Any, what: str) -> Any:
    if not isinstance(loader, Iterable):
        raise TaskError(
            f"the task's {what} is {a(type(loader).__name__)}, which is not iterable",
            fix=f"give Task({what.partition('[')[0]}=DataLoader(...)) or a function that gives one",
        )
    return loader
