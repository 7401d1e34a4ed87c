"""Helpers of evaluation and prediction, and of modes of modules; the loops are in `loop.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from eventloop.data.combined import FirstBatches
from eventloop.data.loaders import loader_of
from eventloop.data.map_style import iterate
from eventloop.data.microbatches import microbatches_of
from eventloop.data.too_few_batches import too_few
from eventloop.errors import TaskError, counted, first_of
from eventloop.rng import kept_generators
from eventloop.training.metrics import compute
from eventloop.training.out_of_memory import note_in_evaluation

if TYPE_CHECKING:
    from torchmetrics import Metric

    from eventloop.clock import Time
    from eventloop.plugin.plans import Plans
    from eventloop.state import State


# Copies of data loaders with persistent workers, by the task's loader. With a new copy for every
# evaluation, all the workers would be started again.
_copies: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


@contextmanager
def evaluation_mode(state: State, *, logs: bool = False) -> Iterator[None]:
    """Puts the model into evaluation mode and disables gradients, within the block.

    Afterwards, also after an exception, every module has its previous mode (a frozen batch norm stays
    frozen), the global random generators have their previous states, and the State has no batch.

    Args:
        logs: whether numbers that are logged within the block count; otherwise they are discarded.
    """
    state.microbatch = None  # a fit that raised may have left a microbatch
    was_logging = state.is_logging
    state.is_logging = logs
    try:
        with in_eval_mode(state.wrapped_model), torch.no_grad(), kept_generators():
            yield
    except BaseException as error:
        note_in_evaluation(error, state)
        raise
    finally:
        state.batch = state.outputs = state.eval_name = None
        state.is_logging = was_logging


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode; afterwards every module has its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            if training and type(module).train is not nn.Module.train:
                # An override may do more than set the flag: LoRA merges its update into the weights in
                # `eval`, and takes it out again in `train`.
                module.train()
        for module, training in modes:
            module.training = training


class TrainingMode:
    """Puts a model into training mode at each fit, except for modules that stay in evaluation mode.

    A submodule in evaluation mode in a model in training mode was put there on purpose, for example a
    frozen batch norm. A model that is in evaluation mode itself, as pretrained models are after
    loading, is put into training mode as a whole.
    """

    def __init__(self) -> None:
        self._modules_in_eval: list[nn.Module] = []

    def enter(self, state: State) -> None:
        """Puts the model into training mode, also if the caller used `model.eval()` between fits."""
        if not state.model.training:
            state.wrapped_model.train()
            for module in self._modules_in_eval:
                module.eval()
        self.remember(state)

    def remember(self, state: State) -> None:
        """Remembers which modules are in evaluation mode, for the next fit."""
        self._modules_in_eval = [module for module in state.model.modules() if not module.training]


def evaluation_mode_note(model: nn.Module) -> str:
    """Returns a line about modules that stay in evaluation mode during training; "" if there are none.

    Names only the outermost modules. Returns "" for a model that is in evaluation mode itself, since a
    fit puts it into training mode as a whole.
    """
    if not model.training:
        return ""
    evaluating = [name for name, module in model.named_modules() if not module.training]
    if not evaluating:
        return ""
    outermost: list[str] = []
    for name in evaluating:  # `named_modules` yields a module before its submodules
        if not outermost or not name.startswith(f"{outermost[-1]}."):
            outermost.append(name)
    verb = "stays" if len(evaluating) == 1 else "stay"
    return (
        f"{counted(len(evaluating), 'module')} {verb} in evaluation mode: {first_of(outermost)}; to train with "
        "dropout and the batch statistics of batch norms, call .train() on the model when it is created"
    )


def is_due(interval: Time | None, state: State) -> bool:
    """Returns whether an evaluation is due: at each interval, and at the end of the fit."""
    clock = state.clock
    return interval is not None and (clock.crossed(interval) or clock.reached(state.until))


def batches_of(dataloader: Any, description: str) -> Iterator[Any]:
    """Yields the batches of a data loader; for `Microbatches`, each of the parts.

    Args:
        description: the data loader's name in messages: "eval data loader 'test'".

    Raises:
        TaskError: the data loader yields no batch, or fewer than its length says.
    """
    num_batches = 0
    batches = iterate(_loader_to_read(dataloader))
    while True:
        try:
            batch = next(batches)
        except StopIteration as error:
            length = loader_of(dataloader).num_batches or 0
            if num_batches < length:
                raise too_few(description, num_batches, length) from error
            break
        except Exception as error:
            error.add_note(f"raised by the {description}, at its batch {num_batches + 1}")
            raise
        num_batches += 1
        yield from microbatches_of(batch)
    if not num_batches:
        raise TaskError(
            f"the {description} yielded no batch",
            fix="provide data; drop_last=True drops a data set that is smaller than a batch, and a "
            "generator is exhausted after one pass",
        )


def _loader_to_read(dataloader: Any) -> Any:
    """Returns the loader to iterate: always the same copy of a loader with persistent workers."""
    copy = _copies.get(dataloader) if isinstance(dataloader, DataLoader) else None
    if copy is None:
        copy = loader_of(dataloader).for_evaluation()
        if copy is not dataloader and dataloader.persistent_workers:
            _copies[dataloader] = copy
    return copy


def results_of(metrics: Mapping[str, Metric], logged: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the results of an eval set: its metrics, and numbers logged under other names."""
    results = compute(metrics)
    return results | {name: value for name, value in logged.items() if name not in results}


def try_evaluation(
    hooks: Plans, state: State, move: Callable[[Any], Any], num_batches: int
) -> None:
    """Evaluates a few batches of each eval data loader, with fresh metrics and without events.

    Args:
        move: copies a batch to the device.
        num_batches: the maximum number of batches of each data loader.
    """
    with evaluation_mode(state):
        for name, dataloader in state.eval_dataloaders.items():
            state.eval_name = name
            metrics = hooks.build_metrics(state, f"eval/{name}")
            batches = hooks.eval_batches(state, FirstBatches(dataloader, num_batches))
            try:
                loaded = batches_of(batches, f"eval data loader {name!r}")
                for state.eval_batch_idx, batch in enumerate(loaded):
                    state.batch = move(batch)
                    state.outputs = hooks.eval_forward(state)
                    hooks.update_metrics(state, metrics)
                compute(metrics)
            except Exception as error:
                error.add_note(
                    f"in the sanity evaluation of {name!r}, "
                    f"{counted(num_batches, 'batch', 'batches')} before training"
                )
                raise
