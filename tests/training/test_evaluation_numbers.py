"""Evaluation never says nothing: what is measured without being asked for, when, and what failed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, default_collate
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from eventloop import hookimpl
from eventloop.errors import SettingError, TaskError
from eventloop_testing import run_ranks

SIZES = (6, 6, 3)


def batches(sizes=SIZES):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(sum(sizes), 3, generator=generator)
    return list(zip(inputs.split(sizes), inputs.argmax(1).split(sizes), strict=True))


def batches_on(device):
    return [(inputs.to(device), targets.to(device)) for inputs, targets in batches()]


def expected(trainer, number=cross_entropy):
    """The mean over all samples, as a plain loop in float64 adds it up."""
    model = trainer.state.model
    with torch.no_grad():
        found = [(number(model(inputs), targets).double().mean(), len(inputs))
                 for inputs, targets in batches_on(trainer.state.device)]  # fmt: skip
    return (sum(value * size for value, size in found) / sum(SIZES)).item()


class WithLoss(nn.Module):
    """Computes its loss itself, as language models do."""

    def __init__(self, kind=dict):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.kind = kind

    def forward(self, inputs, labels=None):
        logits = self.layer(inputs)
        if labels is None:
            return logits
        return self.kind(loss=cross_entropy(logits, labels), logits=logits)


def mappings():
    return [{"inputs": inputs, "labels": targets} for inputs, targets in batches()]


def with_state(model, inputs, targets):
    logits = model(inputs)
    return SimpleNamespace(logits=logits, loss=cross_entropy(logits, targets))


class OwnLoss:
    """A plugin that owns the loss."""

    name = "own-loss"

    @hookimpl
    def loss(self, state):
        return cross_entropy(state.outputs, state.targets)


WHO = {
    "task": ({"loss": cross_entropy, "eval_dataloaders": {"test": batches()}}, []),
    "model": ({"model": WithLoss, "eval_dataloaders": {"test": mappings()},
               "train_dataloader": mappings()}, []),
    "forward": ({"forward": with_state, "eval_dataloaders": {"test": batches()}}, []),
    "plugin": ({"eval_dataloaders": {"test": batches()}}, [OwnLoss]),
}  # fmt: skip


@pytest.mark.parametrize(
    "metrics", [None, {"accuracy": MulticlassAccuracy(3)}], ids=["none", "one"]
)
@pytest.mark.parametrize("who", WHO)
def test_an_eval_set_has_its_mean_loss_whoever_computes_it(who, metrics, make_trainer, make_task):
    """Without metrics it was {}, and with metrics the loss was gone."""
    given, plugins = WHO[who]
    task = make_task(**{"loss": None, "metrics": metrics} | given)
    trainer = make_trainer(task, algorithms=[one() for one in plugins])

    results = trainer.eval()["test"]

    assert list(results) == [*(metrics or {}), "loss"]
    assert results["loss"].item() == pytest.approx(expected(trainer), rel=1e-6)


@pytest.mark.parametrize("metrics", [{"loss": None, "n": MulticlassAccuracy(3)}, {}])
def test_the_loss_can_be_switched_off(metrics, make_trainer, make_task):
    """Where it makes no sense there, or takes too long."""
    task = make_task(eval_dataloaders={"test": batches()}, metrics=metrics)

    results = make_trainer(task).eval()["test"]

    assert list(results) == [name for name in metrics if name != "loss"]


def test_wrappers_of_the_loss_stay_out_of_evaluation(make_trainer, make_task):
    """What regularizes the training would make losses of two methods incomparable."""

    class Doubled:
        name = "doubled"

        @hookimpl(wrapper=True)
        def loss(self, state):
            return (yield) * 2

    trainer = make_trainer(make_task(eval_dataloaders={"test": batches()}), algorithms=[Doubled()])

    assert trainer.eval()["test"]["loss"].item() == pytest.approx(expected(trainer), rel=1e-6)


def test_a_mean_loss_weighs_as_in_training(make_trainer, make_task):
    """By tokens, where the task says so."""
    task = make_task(
        eval_dataloaders={"test": batches()}, loss_weight=lambda targets: targets.sum()
    )
    trainer = make_trainer(task)

    found = trainer.eval()["test"]["loss"].item()

    with torch.no_grad():
        losses = [
            (cross_entropy(trainer.state.model(x), y).double(), y.sum())
            for x, y in batches_on(trainer.state.device)
        ]
    weighted = sum(loss * weight for loss, weight in losses) / sum(weight for _, weight in losses)
    assert found == pytest.approx(weighted.item(), rel=1e-6)


def test_tokens_of_a_batch_on_the_device_are_not_counted(make_trainer, make_task):
    """Metrics average over samples; to count tokens there could wait for the device."""

    def num_tokens(state, inputs):
        assert state.batch is None, "counted on the device"
        return inputs.numel()

    task = make_task(
        eval_dataloaders={"test": batches()}, metrics={"hits": hits}, num_tokens=num_tokens,
        train_metrics={"hits": hits},
    )  # fmt: skip
    trainer = make_trainer(task, microbatch_size=4, max_duration="2ba")
    trainer.fit()

    assert trainer.state.clock.token > 0


def hits(outputs, targets):
    """A value for each sample."""
    return outputs.argmax(1) == targets


def margin(outputs, targets):
    """One number a batch."""
    return (outputs.max(1).values - outputs.mean(1)).mean()


def test_plain_functions_are_metrics(make_trainer, make_task):
    """Averaged over the samples, beside torchmetrics, in evaluation and in training."""
    metrics = {"hits": hits, "margin": margin, "accuracy": MulticlassAccuracy(3, average="micro")}
    task = make_task(eval_dataloaders={"test": batches()}, metrics=metrics, train_metrics=hits,
                     train_dataloader=batches())  # fmt: skip
    trainer = make_trainer(task, microbatch_size=2)
    results = trainer.eval()["test"]
    history = trainer.fit().history

    assert results["hits"].item() == pytest.approx(results["accuracy"].item(), rel=1e-6)
    assert 0 <= history[-1]["train/hits"] <= 1
    for name, number in (("hits", hits), ("margin", margin)):
        before = make_trainer(task)
        assert before.eval()["test"][name].item() == pytest.approx(
            expected(before, number), rel=1e-6
        )


def test_ranks_average_functions_over_all_samples(make_task):
    """As torchmetrics do; each rank has another number of samples."""
    samples = [
        (x, y) for inputs, targets in batches() for x, y in zip(inputs, targets, strict=True)
    ]

    def evaluate():
        task = make_task(eval_dataloaders={"test": DataLoader(samples, batch_size=4)},
                         metrics={"hits": hits})  # fmt: skip
        with isolated_trainer_of(task) as trainer:
            found = {name: one.item() for name, one in trainer.eval()["test"].items()}
            return found, expected(trainer, hits), expected(trainer)

    for found, hit, loss in run_ranks(evaluate):
        assert found == pytest.approx({"hits": hit, "loss": loss}, rel=1e-6)


def isolated_trainer_of(task):
    from eventloop import Trainer

    return Trainer(task, device="cpu", autoload=False, max_duration="1ep")


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda outputs, targets: "many", "returned a str, not a tensor"),
        (
            lambda outputs, targets: outputs[:1, 0],
            r"of shape \(1,\); expected .* \(6,\), a value for each sample of the batch",
        ),
        (lambda outputs, targets: outputs.flatten(), r"of shape \(18,\); expected"),
        (
            lambda outputs, targets: outputs,
            r"returned a tensor of shape \(6, 3\); expected",
        ),
    ],
)
def test_a_function_that_gives_something_else_is_refused(metric, message, make_trainer, make_task):
    """With what it has to return."""
    task = make_task(eval_dataloaders={"test": batches()}, metrics={"odd": metric})

    with pytest.raises(TaskError, match=message):
        make_trainer(task).eval()


class Samples:
    """A plugin that evaluates by itself: samples of a generative model, say."""

    name = "samples"

    def __init__(self):
        self.at = []

    @hookimpl
    def eval_after_all(self, state):
        self.at.append(state.clock.batch)


class Owner:
    """A plugin that evaluates in place of the loop."""

    name = "owner"

    def __init__(self):
        self.at = []

    @hookimpl
    def evaluate(self, state):
        self.at.append(state.clock.batch)
        return {}


@pytest.mark.parametrize("given", [{"eval_interval": "2ba"}, {"eval_at_start": True}])
def test_a_run_with_nothing_to_evaluate_says_so(given, make_trainer):
    """It trained, and said nothing."""
    with pytest.raises(SettingError, match="there is nothing to evaluate"):
        make_trainer(**given)


@pytest.mark.parametrize(("given", "at"), [({"eval_interval": "2ba"}, [2, 3]), ({}, [3])])
def test_a_plugin_that_evaluates_by_itself_needs_no_eval_data(given, at, make_trainer):
    """`evaluate` runs with no sets, so that averages of weights are in their places."""
    plugin = Samples()

    make_trainer(callbacks=[plugin], **given).fit()

    assert plugin.at == at


def test_an_owner_of_evaluate_needs_no_eval_data(make_trainer):
    """It has data of its own, or a loop of its own."""
    plugin = Owner()

    make_trainer(algorithms=[plugin], eval_interval="2ba").fit()

    assert plugin.at == [2, 3]


def test_plugins_that_only_watch_evaluate_nothing(make_trainer):
    """Control: else a bar would be enough for an interval without effect to pass."""
    watcher = Samples()
    watcher.needs_eval_data = True

    with pytest.raises(SettingError, match="there is nothing to evaluate"):
        make_trainer(callbacks=[watcher], eval_interval="2ba")
    make_trainer(callbacks=[watcher]).fit()

    assert watcher.at == []


def test_an_evaluation_without_any_number_says_so(make_trainer, make_task):
    """An eval set was gone through, and history and log had nothing of it."""

    class NoLoss:
        name = "no-loss"

        @hookimpl
        def train_batch(self, state):
            return True

    task = make_task(loss=None, eval_dataloaders={"test": batches()})

    with pytest.raises(TaskError, match="the evaluation of 'test' gave no number"):
        make_trainer(task, algorithms=[NoLoss()]).fit()


def test_a_run_may_be_evaluated_before_its_first_batch(make_trainer, make_task, make_plugin):
    """Once: a resumed run has begun."""
    at = []
    watch = make_plugin("z", eval_after_all=lambda state: at.append(state.clock.batch))
    given = {"eval_at_start": True, "run_dir": "run", "max_duration": "2ep"}
    task = make_task(eval_dataloaders={"test": batches()})

    with make_trainer(task, callbacks=[watch], **given) as trainer:
        history = trainer.fit(until="2ba").history
    with make_trainer(task, callbacks=[watch], **given) as trainer:
        trainer.fit()

    assert at == [0, 2, 3, 6]
    assert history[0]["batch"] == 0
    assert "test/loss" in history[0]


def notes(error):
    return "\n".join(error.value.__notes__)


@pytest.mark.parametrize(
    "metric", [MulticlassAccuracy(2), lambda outputs, targets: outputs - targets]
)
def test_a_metric_that_fails_is_named_with_what_it_was_given(metric, make_trainer, make_task):
    """With the batch of its eval set, and shapes."""
    task = make_task(eval_dataloaders={"test": batches()}, metrics={"odd": metric})

    with pytest.raises((ValueError, RuntimeError)) as error:
        make_trainer(task).eval()

    assert (
        "metric 'odd' was given outputs float32 (6, 3), targets int64 (6,); "
        "batch 1 of the eval set 'test'"
    ) in notes(error)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("who", ["model", "task"])
def test_a_forward_pass_that_fails_is_named(who, evaluates, make_trainer, make_task):
    """With epoch, batch and microbatch, or the eval set."""
    given = {"model": {"model": lambda: nn.Linear(5, 3)},
             "task": {"forward": lambda model, inputs: model(inputs.T)}}[who]  # fmt: skip
    task = make_task(eval_dataloaders={"test": batches()}, **given)
    trainer = make_trainer(task, microbatch_size=2)

    with pytest.raises(RuntimeError) as error:
        trainer.eval() if evaluates else trainer.fit()

    size, place = (6, "batch 1 of the eval set 'test'") if evaluates else (
        2, "epoch 1, batch 1, microbatch 1 of 2")  # fmt: skip
    assert "forward was given a batch of (float32" in notes(error)
    assert f"({size}, 3), int64 ({size},)); {place}" in notes(error)


def test_a_loss_that_fails_is_named(make_trainer, make_task):
    """With what it was given."""
    task = make_task(loss=lambda outputs, targets: cross_entropy(outputs, targets[:2]))

    with pytest.raises(ValueError, match="batch_size") as error:
        make_trainer(task).fit()

    assert "loss was given outputs float32 (4, 3), targets int64 (4,); epoch 1, batch 1" in notes(
        error
    )


def fails(samples):
    raise ValueError("no batch")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_function_that_fails_is_named(num_workers, make_trainer, make_task):
    """With the samples that it was given, in a worker too."""
    samples = [(torch.zeros(3), 1)] * 8
    loader = DataLoader(samples, batch_size=4, collate_fn=fails, num_workers=num_workers)

    with pytest.raises(ValueError, match="no batch") as error:
        make_trainer(make_task(train_dataloader=loader)).fit()

    told = f"{error.value}\n{notes(error)}"
    assert "collate_fn fails was given 4 times (float32 (3,), int)" in told
    assert "at batch 1 of its epoch\nepoch 1, after batch 0" in told


def test_an_eval_loader_that_fails_is_named(make_trainer, make_task):
    """With its batch."""
    loader = DataLoader([(torch.zeros(3), 1)] * 8, batch_size=4, collate_fn=fails)

    with pytest.raises(ValueError, match="no batch") as error:
        make_trainer(make_task(eval_dataloaders={"test": loader})).eval()

    assert "raised by the eval data loader 'test', at its batch 1" in notes(error)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda outputs, targets: {"a": 1}, "metric 'odd' returned a dict, not a tensor"),
        (lambda outputs, targets: outputs, r"metric 'odd' returned a tensor of shape \(4, 3\)"),
        (SumMetric, r"metric 'odd' is the class SumMetric[\s\S]*write SumMetric\(\)"),
    ],
)
def test_a_metric_that_is_none_is_named(value, said, make_trainer, make_task, make_batches):
    """Of several, which one it is."""
    task = make_task(eval_dataloaders=make_batches(), metrics={"odd": value})

    with pytest.raises(TaskError, match=said):
        make_trainer(task).eval()


def test_metrics_without_names_are_refused(make_trainer, make_task, make_batches):
    """Their numbers would have none."""
    task = make_task(eval_dataloaders=make_batches(), metrics=[SumMetric()])

    with pytest.raises(TaskError, match="metrics are a list of 1, without names"):
        make_trainer(task)


@pytest.mark.parametrize("kind", ["map", "list", "stream"])
def test_a_train_loader_that_fails_is_named(kind, make_trainer, make_task, make_batches):
    """With its batch, whatever made it."""

    def stream():
        yield from make_batches()[:1]
        raise ValueError("no batch")

    class Stream:
        def __iter__(self):
            return stream()

    uneven = [(torch.zeros(3), 1)] * 4 + [(torch.zeros(3), 1), (torch.zeros(2), 1)]
    loader = {
        "map": DataLoader([(torch.zeros(3), 1)] * 4 + [(torch.zeros(2), 1)] * 4, 4, collate_fn=odd),
        "list": DataLoader(uneven, batch_size=4),
        "stream": Stream(),
    }[kind]

    with pytest.raises((ValueError, RuntimeError)) as error:
        make_trainer(make_task(train_dataloader=loader)).fit()

    assert "raised by the train data loader, at batch 2 of its epoch" in notes(error)


def odd(samples):
    if len(samples[0][0]) == 2:
        raise ValueError("no batch")
    return default_collate(samples)


def test_what_cannot_be_evaluated_names_its_set(make_trainer, make_task):
    """Training went well, by a plugin's updates say."""
    task = make_task(eval_dataloaders={"test": [[torch.zeros(4, 3)]]})

    with pytest.raises(TaskError, match="a batch of the eval set 'test' of list of 1"):
        make_trainer(task).eval()
