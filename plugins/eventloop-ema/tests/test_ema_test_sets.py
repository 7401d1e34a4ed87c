"""A test set is evaluated with the averages of the best moment."""

import torch

from eventloop import Task, Trainer
from eventloop_ema import Ema


def batches():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 4, 3, generator=generator)
    return [(batch, batch.argmax(1)) for batch in inputs]


def test_averages_are_those_of_the_best_moment_and_go_on_from_the_last(tmp_path):
    """The highest loss is wanted here, which is that of the first evaluation."""
    task = Task(
        model=lambda: torch.nn.Linear(3, 3),
        loss=torch.nn.functional.cross_entropy,
        train_dataloader=batches(),
        eval_dataloaders={"valid": batches()},
        test_dataloaders=batches(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    given = {"checkpoint_best": "max valid/loss", "max_duration": "3ep", "autoload": False}

    with Trainer(
        task, algorithms=[Ema(half_life="2ba")], device="cpu", run_dir=tmp_path / "run", **given
    ) as trainer:
        result = trainer.fit()
        afterwards = trainer.eval()["valid"]["loss"].item()

    assert result.metrics["test"]["loss"].item() == result.history[0]["valid/loss"]
    assert afterwards == result.metrics["valid"]["loss"].item() < result.history[0]["valid/loss"]
