"""Several updates a batch: `state.update`, as a GAN needs it."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torchmetrics import Metric

from eventloop import Task, hookimpl
from eventloop.errors import PluginError
from eventloop_testing import case, isolated_trainer, recorder, run_ranks

NUM_BATCHES = 50
DATA = torch.randn(NUM_BATCHES, 8, 4, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(NUM_BATCHES, 8, 2, generator=torch.Generator().manual_seed(1))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def both_optimizers(model):
    return {
        "D": torch.optim.Adam(model.discriminator.parameters(), lr=1e-2),
        "G": torch.optim.Adam(model.generator.parameters(), lr=1e-2),
    }


def loss_d(model, real, noise):
    fake = model.generator(noise).detach()
    told, fooled = model.discriminator(real), model.discriminator(fake)
    return bce(told, torch.ones_like(told)) + bce(fooled, torch.zeros_like(fooled))


def loss_g(model, noise):
    told = model.discriminator(model.generator(noise))
    return bce(told, torch.ones_like(told))


class Adversarial:
    """Trains the discriminator, then the generator, on each batch."""

    name = "adversarial"

    @hookimpl
    def train_batch(self, state):
        state.update(lambda state: loss_d(state.model, state.inputs, state.targets), ["D"])
        return state.update(lambda state: loss_g(state.model, state.targets), ["G"])


def task(rank=0, world_size=1):
    torch.manual_seed(3)
    batches = [(x[rank::world_size], z[rank::world_size]) for x, z in zip(DATA, NOISE, strict=True)]
    return Task(model=Both, train_dataloader=iter(batches), optimizer=both_optimizers)


def plain(cast):
    torch.manual_seed(0)
    model = Both().to(case.default_device)
    optimizers = both_optimizers(model)
    on_device = (one.to(case.default_device) for one in (DATA, NOISE))
    for real, noise in zip(*on_device, strict=True):
        for name, loss_of in (
            ("D", lambda: loss_d(model, real, noise)),
            ("G", lambda: loss_g(model, noise)),
        ):
            optimizers[name].zero_grad()
            with torch.autocast(case.default_device, dtype=torch.bfloat16, enabled=cast):
                loss = loss_of()
            loss.backward()
            optimizers[name].step()
    return model.cpu().state_dict()


@pytest.fixture
def trained(tmp_path):
    """Trains the two networks; gives their weights."""

    def trained(**settings):
        rank = int(os.environ.get("RANK", "0"))
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        made = task(rank, world_size)
        with isolated_trainer(tmp_path, made, algorithms=[Adversarial()], **settings) as trainer:
            trainer.fit()
            return {name: one.cpu() for name, one in trainer.state.model.state_dict().items()}

    return trained


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_alternating_updates_are_those_of_a_plain_loop(trained, precision):
    """Bit by bit, after 50 batches of two updates each."""
    actual, expected = trained(precision=precision), plain(precision == "bf16")

    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_the_precisions_end_apart(trained):
    """Control: the comparison sees a rounding."""
    actual, expected = trained(precision="bf16"), plain(cast=False)

    assert not all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("microbatch_size", [None, 2, "auto"])
def test_two_ranks_update_as_one_process(trained, microbatch_size):
    """Each update's gradients are averaged, though no forward goes through the wrapper."""
    expected = trained()

    for actual in run_ranks(trained, microbatch_size=microbatch_size):
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-6)


def test_each_update_has_its_events_and_the_batch_its_own(tmp_path):
    """What is told once a batch isn't told again."""
    events = ["before_train_batch", "before_forward", "after_forward", "after_loss", "after_backward",
              "after_train_batch", "batch_end"]  # fmt: skip
    watch = recorder(events)
    plugins = {"algorithms": [Adversarial()], "callbacks": [watch]}
    with isolated_trainer(tmp_path, task(), max_duration="1ba", **plugins) as trainer:
        trainer.fit()

    once = ["before_forward", "after_forward", "after_loss", "after_backward", "after_train_batch"]
    assert watch.seen == ["before_train_batch", *once, *once, "batch_end"]


