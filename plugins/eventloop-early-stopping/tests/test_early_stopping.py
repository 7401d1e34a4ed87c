"""The plugin in a training."""

import math

import pytest
import torch
from torch import nn
from torchmetrics import Metric

from eventloop import SettingError, Task, hookimpl
from eventloop_early_stopping import EarlyStopping
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task


class Counter(nn.Module):
    """Gives its weight, which grows by 1 a step."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, inputs):
        return self.weight.expand(len(inputs))


class Scripted(Metric):
    """Gives for each step what is written for it."""

    full_state_update = False

    def __init__(self, values):
        super().__init__()
        self.values = values
        self.add_state("step", torch.tensor(0.0), dist_reduce_fx="max")

    def update(self, outputs, targets):
        self.step = outputs.max()

    def compute(self):
        return torch.as_tensor(self.values[int(self.step)])


class Lower(Scripted):
    higher_is_better = False


class Higher(Scripted):
    higher_is_better = True


def scripted_task(*values, metric=Lower, num_batches=1, **given):
    """A task whose metric after each batch is known beforehand."""
    batch = torch.zeros(2, 1), torch.zeros(2)
    values = (math.nan, *values, *[values[-1]] * 20)
    return Task(**{
        "model": Counter,
        "loss": lambda outputs, targets: -outputs.mean(),
        "train_dataloader": [batch] * num_batches,
        "eval_dataloaders": {"test": [batch]},
        "metrics": {"score": metric(values)},
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    } | given)  # fmt: skip


def fit(folder, task=None, plugin=None, **given):
    with isolated_trainer(
        folder, task, callbacks=[plugin or EarlyStopping()], **{"max_duration": "12ep"} | given
    ) as trainer:
        trainer.fit()
    return trainer


def stopped_at(folder, *values, **options):
    task = scripted_task(*values, metric=options.pop("task_metric", Lower))
    return fit(folder, task, EarlyStopping(**options)).state.clock.epoch


@pytest.mark.parametrize(
    ("values", "options", "epoch"),
    [
        ([5, 4, 3, 3, 3, 3], {"patience": "2ep"}, 5),
        ([5, 4, 3, 3, 2, 3, 3], {"patience": "2ep"}, 7),
        ([5, 4, 3, 3, 2, 3, 3], {"patience": "2ep", "task_metric": Higher}, 3),
        ([5, 4, 3, 3, 2, 3, 3], {"patience": "2ep", "metric": "test/score", "mode": "max"}, 3),
        ([5, 4, 3, 2], {"patience": "2ep", "min_delta": 1.5}, 5),
        ([5, 4, 3, 3], {}, 8),
        ([5, 4, 3, 3], {"patience": "0.25dur"}, 6),
        ([5, math.nan, math.nan, 3, 3], {"patience": "4ep"}, 8),
        ([5, math.nan, math.nan, 3, 3], {"patience": "4ep", "on_nan": "stop"}, 2),
        ([12 - epoch for epoch in range(12)], {"patience": "1ep"}, 12),
    ],
)
def test_a_run_stops_when_its_metric_has_stopped_improving(tmp_path, values, options, epoch):
    """Patience after the best value, and not before."""
    assert stopped_at(tmp_path, *values, **options) == epoch


def test_evaluations_in_mid_epoch_stop_a_run_there(tmp_path):
    """Who evaluates every few batches wants no epoch to be waited for."""
    task = scripted_task(*[9, 8, 7, 6, 6, 6, 6, 6, 6], num_batches=5)

    trainer = fit(tmp_path, task, EarlyStopping(patience="3ba"), eval_interval="1ba")

    assert trainer.state.clock.batch == 7
    assert trainer.state.stop_reason == (
        "early-stopping: test/score hasn't improved on 6 (epoch 1, batch 4) in 3ba"
    )


def test_a_metric_that_nobody_computes_is_told(tmp_path):
    """The run would never stop, and nobody would know why."""
    plugin = EarlyStopping(metric="test/score")

    with pytest.warns(UserWarning, match="'test/score', but with eval_interval none nothing"):
        fit(tmp_path, scripted_task(1), plugin, eval_interval=None, max_duration="1ep")


def test_a_patience_in_tokens_needs_tokens(tmp_path):
    """Likewise: where they aren't counted, none ever pass."""
    with pytest.raises(SettingError, match="patience is 5tok, but tokens aren't counted"):
        fit(tmp_path, scripted_task(1), EarlyStopping(patience="5tok"))


class Rows:
    """A callback that keeps what is logged, by name."""

    def __init__(self):
        self.rows = {}

    @hookimpl
    def log(self, state, numbers, at):
        for name, value in numbers.items():
            self.rows.setdefault(name, []).append((at.epoch, value))


LBFGS = {"optimizer": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)}


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({}, {}),
        ({"precision": "bf16", "microbatch_size": 3}, {}),
        ({"precision": "fp16", "microbatch_size": 3}, {}),
        ({"microbatch_size": 3}, LBFGS),
    ],
)
def test_the_loss_in_training_is_the_mean_over_an_epoch(tmp_path, settings, values):
    """However its batches are computed: one batch alone says little."""
    rows = Rows()
    given = {"max_duration": "3ep", "log_interval": "1ba"} | settings
    plugin = EarlyStopping(metric="train/loss", mode="min", patience="9ep")
    with isolated_trainer(
        tmp_path, tiny_task(**values), callbacks=[plugin, rows], **given
    ) as trainer:
        trainer.fit()

    losses = [value for _, value in rows.rows["train/loss"]]
    means = [sum(losses[i : i + 3]) / 3 for i in (0, 3, 6)]
    bests = [min(means[: i + 1]) for i in range(3)]
    assert [value for _, value in rows.rows["early-stopping/best"]] == pytest.approx(bests, 1e-6)
    assert len(set(losses)) == 9


