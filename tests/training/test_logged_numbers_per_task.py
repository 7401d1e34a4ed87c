"""Numbers that a task logs are those that a plain loop adds up: in training, evaluation, anywhere."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics import SumMetric

from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.errors import SettingError
from eventloop.toolbox import evaluation_mode
from eventloop_testing import run_ranks

SIZES = (6, 6, 3)  # the last batch is smaller, as in most data sets


def batches(sizes=SIZES, start=0.0):
    """Makes batches whose inputs say which sample they are: 0, 1, 2, ..."""
    numbers = torch.arange(start, start + sum(sizes)).unsqueeze(1).expand(-1, 3)
    return [(part, torch.zeros(len(part), dtype=torch.long)) for part in numbers.split(sizes)]


def mean_of(part):
    """The mean number of a batch's samples, as a plain loop in float64 has it."""
    return part[0][:, 0].double().mean().item()


@pytest.fixture
def logging_task(make_task):
    """Makes a task of which `forward` logs the mean number of its samples."""

    def logging_task(reduce=None, name="number", **given):
        def forward(model, inputs, state):
            state.log(name, inputs[:, 0].mean(), reduce)
            return model(inputs)

        values = {"forward": forward, "train_dataloader": batches(), "model": frozen_model}
        return make_task(**values | given)

    return logging_task


def frozen_model():
    """Makes a model of which every sample has another loss, and the same in each epoch."""
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0], [0.1], [0.3]]).expand(-1, 3))
    return model


def slowly(model):
    return torch.optim.SGD(model.parameters(), lr=1e-12)


@pytest.fixture
def heard(make_trainer, make_plugin):
    """Trains; returns what was logged by name, as pairs of batch and value, and the trainer."""

    def heard(task, **given):
        found: dict[str, list[tuple[int, float]]] = {}

        def log(numbers, at):
            for name, value in numbers.items():
                found.setdefault(name, []).append((at.batch, value))

        trainer = make_trainer(task, callbacks=[make_plugin("z", log=log)], **given)
        trainer.fit()
        return found, trainer

    return heard


def test_evaluation_does_not_write_into_the_series_of_training(heard, logging_task):
    """In mid-epoch the number of the training batch was replaced: 2, 107, 14 for 2, 8, 13."""
    task = logging_task(eval_dataloaders={"test": batches(start=100.0)})

    found, _ = heard(task, eval_interval="2ba")

    assert found["number"] == [(1, 2.5), (2, 8.5), (3, 13.0)]
    assert found["test/number"] == [(2, 107.0), (3, 107.0)]


def test_a_number_of_an_eval_set_is_the_mean_over_its_samples(heard, logging_task):
    """It reaches eval_metrics, history and loggers as a metric does; a mean of means would be 107.5."""
    task = logging_task(eval_dataloaders={"test": batches(start=100.0)})

    found, trainer = heard(task)

    result = trainer.state.eval_metrics["test"]["number"]
    assert (result.dtype, result.item()) == (torch.float64, 107.0)
    assert found["test/number"] == [(3, 107.0)]
    assert trainer.fit(until="2ep").history[-1]["test/number"] == 107.0


def test_an_eval_set_counts_what_was_logged_by_weight(heard, logging_task):
    """What a batch weighs in the loss, tokens say, it weighs there, too."""
    task = logging_task(
        eval_dataloaders={"test": batches()}, loss_weight=lambda inputs: inputs[0, 0] + 1
    )

    _, trainer = heard(task)

    weights = [1, 7, 13]
    means = map(mean_of, batches())
    expected = sum(one * weight for one, weight in zip(means, weights, strict=True)) / 21
    assert trainer.state.eval_metrics["test"]["number"].item() == pytest.approx(expected, 1e-12)


def test_a_number_of_training_keeps_its_name_in_evaluation(heard, logging_task):
    """train/kl in training is test/kl in evaluation, not test/train/kl."""
    found, _ = heard(logging_task(name="train/kl", eval_dataloaders={"test": batches()}))

    assert len(found["train/kl"]) == 3
    assert found["test/kl"] == [(3, 7.0)]