class Hears:
    """Keeps the names of what is logged."""

    name = "hears"

    def __init__(self):
        self.names = set()

    @hookimpl
    def log(self, state, numbers):
        self.names |= numbers.keys()


def test_each_update_logs_numbers_of_its_own(tmp_path):
    """The losses of two networks aren't one number."""
    hears = Hears()
    plugins = {"algorithms": [Adversarial()], "callbacks": [hears]}
    with isolated_trainer(tmp_path, task(), clip_norm=1.0, **plugins) as trainer:
        trainer.fit()

    expected = {"train/loss.D", "train/loss.G", "train/grad_norm.D", "train/grad_norm.G"}
    assert expected <= hears.names


def test_what_overflowed_skips_the_rest_of_the_batch(tmp_path):
    """In fp16; the generator would learn from a discriminator that was to have moved."""

    class Overflows:
        @hookimpl
        def train_batch(self, state):
            factor = float("inf") if state.clock.batch == 1 else 1.0
            state.update(
                lambda state: factor * loss_d(state.model, state.inputs, state.targets), ["D"]
            )
            return state.update(lambda state: loss_g(state.model, state.targets), ["G"])

    given = {"precision": "fp16", "max_duration": "3ba", "on_bad_loss": "ignore"}
    with isolated_trainer(tmp_path, task(), algorithms=[Overflows()], **given) as trainer:
        weights = []
        for until in ("1ba", "2ba", "3ba"):
            trainer.fit(until=until)
            weights.append([one.clone() for one in trainer.state.model.state_dict().values()])

    first, second, third = weights
    assert all(map(torch.equal, first, second))
    assert not any(map(torch.equal, second, third))


@pytest.mark.filterwarnings("ignore:out of memory")
def test_an_update_that_does_not_fit_repeats_itself_alone(tmp_path):
    """The one before it has moved its network already."""
    sizes = []

    class Small:
        @hookimpl
        def train_batch(self, state):
            state.update(lambda state: loss_d(state.model, state.inputs, state.targets), ["D"])
            return state.update(self.their_loss, ["G"])

        def their_loss(self, state):
            sizes.append(len(state.inputs))
            if sizes[-1] > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return loss_g(state.model, state.targets)

    given = {"microbatch_size": "auto", "max_duration": "1ba"}
    with isolated_trainer(tmp_path, task(), algorithms=[Small()], **given) as trainer:
        trainer.fit()
        optimizers = trainer.state.optimizers.values()
        steps = [one["step"].item() for each in optimizers for one in each.state.values()]

    assert sizes == [8, 4, 4]
    assert set(steps) == {1.0}


class SumMetric(Metric):
    """Adds the outputs up."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, outputs, targets):
        self.total += outputs.sum()

    def compute(self):
        return self.total


def test_train_metrics_take_the_outputs_that_an_update_leaves(tmp_path):
    """The others have none to give."""

    class Leaves:
        @hookimpl
        def train_batch(self, state):
            state.update(self.their_loss, ["D"])
            return state.update(lambda state: loss_g(state.model, state.targets), ["G"])

        def their_loss(self, state):
            state.outputs = torch.ones(len(state.inputs))
            return loss_d(state.model, state.inputs, state.targets)

    made = task()
    made.train_metrics = {"outputs": SumMetric()}
    with isolated_trainer(tmp_path, made, algorithms=[Leaves()], max_duration="3ba") as trainer:
        trainer.fit()

    assert trainer.state.train_metrics["outputs"] == 3 * 8


class Misspells:
    """Names an optimizer that isn't there."""

    name = "misspells"

    @hookimpl
    def train_batch(self, state):
        return state.update(lambda state: loss_g(state.model, state.targets), ["GG"])


def test_an_optimizer_that_is_not_there_is_an_error(tmp_path):
    """Instead of an update of nothing."""
    with (
        isolated_trainer(tmp_path, task(), algorithms=[Misspells()]) as trainer,
        pytest.raises(PluginError, match=r"no optimizer is named 'GG'; the closest is 'G'"),
    ):
        trainer.fit()
