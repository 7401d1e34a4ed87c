"""Evaluation and prediction: when they happen, what they give, and that they leave no trace."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from eventloop import hookimpl
from eventloop.errors import TaskError


class FirstMean(MeanMetric):
    """The mean of the outputs."""

    def update(self, outputs, targets):
        super().update(outputs)


@pytest.fixture
def evaluated_at(make_trainer, make_task, make_batches, make_plugin):
    """Trains 2 epochs of 3 batches of 4 samples, 8 tokens each; gives when it evaluated."""

    def evaluated_at(**given):
        moments = []
        watch = make_plugin(
            eval_before_all=lambda state: moments.append((state.clock.epoch, state.clock.batch))
        )
        task = make_task(eval_dataloaders=make_batches(1), num_tokens=lambda inputs: 8)
        make_trainer(task, callbacks=[watch], **{"max_duration": "2ep"} | given).fit()
        return moments

    return evaluated_at


@pytest.mark.parametrize(
    ("interval", "batches"),
    [
        ("1ba", [1, 2, 3, 4, 5, 6]),
        ("2ba", [2, 4, 6]),
        ("4ba", [4, 6]),
        ("1ep", [3, 6]),
        ("2ep", [6]),
        ("5ep", [6]),
        ("0.5ep", [2, 4, 6]),
        ("4sp", [1, 2, 3, 4, 5, 6]),
        ("10sp", [3, 5, 6]),
        ("1sp", [1, 2, 3, 4, 5, 6]),
        ("24tok", [3, 6]),
        ("0.5dur", [3, 6]),
        ("0.34dur", [2, 4, 6]),
        ("1e9sec", [6]),
        ("1e-9sec", [1, 2, 3, 4, 5, 6]),
        (None, []),
    ],
)
def test_evaluation_comes_at_each_multiple_and_at_the_end(interval, batches, evaluated_at):
    """In any unit: after the first batch that crossed it, once a batch count."""
    moments = evaluated_at(eval_interval=interval)

    assert [batch for _, batch in moments] == batches


@pytest.mark.parametrize(("duration", "batches"), [("4ba", [3, 4]), ("17sp", [3, 5])])
def test_the_end_is_evaluated_in_mid_epoch(duration, batches, evaluated_at):
    """The last weights are those that a person keeps."""
    assert [batch for _, batch in evaluated_at(max_duration=duration)] == batches


def test_a_plugin_may_ask_for_more_evaluations_but_not_twice_at_a_batch(
    make_trainer, make_task, make_batches, make_plugin
):
    """Two yeses at one batch count are one evaluation."""
    batches = []
    asker = make_plugin(should_eval=lambda state: state.clock.batch in (2, 3),
                        eval_after_all=lambda state: batches.append(state.clock.batch))  # fmt: skip
    task = make_task(eval_dataloaders=make_batches())

    make_trainer(task, callbacks=[asker], max_duration="2ep").fit()

    assert batches == [2, 3, 6]


def test_evaluation_leaves_random_generators_as_they_were(make_trainer, make_task):
    """How often one evaluates must not change what is trained."""

    def noisy(model, inputs):
        return model(inputs) * (random.random() + numpy.random.rand() + torch.rand(()))

    def state():
        python = random.getstate()
        return python, numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    task = make_task(
        forward=noisy,
        eval_dataloaders=[torch.zeros(4, 3)],
        metrics={},
    )
    trainer = make_trainer(task)
    before = state()

    trainer.eval()
    trainer.predict([torch.zeros(4, 3)])

    assert state() == before


def test_every_module_keeps_its_own_mode(make_trainer, make_task, make_batches):
    """A batch norm that was frozen in evaluation mode stays frozen."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3))
    trainer = make_trainer(make_task(model=model, eval_dataloaders=make_batches()))
    model.train()
    model[0].eval()

    trainer.eval()

    assert [module.training for module in model.modules()] == [True, False, True, True]


def test_the_mode_comes_back_after_an_exception(make_trainer, make_task, make_batches, make_plugin):
    """Whoever catches it trains on."""

    def fail(state):
        raise RuntimeError("no space")

    trainer = make_trainer(make_task(eval_dataloaders=make_batches()),
                           callbacks=[make_plugin(eval_batch_end=fail)])  # fmt: skip
    before = torch.get_rng_state()

    with pytest.raises(RuntimeError, match="no space"):
        trainer.eval()

    assert trainer.state.model.training
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)
    assert (trainer.state.batch, trainer.state.outputs, trainer.state.eval_name) == (None,) * 3


def test_the_model_is_not_changed(make_trainer, make_task, make_batches):
    """Not even the running statistics of a batch norm."""
    task = make_task(model=lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)),
                     eval_dataloaders=make_batches())  # fmt: skip
    trainer = make_trainer(task)
    before = {name: value.clone() for name, value in trainer.state.model.state_dict().items()}

    trainer.eval()

    assert all(torch.equal(value, trainer.state.model.state_dict()[name])
               for name, value in before.items())  # fmt: skip


