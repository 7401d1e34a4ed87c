"""Inputs on which a model or a loss fails: notes on exceptions, and trial calls outside the loop."""

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

# The actions whose implementations use a batch or the outputs for a batch.
INPUT_ACTIONS = ("forward", "eval_forward", "predict_forward", "loss")


def note_input(error: BaseException, subject: str, state: State) -> None:
    """Adds a note to an exception with the shapes that a function received, and the batch.

    An exception gets at most one such note; eventloop's errors get none, as they name their cause.

    Args:
        subject: "forward", "loss", or the name of a metric.
    """
    has_cause = isinstance(error, EventloopError) or not isinstance(error, Exception)
    if has_cause or notes_of(error, "given"):
        return
    inputs = f"outputs {shapes(state.outputs)}, targets {shapes(state.targets)}"
    if subject.endswith("forward"):
        batch = state.batch if state.microbatch is None else state.microbatch
        inputs = f"a batch of {shapes(batch)}"
    fix = _fix_for_outputs(error, state.outputs) if subject == "loss" else ""
    error.add_note(Note(f"{subject} was given {inputs}; {_moment(state)}{fix}", "given"))


def _fix_for_outputs(error: BaseException, outputs: object) -> str:
    """Returns a fix if a loss failed because the model returned several values; "" otherwise."""
    # A loss may accept several values and fail for another reason; then the message doesn't name
    # their type.
    if type(outputs).__name__ not in str(error):
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
    return f"\n  fix  {reason}: select the input of the loss, Task(forward=lambda model, inputs: {line})"


def _moment(state: State) -> str:
    if state.eval_name is not None:
        return f"batch {state.eval_batch_idx + 1} of the eval set {state.eval_name!r}"
    if state.microbatch is None:
        return "in a prediction"
    moment = f"epoch {state.clock.epoch + 1}, batch {state.clock.batch + 1}"
    if state.num_microbatches > 1:
        moment += f", microbatch {state.microbatch_idx + 1} of {state.num_microbatches}"
    return moment


def refusal(model: nn.Module, smaller: Any, whole: Any) -> Exception | None:
    """Calls a model with smaller inputs, then with whole inputs; returns the exception, or None.

    Also returns None if a call with only the whole inputs raises, since the model may then need other
    arguments that the task passes.

    The model runs in evaluation mode and without gradients. Afterwards every module has its previous
    mode, lazy modules are still lazy, and the global RNG states are unchanged. Waits for the device;
    call it before training, for example in `unsuitable`.

    Args:
        smaller, whole: inputs, passed as the only argument; a mapping is passed as keyword arguments.
            The whole inputs come second, as in training: the first inputs initialize lazy modules.
    """
    error = _exception_of_calls(model, smaller, whole)
    if error is None or _exception_of_calls(model, whole) is not None:
        return None
    return error


def _exception_of_calls(model: nn.Module, *calls: Any) -> Exception | None:
    try:
        # The first call of a lazy model creates its parameters for good, so call a copy.
        if any(map(is_lazy, itertools.chain(model.parameters(), model.buffers()))):
            model = copy.deepcopy(model)
        with in_eval_mode(model), torch.no_grad(), kept_generators():
            for inputs in calls:
                model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    except Exception as error:  # noqa: BLE001  the caller inspects the exception
        return error
    return None
