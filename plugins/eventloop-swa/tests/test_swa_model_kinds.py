"""Models that a mean of weights is harder for: buffers that grow, modules that can't be copied."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from eventloop import PluginError
from eventloop_swa import Swa
from eventloop_testing import tiny_task

EVAL_BATCHES = [(torch.eye(3), torch.arange(3))]


class Grows(nn.Module):
    """Keeps the means of its batches; how many there are is part of what it computes."""

    def __init__(self, how):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.how = how
        if how == "from nothing":
            self.register_buffer("seen", None)
        elif how == "from a row":
            self.register_buffer("seen", torch.zeros(1, 3))

    def forward(self, inputs):
        if self.training:
            mean = inputs.detach().mean(0, keepdim=True)
            seen = getattr(self, "seen", None)
            if seen is None and self.how == "registered late":
                self.register_buffer("seen", mean)
            else:
                self.seen = mean if seen is None else torch.cat([seen, mean])
        return self.layer(inputs) + self.seen.mean()


@pytest.mark.parametrize("how", ["from nothing", "from a row", "registered late"])
@pytest.mark.parametrize("untils", [["2ep", None], ["4ba", "3ep", None]])
def test_a_model_whose_buffers_grow_is_averaged_and_resumed(untils, how, make_trainer, tmp_path):
    """Evaluation sees the buffers of now; the checkpoint those of the last mean."""

    def losses(folder, *untils):
        for until in untils:
            trainer = make_trainer(
                tiny_task(model=lambda: Grows(how), eval_dataloaders=EVAL_BATCHES),
                algorithms=[Swa(start="1ep")],
                run_dir=tmp_path / folder,
                max_duration="4ep",
            )
            result = trainer.fit(until=until)
            trainer.close()
        return [(row["batch"], row["eval/loss"]) for row in result.history]

    assert losses("resumed", *untils) == losses("whole", None)


def weight_normed():
    return torch.nn.utils.weight_norm(nn.Linear(3, 3))


def with_a_lock():
    model = nn.Linear(3, 3)
    model.lock = threading.Lock()
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    ("make_model", "reason"),
    [(weight_normed, "Only Tensors created explicitly"), (with_a_lock, "cannot pickle")],
)
def test_a_model_that_can_not_be_copied_is_named(make_model, reason, make_trainer):
    """The README promises it before training; it failed with torch's error while the run was opened."""
    with pytest.raises(PluginError, match=f"the model can't be copied: {reason}"):
        make_trainer(tiny_task(model=make_model), algorithms=[Swa()])
