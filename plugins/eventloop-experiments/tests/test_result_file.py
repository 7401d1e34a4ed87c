"""What a run costs, as a callback measures it."""

from __future__ import annotations

import pytest
import torch

from eventloop_experiments.runs.result_file import Cost, peak_memory_bytes
from eventloop_testing import tiny_batches, tiny_task


@pytest.mark.parametrize(
    ("given", "num_steps"),
    [
        ({"max_duration": "2ep"}, 4),
        ({"max_duration": "6ba", "eval_interval": "1ba"}, 0),
        ({"max_duration": "1ba"}, 0),
    ],
)
def test_steps_are_timed_but_not_evaluations(given, num_steps, make_trainer):
    """Three batches an epoch are two steps from one to the next; what lies between is not a step."""
    cost = Cost()
    task = tiny_task(eval_dataloaders={"test": tiny_batches(1)})

    make_trainer(task, callbacks=[cost], **given).fit()

    assert len(cost.steps_s) == num_steps
    assert (cost.step_s is None) == (num_steps == 0)
    assert all(step > 0 for step in cost.steps_s)


def test_what_was_held_once_counts():
    """A run is killed for its peak, not for what it has at the end."""
    held = torch.ones(100_000_000)
    size, device = held.nbytes, held.device
    del held

    assert peak_memory_bytes(device) > size + 100_000_000  # Python and torch have that at least
