"""A loss that microbatches change is named at the first batch."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, mse_loss

BATCHES = [
    (torch.randn(8, 3, generator=torch.Generator().manual_seed(idx)), torch.arange(8) % 3)
    for idx in range(3)
]


def contrastive(outputs, _targets):
    """Each row is to be nearest to itself, among the rows of its batch."""
    logits = outputs @ outputs.T
    return cross_entropy(logits, torch.arange(len(outputs), device=outputs.device))


def total(outputs, targets):
    return cross_entropy(outputs, targets, reduction="sum")


def noisy(outputs, targets):
    return cross_entropy(dropout(outputs, 0.5), targets)


def told(make_trainer, make_task, loss, **given):
    settings = {"microbatch_size": 4, **given.pop("settings", {})}
    task = make_task(loss=loss, train_dataloader=given.pop("batches", BATCHES), **given)
    trainer = make_trainer(task, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit()
    return [str(one.message) for one in caught if "train something else" in str(one.message)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("loss", [contrastive, total])
def test_a_loss_that_is_no_mean_over_the_parts_is_named(loss, size, make_trainer, make_task):
    """It would train to other weights, with nothing to be seen but a smaller loss."""
    (message,) = told(make_trainer, make_task, loss, settings={"microbatch_size": size})

    assert "Task(loss_splits=False)" in message
    assert "eventloop-gradcache" in message
    assert "eventloop check-loss" in message


@pytest.mark.parametrize("loss", [cross_entropy, noisy])
def test_a_mean_and_what_can_not_be_compared_are_left_alone(loss, make_trainer, make_task):
    """A false alarm would teach people to ignore the true one."""
    assert told(make_trainer, make_task, loss) == []


def test_a_batch_in_one_piece_is_not_looked_at(make_trainer, make_task):
    """Nothing is split, so nothing can differ."""
    num_calls = []

    def counting(outputs, targets):
        num_calls.append(len(outputs))
        return contrastive(outputs, targets)

    assert told(make_trainer, make_task, counting, settings={"microbatch_size": None}) == []
    assert num_calls == [8, 8, 8]


def test_a_loss_weighted_by_tokens_is_compared_by_tokens(make_trainer, make_task):
    """The halves of a padded batch weigh what the run weighs them by."""
    inputs = 10 * torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([1, -100, 1, 2, -100, -100, -100, 0])

    def weight(targets):
        return (targets != -100).sum()

    batches = [(inputs, targets)]
    assert told(make_trainer, make_task, cross_entropy, batches=batches, loss_weight=weight) == []
    assert told(make_trainer, make_task, cross_entropy, batches=batches) != []


def test_the_run_is_as_if_the_loss_had_not_been_compared(make_trainer, make_task):
    """Generators and statistics are those of a run whose only passes are its steps."""

    def model():
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))

    def weights(loss):
        task = make_task(model=model, loss=loss, train_dataloader=BATCHES)
        trainer = make_trainer(task, microbatch_size=4)
        trainer.fit()
        return trainer.state.model.state_dict()

    class Unlooked(nn.Module):
        """Raises in evaluation, so that nothing is compared."""

        def forward(self, outputs, targets):
            if not torch.is_grad_enabled():
                raise ValueError("only in training")
            return cross_entropy(outputs, targets)

    expected, actual = weights(Unlooked()), weights(cross_entropy)

    for name, value in expected.items():
        assert torch.equal(actual[name], value)


def test_what_modules_keep_by_themselves_is_as_if_the_loss_had_not_been_compared(
    make_trainer, make_task
):
    """Counters, queues and generators of a model are no buffers that are written in place."""

    class Keeps(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.num_calls = 0
            self.generator = torch.Generator().manual_seed(0)
            self.register_buffer("queue", torch.zeros(0, 3))

        def forward(self, inputs):
            self.num_calls += 1
            self.latest = inputs
            self.queue = torch.cat([self.queue, inputs[:1]])
            noise = torch.randn(inputs.shape, generator=self.generator)
            return super().forward(inputs + noise.to(inputs.device))

    trainer = make_trainer(
        make_task(model=Keeps, loss=cross_entropy, train_dataloader=BATCHES), microbatch_size=4
    )
    trainer.fit()

    model = trainer.state.model
    drawn = torch.Generator().manual_seed(0)
    for _ in range(6):
        torch.randn(4, 3, generator=drawn)
    assert model.num_calls == 6
    assert len(model.queue) == 6
    assert torch.equal(model.generator.get_state(), drawn.get_state())


def test_a_resumed_run_does_not_compare_again(make_trainer, make_task, tmp_path):
    """It would call the model more often than a run that was never stopped."""
    settings = {"run_dir": tmp_path / "run", "max_duration": "2ep"}
    task = make_task(loss=contrastive, train_dataloader=BATCHES)
    trainer = make_trainer(task, microbatch_size=4, **settings)
    with pytest.warns(UserWarning, match="train something else"):
        trainer.fit(until="1ep")
    trainer.close()

    assert told(make_trainer, make_task, contrastive, settings=settings) == []


def test_a_model_that_has_no_loss_in_evaluation_is_left_alone(make_trainer, make_task):
    """Detectors return boxes there; training says nothing of it."""

    class Detector(nn.Linear):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            return outputs if self.training else [{"boxes": outputs}]

    model = {"model": lambda: Detector(3, 3)}
    assert (
        told(make_trainer, make_task, lambda out, y: mse_loss(out[:, 0], y.float()), **model) == []
    )
