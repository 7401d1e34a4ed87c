"""Inputs that a model or a loss failed on: noted on the exception of a pass, or tried outside of the loop."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from eventloop.data.batches import shapes
from eventloop.errors import EventloopError, Note, notes_of
from eventloop.rng import kept_generators
from eventloop.training.evaluation import in_eval_mode

if TYPE_CHECKING:
    from eventloop.state import State

# The actions whose owners are given a batch, or the outputs for one.
INPUT_ACTIONS = ("forward", "eval_forward", "predict_forward", "loss")


def note_input(error: BaseException, what: str, state: State) -> None:
    """Notes on an exception what a pass was given, at which batch; once, on what isn't our own.

    Args:
        what: forward, loss, or a metric.
    """
    is_own = isinstance(error, EventloopError) or not isinstance(error, Exception)
    if is_own or notes_of(error, "given"):
        return
    inputs = f"outputs {shapes(state.outputs)}, targets {shapes(state.targets)}"
    if what.endswith("forward"):
        batch = state.batch if state.microbatch is None else state.microbatch
        inputs = f"a batch of {shapes(batch)}"
    fix = _fix_for_outputs(error, state.outputs) if what == "loss" else ""
    error.add_note(Note(f"{what} was given {inputs}; {_moment(state)}{fix}", "given"))


def _fix_for_outputs(error: BaseException, outputs: object) -> str:
    """Returns how to give a loss a tensor, where it refused several values of a model; "" otherwise."""
    if type(outputs).__name__ not in str(
        error
    ):  # a loss may take several, and fail on something else
        return ""
    if isinstance(outputs, tuple | list) and outputs and isinstance(outputs[0], Tensor):
        line = "model(inputs)[0]"
        reason = "the model returns several values"
    elif isinstance(outputs, Mapping) and outputs:
        key = "logits" if "logits" in outputs else next(iter(outputs))
        line = f"model(inputs)[{key!r}]"
        reason = "the model returns a mapping"
    else:
        return ""
    return f"\n  fix  {reason}: give the loss its input, Task(forward=lambda model, inputs: {line})"


def _moment(state: State) -> str:
    if state.eval_name is not None:
        return f"batch {state.eval_batch_idx + 1} of the eval set {state.eval_name!r}"
    if state.microbatch is None:
        return "in a prediction"
    part = f", microbatch {state.microbatch_idx + 1} of {state.num_microbatches}"
    several = part if state.num_microbatches > 1 else ""
    return f"epoch {state.clock.epoch + 1}, batch {state.clock.batch + 1}{several}"


def refusal(model: nn.Module, smaller: Any, whole: Any) -> Exception | None:
    """Calls a model with smaller inputs, then with whole ones; returns what it raises, or None.

    Returns None, too, if the model can't be called with whole inputs alone, as it may need other
    arguments from the task.

    The model runs in evaluation mode and without gradients. Afterwards every module has its former
    mode, lazy modules are lazy, and the global RNG states are unchanged. Waits for the device; call
    it before training, for example in `unsuitable`.

    Args:
        smaller, whole: inputs, passed as the only argument; a mapping as keyword arguments. In
            training, too, whole ones come later: lazy modules are initialised by the first inputs.
    """
    refused = _raised(model, smaller, whole)
    if refused is None or _raised(model, whole) is not None:
        return None
    return refused


def _raised(model: nn.Module, *calls: Any) -> Exception | None:
    try:
        if any(map(is_lazy, itertools.chain(model.parameters(), model.buffers()))):
            model = copy.deepcopy(model)
        with in_eval_mode(model), torch.no_grad(), kept_generators():
            for inputs in calls:
                model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    except Exception as error:  # noqa: BLE001  what it is, the caller asks
        return error
    return None
