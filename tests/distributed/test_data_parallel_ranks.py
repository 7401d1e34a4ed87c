"""Several ranks train what one process would, on real gloo processes."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric, Metric, SumMetric

from eventloop import Task, TaskError, hookimpl
from eventloop.distributed import join_processes
from eventloop_testing import isolated_trainer, run_ranks, tiny_task
from eventloop_testing.ranks import RankError

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(48, 3, generator=GENERATOR)
Y = X.argmax(1)
OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def mlp():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))


def with_batch_norm():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def fit(tmp_path):
    """Trains three epochs over 48 samples; gives weights and buffers, metrics, moment, history."""
    numbers = itertools.count()

    def fit(batch_size=8, optimizer="sgd", plugins=(), task=None, **settings):
        given = {
            "model": mlp,
            "loss": cross_entropy,
            "train_dataloader": DataLoader(TensorDataset(X, Y), batch_size),
            "optimizer": OPTIMIZERS[optimizer],
        } | (task or {})
        settings = {"max_duration": "3ep", **settings}
        folder = tmp_path / str(next(numbers))
        with isolated_trainer(folder, Task(**given), algorithms=plugins, **settings) as trainer:
            result = trainer.fit()
            weights = {name: one.clone() for name, one in trainer.state.model.state_dict().items()}
            moment = trainer.state.clock.moment()._replace(seconds=0)
            return weights, result.metrics, moment, result.history

    return fit


def assert_near(actual, expected, tolerance=1e-6):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=tolerance)


@pytest.mark.sampled(21)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_ranks_end_with_the_weights_of_one_process(
    fit, optimizer, microbatches, world_size, clip_norm
):
    """Gradients are averaged over the global batch, however it is spread, and then clipped."""
    shared = {"optimizer": optimizer, "clip_norm": clip_norm, "microbatch_size": 16 // microbatches}
    expected, _, moment, _ = fit(16, **shared)

    shared["microbatch_size"] = max(1, 16 // world_size // microbatches)
    results = run_ranks(fit, 16 // world_size, world_size=world_size, **shared)

    for actual, _, theirs, _ in results:
        assert_near(actual, expected)
        assert theirs == moment


def test_another_global_batch_ends_elsewhere(fit):
    """Control: the comparison sees that half of the samples are missing."""
    expected, *_ = fit(16)
    (actual, *_), _ = run_ranks(fit, 4)

    with pytest.raises(AssertionError):
        assert_near(actual, expected)


@pytest.mark.parametrize("microbatch_size", [None, 8])
def test_batch_norm_over_all_ranks_is_that_of_one_process(fit, microbatch_size):
    """Where it is asked for, means and variances are those of the global batch."""
    task = {"model": with_batch_norm}
    sizes = [None, None] if microbatch_size is None else [microbatch_size, microbatch_size // 2]
    expected, *_ = fit(16, task=task, microbatch_size=sizes[0])
    settings = {"sync_batch_norm": True, "microbatch_size": sizes[1]}

    for actual, *_ in run_ranks(fit, 8, task=task, **settings):
        assert_near(actual, expected, 2e-6)


def test_batch_norm_of_each_rank_alone_ends_elsewhere(fit):
    """Control: without being asked, each rank normalises its own samples."""
    expected, *_ = fit(16, task={"model": with_batch_norm})
    (actual, *_), _ = run_ranks(fit, 8, task={"model": with_batch_norm})

    with pytest.raises(AssertionError):
        assert_near(actual, expected, 2e-6)


class Seen(SumMetric):
    """How many samples were evaluated."""

    def update(self, outputs, targets):
        super().update(torch.ones(len(targets)))


class MeanTarget(Metric):
    """The mean of the targets, in float64."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, outputs, targets):
        self.total += (targets.double() / 7).sum()
        self.num += len(targets)

    def compute(self):
        return self.total / self.num


@pytest.mark.sampled(12)
@pytest.mark.parametrize("num_samples", [103, 4, 1])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_is_evaluated_once(fit, num_samples, shuffle):
    """Also where their number doesn't divide by the ranks, and where ranks have none."""
    given = torch.arange(num_samples * 3.0).view(-1, 3)
    targets = torch.arange(num_samples) % 3
    loader = DataLoader(TensorDataset(given, targets), 5, shuffle=shuffle)
    task = {
        "eval_dataloaders": {"test": loader},
        "metrics": {"seen": Seen(), "mean": MeanTarget()},
    }

    for world_size in (2, 3):
        for _, metrics, *_ in run_ranks(fit, task=task, max_duration="1ba", world_size=world_size):
            mean = (targets.double() / 7).mean()
            assert metrics["test"]["seen"] == num_samples
            torch.testing.assert_close(metrics["test"]["mean"].cpu(), mean, rtol=0, atol=1e-12)


