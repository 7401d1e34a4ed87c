"""Evaluation and prediction, and the modes of modules; the loops are `Loop.evaluate` and `Loop.predict`."""

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


# By the loader that was given: another copy would start its workers, which stay, once more.
_copies: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


@contextmanager
def evaluation_mode(state: State, *, logs: bool = False) -> Iterator[None]:
    """Puts the model into evaluation mode, without gradients.

    What is logged inside of it is dropped, unless `logs`. Afterwards, also after an exception, every
    module is in the mode in which it was (a frozen batch norm stays frozen), the global random
    generators have their earlier state, and the State holds no batch.
    """
    state.microbatch = None  # a fit that failed may have left one
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
    """Puts a model into evaluation mode; afterwards every module is in the mode in which it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            if training and type(module).train is not nn.Module.train:
                module.train()  # may undo what `eval` did: LoRA takes its update out of the weights
        for module, training in modes:
            module.training = training


class TrainingMode:
    """Puts a model into training mode at each fit, except for what was left in evaluation mode.

    A module in evaluation mode below a model in training mode is so on purpose, a frozen batch norm
    for example. A model that is in evaluation mode itself, as pretrained ones are when loaded, is put
    into training mode as a whole.
    """

    def __init__(self) -> None:
        self._modules_in_eval: list[nn.Module] = []

    def enter(self, state: State) -> None:
        """Puts the model into training mode; also after a caller has evaluated it between fits."""
        if not state.model.training:
            state.wrapped_model.train()
            for module in self._modules_in_eval:
                module.eval()
        self.remember(state)

    def remember(self, state: State) -> None:
        """Remembers which modules are in evaluation mode, for the next fit."""
        self._modules_in_eval = [module for module in state.model.modules() if not module.training]


def evaluation_mode_note(model: nn.Module) -> str:
    """Returns a line about modules that stay in evaluation mode while the model trains; "" for none.

    Only the outermost ones are named. A model that is in evaluation mode itself has none: a fit puts
    it into training mode as a whole.
    """
    if not model.training:
        return ""
    evaluating = [name for name, module in model.named_modules() if not module.training]
    if not evaluating:
        return ""
    outermost: list[str] = []
    for name in evaluating:  # a module comes before those below it
        if not outermost or not name.startswith(f"{outermost[-1]}."):
            outermost.append(name)
    verb = "stays" if len(evaluating) == 1 else "stay"
    return (
        f"{counted(len(evaluating), 'module')} {verb} in evaluation mode: {first_of(outermost)}; to train with "
        "dropout and the batch statistics of batch norms, call .train() on the model when it is made"
    )


def is_due(interval: Time | None, state: State) -> bool:
    """Returns whether to evaluate now: at each interval, and at the end of the fit."""
    clock = state.clock
    return interval is not None and (clock.crossed(interval) or clock.reached(state.until))


def batches_of(dataloader: Any, what: str) -> Iterator[Any]:
    """Yields a data loader's batches, of `Microbatches` each part.

    Raises:
        TaskError: there is none, or fewer than its length.
    """
    num_batches = 0
    batches = iterate(_read_from(dataloader))
    while True:
        try:
            batch = next(batches)
        except StopIteration as error:
            length = loader_of(dataloader).num_batches or 0
            if num_batches < length:
                raise too_few(what, num_batches, length) from error
            break
        except Exception as error:
            error.add_note(f"raised by the {what}, at its batch {num_batches + 1}")
            raise
        num_batches += 1
        yield from microbatches_of(batch)
    if not num_batches:
        raise TaskError(
            f"the {what} yielded no batch",
            fix="give it data; drop_last=True drops a set that is smaller than a batch, and a "
            "generator is used up after one pass",
        )


def _read_from(dataloader: Any) -> Any:
    """Returns what to take batches from; of a loader whose workers stay always the same."""
    copy = _copies.get(dataloader) if isinstance(dataloader, DataLoader) else None
    if copy is None:
        copy = loader_of(dataloader).for_evaluation()
        if copy is not dataloader and dataloader.persistent_workers:
            _copies[dataloader] = copy
    return copy


def results_of(metrics: Mapping[str, Metric], logged: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the results of an eval set: of its metrics, and of what was logged by other names."""
    results = compute(metrics)
    return results | {name: value for name, value in logged.items() if name not in results}


def try_evaluation(
    hooks: Plans, state: State, move: Callable[[Any], Any], num_batches: int
) -> None:
    """Evaluates a few batches of each eval data loader with its own metrics; fires no event.

    Args:
        move: copies a batch to the device.
        num_batches: of each data loader, at most.
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
