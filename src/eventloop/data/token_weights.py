"""Weights of microbatches whose loss is a mean over tokens.

A model that computes its own loss from integer labels of shape (N, T, ...) returns the mean over the
labels other than -100, of which microbatches and ranks have different numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from eventloop.data.batches import LABELS
from eventloop.errors import TaskError

if TYPE_CHECKING:
    from eventloop.state import State

_IGNORED = -100  # by cross_entropy, unless it is given another number
# Losses of transformers that are means over tokens: of the next ones (None is its default), of all.
_OVER_NEXT = (None, "ForCausalLM", "ForConditionalGeneration")
_OVER_ALL = ("ForMaskedLM", "ForTokenClassification")


def may_weigh_tokens(state: State) -> bool:
    """Whether the core weighs losses that may be means over tokens: the model's own, of labels."""
    owners = {state.owner("loss"), state.owner("weigh_microbatch")}
    if owners != {"core"} or not may_take(state.model, LABELS):
        return False
    return _loss_type(state.model) in (*_OVER_NEXT, *_OVER_ALL, "")


def may_take(model: nn.Module, keyword: str) -> bool:
    """Whether a model's `forward` has a parameter of this name, as far as is known; compiled or not."""
    try:
        parameters = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
    except ValueError:  # written in C
        return True
    return keyword in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def keeps_cache(model: nn.Module) -> bool:
    """Whether a model of transformers keeps keys and values unless `use_cache` is False.

    With them it doesn't see that documents are packed in a row (transformers 5.23).
    """
    if hasattr(model := getattr(model, "_orig_mod", model), "get_base_model"):  # of peft
        model = cast("Any", model).get_base_model()
    return _loss_type(model) != "" and "use_cache" in inspect.signature(model.forward).parameters


def num_tokens(state: State) -> Tensor | None:
    """Returns over how many labels the loss is a mean, shape (); None if the labels aren't tokens.

    Raises:
        TaskError: it isn't known, since the model may leave out each sample's first label.
    """
    batch = state.batch if state.microbatch is None else state.microbatch
    labels = batch.get(LABELS) if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.ndim < 2 or labels.is_floating_point():
        return None
    loss_type = _loss_type(state.model)
    is_counted: Tensor = batch.get("shift_labels", labels) != _IGNORED
    is_known = loss_type != "" or state.eval_name is not None  # no error after hours of training
    if not is_known and is_counted[:, 0].any() and not is_counted.all():
        raise TaskError(
            "it isn't known which labels the model's loss averages over: maybe not each sample's first",
            model=type(state.model).__name__,
            fix="give Task(loss_weight=lambda batch: (batch['labels'] != -100).sum()), with "
            "batch['labels'][:, 1:] if the model compares an output with the next label",
        )
    config: Any = getattr(state.model, "config", None)
    if loss_type in _OVER_NEXT and "shift_labels" not in batch and not config.is_encoder_decoder:
        is_counted = is_counted[:, 1:]
    return is_counted.sum()


def _loss_type(model: nn.Module) -> str | None:
    """Returns the name that transformers gives the loss of a model of its own; "" for other models."""
    is_own = hasattr(model, "loss_function") and hasattr(model, "config")
    return getattr(model, "loss_type", None) if is_own else ""
