"""Weights of microbatches whose loss is a mean over tokens.

A model that computes its own loss from integer labels of shape (N, T, ...) returns the mean over all
labels other than -100. Microbatches and ranks have different numbers of such labels.
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

_IGNORED = -100  # the default `ignore_index` of cross_entropy
# Losses of transformers that are means over tokens. Models with the first kind shift the labels by
# one position, so each sample's first label isn't counted (None is their default).
_OVER_NEXT = (None, "ForCausalLM", "ForConditionalGeneration")
_OVER_ALL = ("ForMaskedLM", "ForTokenClassification")


def may_weigh_tokens(state: State) -> bool:
    """Returns whether the core weighs the loss, and the model may compute it as a mean over tokens."""
    owners = {state.owner("loss"), state.owner("weigh_microbatch")}
    if owners != {"core"} or not may_take(state.model, LABELS):
        return False
    return _loss_type(state.model) in (*_OVER_NEXT, *_OVER_ALL, "")


def may_take(model: nn.Module, keyword: str) -> bool:
    """Returns whether a model's `forward`, compiled or not, may accept an argument of this name."""
    try:
        parameters = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
    except ValueError:  # written in C
        return True
    return keyword in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def keeps_cache(model: nn.Module) -> bool:
    """Returns whether a transformers model keeps keys and values unless `use_cache` is False.

    With a cache it doesn't notice that documents are packed in a row (transformers 5.23).
    """
    if hasattr(model := getattr(model, "_orig_mod", model), "get_base_model"):  # of peft
        model = cast("Any", model).get_base_model()
    return _loss_type(model) != "" and "use_cache" in inspect.signature(model.forward).parameters


def num_tokens(state: State) -> Tensor | None:
    """Returns the number of labels that the loss averages over, shape (); None if they aren't tokens.

    Raises:
        TaskError: the number isn't known, because the model may leave out each sample's first label.
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
            "the labels that the model's loss averages over aren't known: it may leave out each "
            "sample's first label",
            model=type(state.model).__name__,
            fix="set Task(loss_weight=lambda batch: (batch['labels'] != -100).sum()), with "
            "batch['labels'][:, 1:] if the model compares an output with the next label",
        )
    config: Any = getattr(state.model, "config", None)
    if loss_type in _OVER_NEXT and "shift_labels" not in batch and not config.is_encoder_decoder:
        is_counted = is_counted[:, 1:]
    return is_counted.sum()


def _loss_type(model: nn.Module) -> str | None:
    """Returns the loss type of a transformers model; "" for other models."""
    is_own = hasattr(model, "loss_function") and hasattr(model, "config")
    return getattr(model, "loss_type", None) if is_own else ""
