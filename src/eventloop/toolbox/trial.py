"""A trial: whether a model takes what a plugin wants to hand to it, found before the first batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from eventloop.seeding import kept_generators


def refusal(model: nn.Module, *args: Any, **kwargs: Any) -> Exception | None:
    """Runs a model once, in evaluation mode and without gradients; gives what it raises, or None.

    Nothing is left of it: every module is in the mode in which it was, and the global random
    generators stand where they stood. It waits for the device; ask before training, in
    `unsuitable` say.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), kept_generators():
            model(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  what it is, the caller asks
        return error
    finally:
        for module in training:
            module.training = True
    return None
