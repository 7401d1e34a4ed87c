"""Weights that aren't finite are found every now and then, and named with the batches since when."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from eventloop.checkpoint.store import Store
from eventloop.errors import NonFiniteError
from eventloop_testing import isolated_trainer, tiny_task
from eventloop_testing.case import tiny_batches


def test_buffers_and_frozen_parameters_may_hold_infinities(tmp_path):
    """A mask of attention does, and is not a fault."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 3)
            self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
            self.frozen = nn.Parameter(torch.tensor([math.inf]), requires_grad=False)

        def forward(self, inputs):
            return self.body(inputs)

    task = tiny_task(model=Masked)
    with isolated_trainer(tmp_path, task, checkpoint_interval="1ba") as trainer:
        trainer.fit()
        trainer.export(tmp_path / "model.safetensors")

    found = Store(tmp_path / "run" / "checkpoints").found(digests=True)
    assert {one.reason for one in found} == {""}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_any_kind_are_looked_at(dtype, tmp_path):
    """In half precision a sum would overflow where no entry does."""

    def train(last: float):
        def make():
            model = nn.Linear(3, 3).to(dtype)
            nn.init.constant_(model.bias, last)
            return model

        batches = [(inputs.to(dtype), targets) for inputs, targets in tiny_batches()]
        task = tiny_task(
            model=make,
            loss=lambda outputs, _: (outputs.nan_to_num(0, 0, 0) * 0).sum(),
            train_dataloader=batches,
            eval_dataloaders=None,
            metrics=None,
        )
        given = {"precision": "fp32", "run_dir": tmp_path / str(last)}
        with isolated_trainer(tmp_path, task, **given) as trainer:
            trainer.fit()

    train(torch.finfo(dtype).max)
    with pytest.raises(NonFiniteError, match="'bias' is the first"):
        train(math.inf)


@pytest.mark.parametrize(
    ("spoilt", "when"),
    [(0, "at batch 0, where this fit began"), (3, "since a batch of 1 to 6")],
)
def test_the_batches_since_when_are_named(spoilt, when, make_trainer, make_task, make_plugin):
    """A look is every hundred batches and at both ends of a fit; what is known is the last one that was good."""

    def spoil(state):
        if state.clock.batch == spoilt:
            with torch.no_grad():
                state.model.bias[0] = math.nan

    task = make_task(loss=lambda outputs, _: (outputs.nan_to_num() * 0).sum())
    plugin = make_plugin(fit_start=spoil) if spoilt == 0 else make_plugin(batch_end=spoil)
    trainer = make_trainer(task, callbacks=[plugin], max_duration="2ep")

    with pytest.raises(NonFiniteError, match=rf"the weights aren't finite {when}\n"):
        trainer.fit()
