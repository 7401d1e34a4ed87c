"""Whole runs on the pretend accelerator: killed, out of memory, checkpoints that are copied late."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eventloop_testing import (
    Dies,
    KilledRuns,
    counted_waits,
    isolated_trainer,
    last_checkpoint,
    pretend_device,
    shuffled_batches,
)
from eventloop_testing import tiny_task as make_tiny_task


def with_dropout():
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def fit(folder, batch=None, precision="fp32"):
    """Trains 10 batches of a model with dropout, saving every second one; may die."""
    task = make_tiny_task(model=with_dropout, train_dataloader=shuffled_batches())
    given = {"device": "pretend", "precision": precision, "checkpoint_interval": "2ba"}
    dies = [Dies(batch)]
    with isolated_trainer(folder, task, algorithms=dies, max_duration="2ep", **given) as trainer:
        trainer.fit()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_killed_and_resumed_a_run_ends_with_the_same_bits(precision, tmp_path, pretend_device):
    """The device's random numbers go on where the checkpoint was."""
    runs = KilledRuns(fit, tmp_path / "one-go", precision)

    assert runs.differing(tmp_path, 3, 7) == []


def test_a_forgotten_generator_would_be_found(tmp_path, pretend_device):
    """Control: what dropout draws is in the checkpoint, and nowhere else."""
    runs = KilledRuns(fit, tmp_path / "one-go")

    def forget(parts):
        state = parts["rank0"]["generators"]["device"]
        state.copy_(torch.Generator().manual_seed(99).get_state())

    assert runs.differing(tmp_path, 3, forget=forget)


def test_a_checkpoint_has_what_was_there_when_it_was_due(make_trainer, tmp_path, pretend_device):
    """Its copies are under way while training goes on; read too early they are NaN."""
    fit(tmp_path)
    saved = last_checkpoint(tmp_path)

    trainer = make_trainer(
        make_tiny_task(model=with_dropout, train_dataloader=shuffled_batches()),
        device="pretend", precision="fp32", max_duration=f"{saved.batch}ba",
    )  # fmt: skip
    trainer.fit()

    weights = {name: one.cpu() for name, one in trainer.state.model.state_dict().items()}
    torch.testing.assert_close(dict(saved.parts["model"]), weights, rtol=0, atol=0)


@pytest.mark.nightly
def test_microbatches_are_as_large_as_memory_allows(make_trainer):
    """Auto microbatches shrink at the device's own error, and train as one batch does."""
    width = 64
    task = make_tiny_task(
        model=lambda: nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 3)),
        train_dataloader=shuffled_batches(num_batches=512, batch_size=1024),
        eval_dataloaders=None,
        metrics={},
    )
    given = {"microbatch_size": "auto", "precision": "fp32"}
    limit = 200_000

    with pretend_device(limit_bytes=limit):
        torch.accelerator.reset_peak_memory_stats()
        torch.accelerator.reset_accumulated_memory_stats()
        trainer = make_trainer(task, device="pretend", **given)
        with pytest.warns(UserWarning, match="out of memory with microbatches of 1,024 samples"):
            trainer.fit()
        peak = torch.accelerator.max_memory_allocated()
        failed = torch.accelerator.memory_stats()["num_ooms"]

    assert trainer.state.clock.batch == 2
    assert failed > 0
    assert peak <= limit


def test_a_loop_waits_between_steps_alone(make_trainer, pretend_device):
    """The numbers of a step come to the host a few steps later; the copies are asynchronous."""
    trainer = make_trainer(
        make_tiny_task(train_dataloader=shuffled_batches(40), metrics={}, eval_dataloaders=None),
        device="pretend", precision="fp32", log_interval="5ba",
    )  # fmt: skip

    with counted_waits() as waits:
        trainer.fit()

    # As many as there are rows of numbers: an event is never over when it is asked once.
    assert len(waits) <= 8
    assert {one.plugin for one in waits} == {"eventloop"}