def test_data_loaders_are_evaluated_in_the_order_of_their_names_in_the_task(
    make_trainer, make_task, make_batches, make_plugin
):
    """The order is the task's, and each has its own results."""
    names = []
    watch = make_plugin(eval_start=lambda state: names.append(state.eval_name))
    loaders = {"valid": make_batches(2), "test": make_batches(1), "a": make_batches(1)}
    task = make_task(
        eval_dataloaders=loaders, metrics={"accuracy": MulticlassAccuracy(3), "loss": None}
    )
    trainer = make_trainer(task, callbacks=[watch])

    metrics = trainer.eval()

    assert names == ["valid", "test", "a"]
    assert {name: list(found) for name, found in metrics.items()} == {
        name: ["accuracy"] for name in names
    }
    assert trainer.state.eval_name is None


def test_each_evaluation_starts_its_metrics_anew(make_trainer, make_task, make_batches):
    """Three of three batches, not six of three."""
    value = [0.0]
    task = make_task(
        forward=lambda model, inputs: torch.full((4,), value[0]),
        eval_dataloaders={"test": make_batches(1)},
        metrics={"mean": FirstMean(), "loss": None},
    )
    trainer = make_trainer(task)

    results = []
    for value[0] in (1.0, 5.0):
        results.append(trainer.eval()["test"]["mean"].item())

    assert results == [1.0, 5.0]


def test_predict_gives_the_outputs_of_each_batch(make_trainer, make_batches):
    """One entry a batch, on the host, without a graph, in evaluation mode."""
    trainer = make_trainer()
    batches = make_batches(2)

    outputs = trainer.predict(batches)

    device = trainer.state.device
    expected = [trainer.state.model(inputs.to(device)).cpu() for inputs, _ in batches]
    assert len(outputs) == 2
    assert all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))
    assert not any(one.requires_grad for one in outputs)
    assert trainer.state.model.training


def test_predict_returns_what_stands_in_outputs_at_the_end_of_a_batch(
    make_trainer, make_plugin, make_batches
):
    """A plugin that calibrates or ensembles writes there."""
    doubler = make_plugin(
        predict_after_forward=lambda state: setattr(state, "outputs", [state.outputs * 0, "text"])
    )

    outputs = make_trainer(algorithms=[doubler]).predict(make_batches(1))

    assert torch.equal(outputs[0][0], torch.zeros(4, 3))
    assert outputs[0][1] == "text"


def test_an_evaluation_of_nothing_is_refused(make_trainer, make_task):
    """A metric of no sample is a number that means nothing."""
    trainer = make_trainer(make_task(eval_dataloaders={"test": lambda: iter([])}))

    with pytest.raises(TaskError, match="eval data loader 'test' yielded no batch"):
        trainer.eval()


def test_a_prediction_for_nothing_is_refused(make_trainer):
    """An empty file of predictions is most likely a wrong path."""
    with pytest.raises(
        TaskError, match=r"data loader to predict for yielded no batch\n  fix  provide data"
    ):
        make_trainer().predict([])


def test_eval_without_eval_data_is_refused(make_trainer):
    """There is nothing that it could mean."""
    with pytest.raises(TaskError, match="the task has no eval data loader"):
        make_trainer().eval()


def test_the_evaluation_can_be_enclosed(make_trainer, make_task, make_batches, make_plugin):
    """Averaged weights are evaluated by a wrapper around `evaluate`, put back by its other half."""

    class Zeroed:
        name = "zeroed"

        @hookimpl(wrapper=True)
        def evaluate(self, state):
            weight, zeros = state.model.weight, torch.zeros(3, 3)
            kept = weight.detach().clone()
            weight.data.copy_(zeros)
            try:
                return (yield)
            finally:
                weight.data.copy_(kept)

    seen = []
    task = make_task(eval_dataloaders=make_batches())
    watch = make_plugin(eval_start=lambda state: seen.append(state.model.weight.abs().sum().item()))
    trainer = make_trainer(task, algorithms=[Zeroed()], callbacks=[watch])

    trainer.eval()

    assert seen == [0.0]
    assert trainer.state.model.weight.abs().sum() > 0


class Merging(nn.Linear):
    """Puts its update into the weights for an evaluation, as LoRA does."""

    is_merged = False

    def train(self, mode=True):
        super().train(mode)
        self.is_merged = not mode
        return self


def test_a_module_that_acts_in_train_is_told_of_the_end_of_an_evaluation(make_trainer, make_task):
    """Otherwise it would train on in the state of an evaluation."""
    trainer = make_trainer(make_task(model=lambda: nn.Sequential(Merging(3, 3), nn.Dropout())))
    merging, dropout = trainer.state.model
    dropout.eval()

    trainer.predict([(torch.ones(1, 3), torch.zeros(1, dtype=torch.int64))])

    assert not merging.is_merged
    assert (merging.training, dropout.training) == (True, False)
