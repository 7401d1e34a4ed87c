"""The sanity evaluation before training."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from eventloop import TaskError


class Broken(MulticlassAccuracy):
    def compute(self):
        raise RuntimeError("broken metric")


def test_a_broken_metric_shows_before_the_first_step(make_trainer, make_task, make_batches):
    """Not after the first epoch."""
    task = make_task(eval_dataloaders={"test": make_batches(4)}, metrics={"a": Broken(3)})
    trainer = make_trainer(task)

    with pytest.raises(RuntimeError, match="broken metric") as caught:
        trainer.sanity_eval(2)

    assert trainer.state.clock.batch == 0
    assert any("sanity evaluation of 'test'" in note for note in caught.value.__notes__)


def test_a_sanity_evaluation_leaves_no_trace(make_trainer, make_task, make_batches, make_recorder):
    """Numbers of an untrained model belong nowhere, and training goes as without it."""
    weights = []
    for sane in (True, False):
        data = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)),
                             torch.arange(8) % 3)  # fmt: skip
        task = make_task(
            train_dataloader=DataLoader(data, 2, shuffle=True),
            eval_dataloaders=DataLoader(data, 2, shuffle=True),
            metrics={"accuracy": MulticlassAccuracy(3)},
        )
        recorder = make_recorder()
        trainer = make_trainer(task, callbacks=[recorder])
        if sane:
            del recorder.seen[:]
            trainer.sanity_eval()
            assert (recorder.seen, trainer.state.eval_metrics) == ([], {})
            assert not trainer.state.metrics["eval/eval"]["accuracy"].update_called
        trainer.fit()
        weights.append(trainer.state.model.weight)

    assert torch.equal(*weights)


def test_a_sanity_evaluation_needs_eval_data(make_trainer):
    """It would say that all is well."""
    with pytest.raises(TaskError, match="no eval data loader"):
        make_trainer().sanity_eval()
    with pytest.raises(ValueError, match="evaluates nothing"):
        make_trainer().sanity_eval(0)
