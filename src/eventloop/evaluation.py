"""What evaluation and prediction have in common: they leave no trace in the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from eventloop.errors import TaskError
from eventloop.seeding import kept_generators
from eventloop.state import State


@contextmanager
def evaluation_mode(state: State) -> Iterator[None]:
    """Puts the model into evaluation mode, without gradients.

    Afterwards every module is in the mode in which it was, each by itself (a frozen batch norm
    stays frozen), the global random generators stand where they stood, and the State holds no
    batch, also after an exception.
    """
    training = [module for module in state.wrapped_model.modules() if module.training]
    state.microbatch = None  # a fit that failed may have left one
    state.wrapped_model.eval()
    try:
        with torch.no_grad(), kept_generators():
            yield
    finally:
        for module in training:
            module.training = True
        state.batch = state.outputs = state.eval_name = None


def batches_of(dataloader: Any, what: str) -> Iterator[Any]:
    """Gives a data loader's batches.

    Raises:
        TaskError: there is none.
    """
    batch = None
    for batch in dataloader:
        yield batch
    if batch is None:
        raise TaskError(
            f"the {what} gave no batch",
            fix="give it data; drop_last=True drops a set that is smaller than a batch, and a "
            "generator is used up after one turn",
        )
