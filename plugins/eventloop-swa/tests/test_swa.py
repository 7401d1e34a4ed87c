"""The plugin in a training."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from eventloop import PluginError, SettingError, hookimpl, schedules
from eventloop.data import collated
from eventloop_ema import Ema
from eventloop_swa import Swa
from eventloop_testing import isolated_trainer, tiny_batches, tiny_task


def with_norm(dropout=0.0):
    return nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)
    )


def shuffled():
    inputs, targets = map(torch.cat, zip(*tiny_batches(3), strict=True))
    return DataLoader(TensorDataset(inputs, targets), 4, shuffle=True)


class Sees:
    """Keeps the trained weights after each batch, and those that evaluation and prediction see."""

    name = "sees"

    def __init__(self, fails_at=None):
        self.trained, self.rates, self.seen = [], [], []
        self.fails_at = fails_at

    @hookimpl
    def batch_end(self, state):
        self.trained.append(weights_of(state.model))
        self.rates.append(state.optimizers["sgd"].param_groups[0]["lr"])

    @hookimpl
    def eval_after_all(self, state):
        self.seen.append(weights_of(state.model))
        if state.clock.epoch == self.fails_at:
            raise ArithmeticError

    @hookimpl
    def predict_end(self, state):
        self.seen.append(weights_of(state.model))


def weights_of(model):
    """Returns weights and statistics."""
    found = [one for one in model.state_dict().values() if one.is_floating_point()]
    return torch.cat([one.flatten() for one in found]).clone()


def on_host(weights):
    return [one.cpu() for one in weights]


def run(folder, *algorithms, task=None, duration="4ep", sees=None, **settings):
    """Trains 4 epochs of 3 batches; gives the trained and the exported weights."""
    sees = sees or Sees()
    given = {"algorithms": [*algorithms, sees], "max_duration": duration} | settings
    with isolated_trainer(folder, task, **given) as trainer:
        trainer.fit()
        trainer.predict(tiny_batches(1))
        found = load_file(trainer.export(folder / "model.safetensors"))
        names = [
            key for key, one in trainer.state.model.state_dict().items() if one.is_floating_point()
        ]
        exported = torch.cat([found[name].flatten() for name in names])
        sees.trained, sees.seen = on_host(sees.trained), on_host(sees.seen)
        return weights_of(trainer.state.model).cpu(), exported, sees


def by_hand(start=2):
    """Trains as torch's documentation says."""
    torch.manual_seed(0)
    model = with_norm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averaged = AveragedModel(model)
    for epoch in range(4):
        for inputs, targets in tiny_batches(3):
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch + 1 >= start:
            averaged.update_parameters(model)
    update_bn(tiny_batches(3), averaged)
    return weights_of(averaged.module)


def test_a_run_ends_with_the_average_of_a_loop_written_by_hand(tmp_path):
    """Weights and statistics are those of torch's AveragedModel and update_bn."""
    _, exported, sees = run(tmp_path, Swa(start="0.5dur"), task=tiny_task(model=with_norm))

    torch.testing.assert_close(exported, by_hand(), rtol=0, atol=1e-6)
    assert not torch.allclose(exported, by_hand(start=3), atol=1e-4)
    assert all(torch.equal(one, exported) for one in sees.seen[-2:])


class Twice:
    """Asks for the gradient a second time before each step."""

    @hookimpl(wrapper=True)
    def optimizer_step(self, state, optimizers, closure):
        closure()
        return (yield)


