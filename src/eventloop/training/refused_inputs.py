"""Inputs that a model refuses: found by trying, outside of the loop."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from eventloop.rng import kept_generators


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