def ranks_stop(folder):
    rows = Rows()
    plugin = EarlyStopping(metric="train/loss", patience="2ep", min_delta=0.02)
    given = {"max_duration": "30ep", "log_interval": "1ba"}
    with isolated_trainer(
        folder, tiny_task(train_dataloader=tiny_batches(4)), callbacks=[plugin, rows], **given
    ) as trainer:
        trainer.fit()
    return trainer.state.clock.epoch, rows.rows["early-stopping/best"], rows.rows["train/loss"]


def test_ranks_stop_together_at_the_mean_of_their_losses(tmp_path):
    """Each sees other batches; one that stopped alone would leave the others waiting."""
    one, other = run_ranks(ranks_stop, tmp_path)

    losses = [value for _, value in one[2]]
    means = [sum(losses[i : i + 2]) / 2 for i in range(0, len(losses), 2)]
    assert one[:2] == other[:2]
    assert one[0] < 30
    assert one[1][0][1] == pytest.approx(means[0], 1e-6)


def test_evaluations_outside_of_a_fit_do_not_count(tmp_path):
    """Somebody who looks at a model doesn't train it."""
    plugin = EarlyStopping(patience="2ep")
    with isolated_trainer(
        tmp_path, scripted_task(3, 4, 5, 6), callbacks=[plugin], max_duration="9ep"
    ) as trainer:
        for until in ("1ep", "2ep"):
            trainer.fit(until=until)
            trainer.eval()
            trainer.eval()

        assert trainer.state.stop_reason is None
        trainer.fit()
        assert trainer.state.clock.epoch == 3


def test_a_run_that_was_stopped_can_be_prolonged(tmp_path):
    """`fit(until=...)` is somebody's wish, so that the patience begins anew."""
    plugin = EarlyStopping(patience="2ep")
    with isolated_trainer(
        tmp_path, scripted_task(3, 4, 4, 4, 4, 4, 2), callbacks=[plugin], max_duration="9ep"
    ) as trainer:
        trainer.fit()
        assert trainer.state.clock.epoch == 3

        trainer.fit(until="20ep")

        assert trainer.state.clock.epoch == 5


def test_without_anything_to_evaluate_the_loss_in_training_is_watched(tmp_path):
    """Installed means active, with the best guess that there is."""
    task = scripted_task(1, eval_dataloaders=None, metrics={})

    trainer = fit(tmp_path, task, EarlyStopping(patience="3ep", min_delta=20))

    assert trainer.state.stop_reason == (
        "early-stopping: train/loss hasn't improved by 20 on 0 (epoch 1, batch 1) in 3ep"
    )


def test_a_metric_that_is_not_evaluated_is_not_guessed(tmp_path):
    """With eval_interval none its value would never come."""
    trainer = fit(tmp_path, plugin=EarlyStopping(patience="1ep", min_delta=9), eval_interval=None)

    assert trainer.state.stop_reason.startswith("early-stopping: train/loss")


class Two(Lower):
    """Gives two results, of which one isn't a number."""

    def compute(self):
        return {"all": super().compute(), "each": torch.zeros(3)}


def test_one_of_several_results_can_be_watched(tmp_path):
    """They have dotted names in the log."""
    task = scripted_task(1, metrics={"two": Two([9, 5, 4, *[4] * 9])})

    trainer = fit(tmp_path, task, EarlyStopping(metric="test/two.all", patience="1ep"))

    assert trainer.state.clock.epoch == 3


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("test/two.each", r"a tensor of shape \(3,\), not one number"),
        ("test/two.none", "the evaluation gave test/two.all, test/two.each"),
    ],
)
def test_a_result_that_is_no_number_is_an_error(tmp_path, metric, message):
    """Only the evaluation shows what a metric with several results gives."""
    task = scripted_task(1, metrics={"two": Two([1] * 20)})

    with pytest.raises(SettingError, match=message):
        fit(tmp_path, task, EarlyStopping(metric=metric))


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"metric": "test/skore"}, {}, "the closest is 'test/score'"),
        ({"metric": "loss"}, {}, "use test/score or test/loss or train/loss"),
        ({"metric": "test/score"}, {}, "doesn't say whether higher is better"),
        ({"patience": "0.5dur"}, {"max_duration": None}, "patience: 0.5dur is a fraction"),
    ],
)
def test_what_cannot_be_watched_is_refused_before_training(tmp_path, options, settings, message):
    """With what there is, and the line to write."""
    task = scripted_task(1, metric=Scripted)

    with pytest.raises(SettingError, match=message):
        fit(tmp_path, task, EarlyStopping(**options), **settings)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mode": "less", "metric": "x"}, ValueError, "mode='less' is none of auto, min, max"),
        ({"mode": "min"}, ValueError, "says nothing without metric"),
        ({"on_nan": "go"}, ValueError, "on_nan='go' is none of wait, stop"),
        ({"min_delta": -1}, ValueError, "min_delta=-1 isn't 0 or a positive number"),
        ({"min_delta": math.nan}, ValueError, "min_delta=nan"),
        ({"min_delta": "x"}, TypeError, "min_delta='x' is not a number"),
        ({"patience": "3 epochs"}, ValueError, "write '3ep'"),
    ],
)
def test_an_option_that_says_nothing_is_refused(options, error, message):
    """With the value that was seen."""
    with pytest.raises(error, match=message):
        EarlyStopping(**options)