@pytest.mark.parametrize(
    ("algorithms", "settings"),
    [
        ((), {"microbatch_size": 3}),
        ((), {"precision": "bf16"}),
        ((), {"precision": "fp16"}),
        ((Twice(),), {"microbatch_size": 3}),
    ],
    ids=["microbatches", "bf16", "fp16", "closure"],
)
def test_the_average_is_the_mean_in_float64(tmp_path, algorithms, settings):
    """However the steps are made: the mean of the weights at the ends of epochs 2, 3 and 4."""
    _, exported, sees = run(tmp_path, Swa(start="2ep"), *algorithms, **settings)

    expected = torch.stack([sees.trained[idx].double() for idx in (5, 8, 11)]).mean(0)
    torch.testing.assert_close(exported.double(), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(exported.double(), sees.trained[-1].double(), atol=1e-3)


def test_weights_of_few_bits_are_averaged_in_float32(tmp_path):
    """Their mean is rounded once, not after each of the 12 weights that are added to it."""
    task = tiny_task(
        model=lambda: nn.Linear(3, 3).bfloat16(),
        forward=lambda model, batch: model(batch[0].bfloat16()),
    )

    _, exported, sees = run(tmp_path, Swa(start="1ba", interval="1ba"), task=task)

    expected = torch.stack(sees.trained).double().mean(0)
    torch.testing.assert_close(exported.double(), expected, rtol=2**-8, atol=0)
    assert exported.dtype == torch.bfloat16


@pytest.mark.parametrize("interval", ["4ba", "16sp"])
def test_an_interval_has_any_unit(tmp_path, interval):
    """After batches 8 and 12, which aren't the ends of epochs."""
    _, exported, sees = run(tmp_path, Swa(start="5ba", interval=interval))

    expected = torch.stack([sees.trained[idx].double() for idx in (7, 11)]).mean(0)
    torch.testing.assert_close(exported.double(), expected, rtol=0, atol=1e-6)


def test_a_start_may_lie_within_an_epoch(tmp_path):
    """A run of one long epoch would never come to three quarters of it otherwise."""
    _, exported, sees = run(tmp_path, Swa(start="0.6dur", interval="1ba"), duration="1ep")

    expected = torch.stack([sees.trained[idx].double() for idx in (1, 2)]).mean(0)
    torch.testing.assert_close(exported.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{"start": "9ep"}, {"interval": "9ep"}, {"start": "99tok"}])
def test_a_run_that_averages_nothing_says_so(tmp_path, options):
    """Its numbers would be taken for those of the mean."""
    with pytest.warns(UserWarning, match=r"swa has averaged nothing: it starts at .*Swa\(start="):
        run(tmp_path, Swa(**options), duration="1ep")


def test_the_training_is_the_one_without_it(tmp_path):
    """Order of the data and dropout included, though the data were gone through in between."""
    given = {"eval_interval": "2ba"}

    def task():
        return tiny_task(model=lambda: with_norm(0.5), train_dataloader=shuffled)

    trained, exported, sees = run(tmp_path / "with", Swa(start="1ep"), task=task(), **given)
    expected, _, plain = run(tmp_path / "without", task=task(), **given)

    assert torch.equal(trained, expected)
    assert all(torch.equal(*pair) for pair in zip(sees.trained, plain.trained, strict=True))
    assert not torch.allclose(exported, trained, atol=1e-3)


def test_the_weights_are_evaluated_until_averaging_has_begun(tmp_path):
    """A mean of nothing would be evaluated otherwise."""
    _, _, sees = run(tmp_path, Swa(start="3ep"))

    same = [torch.equal(sees.seen[idx], sees.trained[3 * idx + 2]) for idx in range(4)]
    assert same == [True, True, True, False]


def test_the_weights_are_back_after_a_failure(tmp_path):
    """Whoever catches the exception goes on training with what was trained."""
    sees = Sees(fails_at=3)
    given = {"algorithms": [Swa(start="1ep"), sees], "max_duration": "4ep"}
    with isolated_trainer(tmp_path, tiny_task(model=with_norm), **given) as trainer:
        with pytest.raises(ArithmeticError):
            trainer.fit()

        assert torch.equal(weights_of(trainer.state.model), sees.trained[-1])
        assert not torch.equal(sees.seen[-1], sees.trained[-1])


def test_loaded_weights_are_evaluated_themselves(tmp_path):
    """The mean is that of other weights."""
    sees = Sees()
    given = {"algorithms": [Swa(start="1ep"), sees], "max_duration": "3ep"}
    with isolated_trainer(tmp_path, tiny_task(model=with_norm), **given) as trainer:
        trainer.fit()
        trainer.export(tmp_path / "model.safetensors")
        expected = sees.seen[-1]
        trainer.load_weights(tmp_path / "model.safetensors")
        trainer.eval()

    assert torch.equal(sees.seen[-1], expected)
    assert torch.equal(weights_of(trainer.state.model), expected)


def test_weights_of_a_run_are_evaluated_as_the_run_did(tmp_path):
    """With the mean and its statistics, and not with ema's averages, which the mean hides."""
    sees = Sees()
    given = {"algorithms": [Ema(), Swa(start="1ep"), sees], "max_duration": "3ep"}
    task = tiny_task(model=with_norm)
    with isolated_trainer(tmp_path, task, checkpoint_interval="1ep", **given) as trainer:
        trainer.fit()
        expected, run = sees.seen[-1], trainer.state.run_dir

    given["algorithms"] = [Ema(), Swa(start="1ep"), sees]
    with isolated_trainer(tmp_path / "new", tiny_task(model=with_norm), **given) as other:
        other.load_weights(run, as_evaluated=True)
        other.eval()

    assert torch.equal(sees.seen[-1], expected)
    assert not torch.equal(weights_of(other.state.model), expected)