@pytest.mark.parametrize("hook", ["eval_start", "eval_batch_end", "eval_end"])
def test_plugins_log_into_an_eval_set_at_each_of_its_events(
    hook, make_trainer, logging_task, make_plugin
):
    """A score of all outputs is known at `eval_end` only."""
    plugin = make_plugin("z", **{hook: lambda state: state.log("score", 2.0)})
    task = logging_task(eval_dataloaders={"test": batches()})

    metrics = make_trainer(task, callbacks=[plugin]).eval()

    assert metrics["test"]["score"] == 2.0


def test_an_evaluation_that_failed_leaves_no_numbers(make_trainer, logging_task, make_plugin):
    """The next one would count half a set twice."""
    fails = [True]

    def fail(state):
        if fails.pop():
            fails.append(False)
            raise RuntimeError("no")
        fails.append(False)

    task = logging_task(eval_dataloaders={"test": batches()})
    trainer = make_trainer(task, callbacks=[make_plugin("z", eval_batch_end=fail)])

    with pytest.raises(RuntimeError, match="no"):
        trainer.eval()

    assert trainer.eval()["test"]["number"].item() == 7.0


def test_predictions_and_passes_beside_the_run_log_nothing(
    heard, logging_task, make_trainer, make_plugin
):
    """Their numbers would stand in the series of training."""
    rows = []
    trainer = make_trainer(
        logging_task(), callbacks=[make_plugin("z", log=lambda numbers: rows.append(numbers))]
    )
    trainer.predict([batches()[0]])
    trainer.sanity_eval() if trainer.state.eval_dataloaders else None
    with evaluation_mode(trainer.state):
        trainer.state.batch = [one.to(trainer.state.device) for one in batches()[0]]
        trainer.state.call("forward")
    trainer.fit()

    assert [row["number"] for row in rows] == [2.5, 8.5, 13.0]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("reduce", [None, "mean"])
def test_a_number_is_the_mean_of_all_microbatches(size, reduce, heard, logging_task):
    """Weighted as the loss is, by samples; the last one's value stood there."""
    found, _ = heard(logging_task(reduce), microbatch_size=size)

    expected = [mean_of(batch) for batch in batches()]
    assert [value for _, value in found["number"]] == pytest.approx(expected, rel=1e-12)


@pytest.mark.filterwarnings("ignore:microbatches of 1 train something else")
def test_microbatches_weigh_what_they_weigh_in_the_loss(heard, logging_task):
    """By tokens where the task says so, on the device; a part that weighs nothing is NaN times 0."""

    def forward(model, inputs, state):
        state.log("number", inputs[:, 0].mean() / (inputs[0, 0] > 0))  # the first part is 0 / 0
        return model(inputs)

    task = logging_task(forward=forward, loss_weight=lambda inputs: inputs[:, 0].sum())

    found, _ = heard(task, microbatch_size=1)

    expected = [
        sum(one * one for one in part) / sum(part) for part in ([*range(6)], [*range(6, 12)])
    ]
    assert [value for _, value in found["number"][:2]] == pytest.approx(expected, rel=1e-12)


def test_a_sum_adds_up_what_microbatches_have(heard, make_task):
    """How many there were is the same number however the batch is sliced."""

    def forward(model, inputs, state):
        state.log("seen", len(inputs), "sum")
        return model(inputs)

    task = make_task(
        forward=forward, train_dataloader=batches(), eval_dataloaders={"test": batches()}
    )

    found, _ = heard(task, microbatch_size=4)

    assert [value for _, value in found["seen"]] == [6, 6, 3]
    assert found["test/seen"] == [(3, 15.0)]


