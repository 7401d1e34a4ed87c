"""Loading: an exception of code that is given a saved state names the part of the checkpoint."""

from __future__ import annotations

import pytest
import torch

from eventloop import CheckpointError
from eventloop.checkpoint.loading import loading
from eventloop.errors import TaskError


@pytest.mark.parametrize(
    "error", [KeyError("x"), TypeError("x"), ValueError("x"), ZeroDivisionError("x")]
)
def test_the_part_and_its_owner_are_named(error):
    """Whoever reads it looks for the key in the checkpoint, and for the plugin."""
    with pytest.raises(CheckpointError) as caught, loading("plugins.ema", by="ema 0.1"):
        raise error

    assert "'plugins.ema' of the checkpoint can't be loaded" in str(caught.value)
    assert type(error).__name__ in str(caught.value)
    assert caught.value.facts["by"] == "ema 0.1"


@pytest.mark.parametrize(
    "error", [TaskError("x"), torch.OutOfMemoryError("x"), KeyboardInterrupt()]
)
def test_errors_that_say_more_stay_as_they_are(error):
    """An error of the task, a lack of memory and Ctrl-C aren't faults of the checkpoint."""
    with pytest.raises(type(error)) as caught, loading("training.clock"):
        raise error

    assert caught.value is error