@pytest.mark.parametrize("scheduler", [None, schedules.cosine()])
def test_the_learning_rate_is_the_given_one_from_the_start_on(tmp_path, scheduler):
    """High and constant, as the paper has it, whatever the schedule does."""
    task = tiny_task(scheduler=scheduler)

    _, _, sees = run(tmp_path, Swa(start="0.5dur", lr=0.03), task=task)
    _, _, plain = run(tmp_path / "plain", Swa(start="0.5dur"), task=tiny_task(scheduler=scheduler))

    assert sees.rates[6:] == [0.03] * 6
    assert sees.rates[:6] == plain.rates[:6]
    assert 0.03 not in plain.rates[6:]


def test_with_ema_the_mean_is_seen_once_it_has_begun(tmp_path):
    """Each averages what was trained, not what the other makes of it."""
    plugins = [Ema(half_life="2ba"), Swa(start="3ep")]
    _, both, sees = run(tmp_path / "both", *plugins)
    _, of_swa, _ = run(tmp_path / "swa", Swa(start="3ep"))
    _, _, of_ema = run(tmp_path / "ema", Ema(half_life="2ba"))

    assert torch.equal(both, of_swa)
    same = [torch.equal(*pair) for pair in zip(sees.seen, of_ema.seen, strict=True)]
    assert same == [True, True, False, False, False]


def test_statistics_of_few_batches_differ(tmp_path):
    """Where an epoch is long, some of it will do."""
    task = tiny_task(model=with_norm)
    torch.manual_seed(0)
    model = with_norm()

    _, _, sees = run(tmp_path, Swa(start="0.5dur", bn_batches=1), task=task)

    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    update_bn(tiny_batches(3)[:1], model)
    torch.testing.assert_close(sees.seen[-1], weights_of(model), rtol=0, atol=1e-6)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(tiny_batches(3))


def test_statistics_are_estimated_from_batches_in_parts_too(tmp_path):
    """A loader of `collated` gives each batch as Microbatches."""
    inputs, targets = (torch.cat(one) for one in zip(*tiny_batches(3), strict=True))
    collate_fn = collated(default_collate, microbatch_size=2)
    loader = DataLoader(TensorDataset(inputs, targets), 4, collate_fn=collate_fn)
    task = tiny_task(model=with_norm, train_dataloader=loader)

    _, exported, sees = run(tmp_path, Swa(start="1ep"), task=task)

    assert torch.isfinite(exported).all()
    assert not torch.equal(exported, sees.trained[-1])


def test_a_stream_can_be_averaged_over_but_not_seen_again(tmp_path):
    """Only where there are statistics to estimate does it matter."""
    loader = DataLoader(Stream(), batch_size=None)
    _, exported, sees = run(tmp_path, Swa(start="3ep"), task=tiny_task(train_dataloader=loader))

    assert not torch.equal(exported, sees.trained[-1])
    with pytest.raises(PluginError, match="batch norms need the training data once more, but"):
        run(tmp_path, Swa(), task=tiny_task(model=with_norm, train_dataloader=loader))


def test_a_fraction_of_an_endless_run_is_refused(tmp_path):
    """Nobody knows when three quarters of it are over."""
    with pytest.raises(PluginError, match=r"it starts at 0.75dur, but max_duration is not set"):
        run(tmp_path, Swa(), duration=None)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"lr": 0}, ValueError, "lr=0 isn't a positive number"),
        ({"lr": float("nan")}, ValueError, "lr=nan"),
        ({"lr": "x"}, TypeError, "lr='x' is not a number"),
        ({"bn_batches": 0}, ValueError, "bn_batches=0 isn't 1 or more"),
        ({"bn_batches": 1.5}, TypeError, "bn_batches=1.5"),
        ({"start": "3"}, ValueError, "'3' is not a time"),
        ({"interval": "0ep"}, ValueError, "above zero"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, error, match):
    """At once, with the value that was given."""
    with pytest.raises(error, match=match):
        Swa(**options)


def test_an_interval_of_unknown_length_is_refused(tmp_path):
    """Nobody knows how many batches half an epoch of a stream has."""
    task = tiny_task(train_dataloader=DataLoader(Stream(), batch_size=None))

    with pytest.raises(SettingError, match=r"swa\.interval: 0.5ep is a fraction"):
        run(tmp_path, Swa(interval="0.5ep"), task=task)
