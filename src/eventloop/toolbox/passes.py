"""Passes over a model outside of the loop's own; a trial finds out whether it takes what it is handed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from eventloop.rng import kept_generators
from eventloop.training.evaluation import evaluation_mode
from eventloop.training.metrics import predictions
from eventloop.training.optimizers import wants_closure

__all__ = ["evaluation_mode", "kept_generators", "predictions", "refusal", "wants_closure"]


def refusal(model: nn.Module, smaller: Any, whole: Any) -> Exception | None:
    """Hands smaller inputs to a model, then whole ones; returns what it raises, or None.

    None, too, where it doesn't take whole ones by themselves: it wants other arguments, with which
    the task calls it, and nothing is found out.

    Runs it in evaluation mode and without gradients. Nothing is left of it: every module is in the
    mode in which it was, lazy ones are lazy, and the global random generators stand where they stood.
    It waits for the device; ask before training, in `unsuitable` say.

    Args:
        smaller, whole: inputs, passed alone; of a mapping, each under its name. Whole ones come
            second, as in training: lazy modules take their shapes from the first that they see.
    """
    refused = _raised(model, smaller, whole)
    if refused is None or _raised(model, whole) is not None:
        return None
    return refused


def _raised(model: nn.Module, *calls: Any) -> Exception | None:
    training = [module for module in model.modules() if module.training]
    try:
        if any(map(is_lazy, itertools.chain(model.parameters(), model.buffers()))):
            model = copy.deepcopy(model)
        model.eval()
        with torch.no_grad(), kept_generators():
            for inputs in calls:
                model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    except Exception as error:  # noqa: BLE001  what it is, the caller asks
        return error
    finally:
        for module in training:
            module.training = True
    return None