def on_two_ranks(task, **given):
    """Trains on two ranks; returns what rank 0 logged, and each one's history and eval metrics."""
    from eventloop import Trainer, hookimpl

    class Log:
        name = "z"

        def __init__(self):
            self.found = {}

        @hookimpl
        def log(self, state, numbers):
            for name, value in numbers.items():
                self.found.setdefault(name, []).append(value)

    def train():
        log = Log()
        values = {
            "device": "cpu",
            "autoload": False,
            "max_duration": "1ep",
            "uneven": "drop",
        } | given
        with Trainer(task(), callbacks=[log], **values) as trainer:
            result = trainer.fit()
        return log.found, result.history, trainer.state.eval_metrics

    return run_ranks(train)


def loader(sizes=(8, 8), start=0.0):
    (samples,) = batches((sum(sizes),), start)
    data = torch.utils.data.TensorDataset(*samples)
    return torch.utils.data.DataLoader(data, batch_size=sizes[0] // 2)


@pytest.mark.parametrize("size", [None, 1, 3])
def test_ranks_log_the_mean_over_all_samples(size, logging_task):
    """With `reduce`, weighted likewise; without it, rank 0's own mean."""

    def task(reduce):
        loaders = {"train_dataloader": loader(), "eval_dataloaders": {"test": loader((8, 3), 50.0)}}
        return logging_task(reduce, **loaders)

    (mean, _, evaluated), (_, _, other) = on_two_ranks(partial(task, "mean"), microbatch_size=size)
    (own, *_), _ = on_two_ranks(partial(task, None), microbatch_size=size)

    assert mean["number"] == pytest.approx([3.5, 11.5], rel=1e-12)
    assert own["number"] == pytest.approx([3.0, 11.0], rel=1e-12)
    assert evaluated["test"]["number"].item() == pytest.approx(55.0, rel=1e-12)
    assert other["test"]["number"] == evaluated["test"]["number"]


def plain_losses(parts):
    """The mean loss of each batch, and over all samples, as a plain loop adds them up in float64."""
    model = frozen_model().double()
    with torch.no_grad():
        model.bias.zero_()
        losses = [
            cross_entropy(model(inputs.double()), targets).item() for inputs, targets in parts
        ]
    sizes = [len(inputs) for inputs, _ in parts]
    return losses, sum(map(lambda one, size: one * size, losses, sizes)) / sum(sizes)


def unbiased():
    model = frozen_model()
    nn.init.zeros_(model.bias)
    return model


@pytest.mark.parametrize("interval", ["1ba", "10ba", "1000ba"])
@pytest.mark.parametrize("size", [None, 2])
def test_the_loss_of_an_epoch_is_the_mean_over_its_samples(interval, size, make_trainer, make_task):
    """Not over the batches, nor over those that happened to be delivered."""
    task = make_task(model=unbiased, optimizer=slowly, train_dataloader=batches())

    result = make_trainer(
        task, log_interval=interval, microbatch_size=size, max_duration="2ep"
    ).fit()

    _, expected = plain_losses(batches())
    assert result.history[-1]["train/loss"] == pytest.approx(expected, rel=1e-6)


def test_the_loss_of_an_epoch_is_that_of_all_ranks(make_task):
    """Each rank knows its own part of a batch."""

    def task():
        return make_task(model=unbiased, optimizer=slowly, train_dataloader=loader())

    (_, history, _), (_, other, _) = on_two_ranks(task)

    _, expected = plain_losses(batches((8, 8)))
    assert history[-1]["train/loss"] == other[-1]["train/loss"] == pytest.approx(expected, rel=1e-6)


def test_each_epoch_has_a_mean_of_its_own(make_trainer, make_task):
    """And an evaluation in mid-epoch that of the epoch so far."""
    task = make_task(
        model=unbiased, optimizer=slowly, train_dataloader=batches(), eval_dataloaders=batches()
    )

    result = make_trainer(task, eval_interval="2ba", max_duration="2ep").fit()

    first, second, third = ([*batches()[:2]], [batches()[0]], [*batches()])
    expected = [plain_losses(parts)[1] for parts in (first, second, third)]
    assert [row["batch"] for row in result.history] == [2, 4, 6]
    assert [row["train/loss"] for row in result.history] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("interval", ["1ba", "1000ba"])
def test_metrics_of_training_are_in_the_history(interval, make_trainer, make_task):
    """Whatever the log interval: the value since they were last logged, by its name in the log."""

    class Seen(SumMetric):
        def update(self, outputs, targets):
            super().update(torch.ones(len(targets)))

    task = make_task(
        train_dataloader=batches(), eval_dataloaders=batches(), train_metrics={"seen": Seen()}
    )

    result = make_trainer(task, log_interval=interval, max_duration="2ep").fit()

    expected = {"1ba": [3.0, 3.0], "1000ba": [15.0, 15.0]}[interval]
    assert [row["train/seen"] for row in result.history] == expected


@pytest.mark.parametrize("batch", [1, 4, 5])
def test_a_resumed_run_has_the_numbers_of_one_that_was_not(batch, make_trainer, logging_task):
    """In mid-epoch and in the middle of an evaluation's interval, to the last bit."""

    def rows(folder, **given):
        task = logging_task(
            "mean", eval_dataloaders={"test": batches()}, train_metrics={"n": Total()}
        )
        settings = {"max_duration": "3ep", "eval_interval": "2ba", "microbatch_size": 4}
        saving = {"run_dir": folder, "checkpoint_interval": "1ba", "checkpoint_keep": None}
        with make_trainer(task, **settings, **saving, **given) as trainer:
            history = trainer.fit().history
        return [{key: one for key, one in row.items() if key != "seconds"} for row in history]

    through = rows("a")

    assert rows("b", resume=f"a/checkpoints/ba{batch:08}") == through


class Total(SumMetric):
    def update(self, outputs, targets):
        super().update(torch.ones(len(targets)))


def test_one_name_is_taken_everywhere(make_trainer, make_task, make_batches):
    """What history and log call it, `checkpoint_best` takes; the longer form is the same number."""
    task = make_task(eval_dataloaders={"test": make_batches()})
    given = {"eval_interval": "1ba", "checkpoint_keep": 1}
    kept = {}

    for name in ("test/loss", "eval/test/loss", "min test/loss"):
        result = make_trainer(
            task, run_dir=name.replace("/", "-"), checkpoint_best=name, **given
        ).fit()
        assert "test/loss" in result.history[-1]
        names = sorted(one.name for one in (result.run_dir / "checkpoints").glob("ba*"))
        facts = read_checkpoint(result.run_dir / "checkpoints" / names[-1]).parts["training"][
            "saver"
        ]
        kept[name] = (names, facts["metric"])

    assert len(set(map(str, kept.values()))) == 1
    assert kept["test/loss"][1] == "min test/loss"


def test_the_unnamed_eval_set_and_one_called_train(make_trainer, make_task, make_batches):
    """eval/loss, not eval/eval/loss; and what is evaluated isn't mixed up with training."""
    alone = make_trainer(make_task(eval_dataloaders=make_batches())).fit().history[-1]
    both = make_trainer(make_task(eval_dataloaders={"train": make_batches()})).fit().history[-1]

    assert {"eval/loss", "train/loss"} <= alone.keys()
    assert {"eval/train/loss", "train/loss"} <= both.keys()


def test_a_number_that_is_logged_in_evaluation_can_be_followed(make_trainer, logging_task):
    """It is known when it comes; until then its set has to exist, and what is better be said."""
    task = logging_task(eval_dataloaders={"test": batches()})
    given = {"run_dir": "run", "checkpoint_best": "max test/number"}

    make_trainer(task, **given).fit()
    with pytest.raises(
        SettingError, match=r"'test/kl', but the evaluation gave test/loss, test/number"
    ):
        make_trainer(task, **given | {"checkpoint_best": "min test/kl", "run_dir": "other"}).fit()
    with pytest.raises(SettingError, match="no metric is named 'test/number'"):
        make_trainer(task, **given | {"checkpoint_best": "test/number", "run_dir": "third"})