def test_the_loss_is_that_of_the_global_batch(fit):
    """In what is logged and in the history, on every rank."""
    *_, expected = fit(16, max_duration="4ba")

    for *_, history in run_ranks(fit, 8, max_duration="4ba"):
        assert history[-1]["train/loss"] == pytest.approx(expected[-1]["train/loss"], abs=1e-6)


class Listens:
    """Keeps what is logged; logs the rank, once for each way to reduce it."""

    name = "listens"

    def __init__(self):
        self.rows = []

    @hookimpl
    def batch_end(self, state):
        for reduce in (None, "sum", "mean"):
            state.log(f"listens/{reduce}", torch.tensor(float(state.rank)), reduce)

    @hookimpl
    def log(self, state, numbers):
        self.rows.append(numbers)


def test_numbers_are_reduced_as_asked(tmp_path):
    """None keeps a rank's own, of which loggers see that of rank 0."""

    def rows():
        listens = Listens()
        task = tiny_task(eval_dataloaders=None)
        with isolated_trainer(tmp_path, task, algorithms=[listens], log_interval="2ba") as trainer:
            trainer.fit()
        return listens.rows

    for rank, logged in enumerate(run_ranks(rows, world_size=3)):
        assert len(logged) == 1
        (row,) = logged
        assert row["listens/None"] == rank
        assert row["listens/sum"] == 3
        assert row["listens/mean"] == 1


class LogsOwnNames:
    """Logs a number to be averaged: of another name, or at another batch, on each rank."""

    name = "own"

    def __init__(self, names, at=(0, 0)):
        self.names, self.at = names, at

    @hookimpl
    def batch_end(self, state):
        if state.clock.batch > self.at[state.rank] and self.names[state.rank]:
            state.log(self.names[state.rank], 1.0 + state.rank, "mean")

    @hookimpl
    def log(self, state, numbers):
        pass


@pytest.mark.parametrize(
    ("names", "at", "message"),
    [
        (("own/cats", "own/dogs"), (0, 0), "rank 0 logged 'own/cats', rank 1 logged 'own/dogs'"),
        (("own/cats", None), (0, 0), "rank 0 logged 'own/cats', rank 1 logged nothing"),
        (("own/cats", "own/cats"), (0, 1), "rank 0 logged 'own/cats', rank 1 logged nothing"),
    ],
)
def test_one_name_is_never_averaged_into_another(tmp_path, names, at, message):
    """The sums travel without their names; other numbers of them would leave a rank waiting."""

    def fit():
        task, plugin = tiny_task(eval_dataloaders=None), LogsOwnNames(names, at)
        with isolated_trainer(tmp_path, task, algorithms=[plugin], max_duration="4ba") as trainer:
            trainer.fit()

    with pytest.raises(RankError, match=message):
        run_ranks(fit, timeout_s=30)


def test_fewer_samples_than_ranks_are_refused(fit):
    """A rank without a sample has nothing to train on."""
    task = {"train_dataloader": DataLoader(TensorDataset(X[:1], Y[:1]))}

    with pytest.raises(
        RankError, match=r"1 sample, fewer than the 2 ranks[\s\S]*1 process at most"
    ):
        run_ranks(fit, task=task)


def test_each_rank_draws_numbers_of_its_own(tmp_path):
    """Dropout masks differ; weights were drawn alike."""

    def draw():
        with isolated_trainer(tmp_path / str(torch.distributed.is_initialized())) as trainer:
            drawn = torch.rand(3)
            return next(trainer.state.model.parameters()).detach(), drawn

    (weights, drawn), (same, other) = run_ranks(draw)

    assert torch.equal(weights, same)
    assert not torch.equal(drawn, other)


class StopsOnRank:
    """Asks one rank's run to stop at its second batch."""

    name = "stops"

    @hookimpl
    def batch_end(self, state):
        if state.rank == 1 and state.clock.batch == 2:
            state.request_stop("rank 1 is tired")
            state.request_checkpoint()


class Saves:
    """Owns save_checkpoint, and notes when it is asked."""

    name = "saves"

    def __init__(self):
        self.at = []

    @hookimpl
    def save_checkpoint(self, state):
        self.at.append(state.clock.batch)
        return state.run_dir


def test_what_one_rank_asks_for_all_do_a_batch_later(tmp_path):
    """They leave the loop at the same batch, with the reason of the one that asked."""

    def run():
        saves = Saves()
        plugins = [StopsOnRank(), saves]
        folder, task = tmp_path / "run", tiny_task(train_dataloader=[(X[:4], Y[:4])] * 16)
        with isolated_trainer(folder, task, algorithms=plugins, max_duration="9ep") as trainer:
            trainer.fit()
            return trainer.state.clock.batch, trainer.state.stop_reason, saves.at

    assert run_ranks(run) == [(3, "rank 1 is tired", [3])] * 2


def test_a_parameter_unused_on_one_rank_is_named(tmp_path):
    """It fails instead of waiting for ever, and with the setting it trains."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, inputs):
            outputs = self.left(inputs)
            return outputs if torch.distributed.get_rank() else outputs + self.right(inputs)

    def run(**settings):
        task = Task(
            model=Branches,
            loss=cross_entropy,
            train_dataloader=[(X[:4], Y[:4])] * 4,
            optimizer=OPTIMIZERS["sgd"],
        )
        with isolated_trainer(tmp_path / "run", task, **settings) as trainer:
            trainer.fit()
            return trainer.state.model.right.weight.clone()

    with pytest.raises(RankError, match=r"find_unused_parameters"):
        run_ranks(run, timeout_s=30)
    one, other = run_ranks(run, find_unused_parameters=True, timeout_s=30)
    assert torch.equal(one, other)


def test_ranks_evaluate_a_task_without_training_data(tmp_path):
    """There is nothing to split; a fit says what is missing, as in one process."""

    def evaluate():
        data = DataLoader(TensorDataset(X, Y), 8)
        task = Task(model=mlp, loss=cross_entropy, eval_dataloaders=data)
        with isolated_trainer(tmp_path / "run", task) as trainer:
            metrics = trainer.eval()
            with pytest.raises(TaskError, match="train"):
                trainer.fit("1ep")
        return float(metrics["eval"]["loss"])

    expected = evaluate()

    for actual in run_ranks(evaluate):
        assert actual == pytest.approx(expected)


def gathered_by(values):
    """Gathers a value that all ranks have or one that each has of its own; counts what is sent."""
    sent = []
    send, torch.distributed.all_gather_object = (
        torch.distributed.all_gather_object,
        lambda *given, **named: (sent.append(1), send(*given, **named)),
    )
    processes = join_processes()
    got = processes.all_gather(values[processes.rank])
    return got, got[0] is got[1], len(sent), processes.from_first(values[processes.rank])


@pytest.mark.parametrize(
    ("values", "num_sent"),
    [
        ([{"a": [1]}, {"a": [1]}], 0),
        ([None, None], 0),
        ([{"a": [1]}, {"a": [2]}], 1),
        ([0, False], 1),
        ([None, ValueError("no")], 1),
    ],
)
def test_what_all_ranks_have_alike_is_not_sent(values, num_sent):
    """It would grow with their number. What is gathered may be changed, each by itself."""
    for got, is_shared, sent, first in run_ranks(gathered_by, values):
        assert list(map(repr, got)) == list(map(repr, values))
        assert sent == num_sent
        assert not is_shared or values[0] is None
        assert first == values[0]


def test_metrics_of_training_leave_out_batches_that_pad(tmp_path):
    """A rank that has run out of batches repeats one that counts for nothing."""

    class Stream(IterableDataset):
        def __iter__(self):
            num = 12 if os.environ["RANK"] == "0" else 4
            return iter([(torch.zeros(3), int(os.environ["RANK"]))] * num)

    class MeanOfTargets(MeanMetric):
        def update(self, outputs, targets):
            super().update(targets.float())

    def train():
        task = Task(
            model=lambda: nn.Linear(3, 3),
            loss=cross_entropy,
            train_dataloader=DataLoader(Stream(), 4),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            train_metrics={"rank": MeanOfTargets()},
        )
        with isolated_trainer(tmp_path, task, max_duration="1ep") as trainer:
            return trainer.fit().history[-1]["train/rank"]

    assert run_ranks(train) == [0.25, 0.25]
