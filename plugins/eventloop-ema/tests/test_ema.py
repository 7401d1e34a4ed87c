"""The plugin in a training."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from eventloop import PluginError, SettingError, hookimpl
from eventloop_ema import Ema
from eventloop_testing import isolated_trainer, tiny_batches, tiny_task


class Steps:
    """Keeps the weights after each batch, and whether it had a step."""

    name = "steps"

    def __init__(self):
        self.weights = []

    @hookimpl
    def batch_end(self, state):
        self.weights.append(weights_of(state.model))

    def averaged(self, decay):
        """The paper's formula in float64; a batch that left the weights alone had no step."""
        average, last = None, None
        for weights in on_host(self.weights):
            if average is None:
                average = weights.double()
            elif not torch.equal(weights, last):
                average = decay * average + (1 - decay) * weights.double()
            last = weights
        return average


def weights_of(model):
    return torch.cat([one.detach().flatten().clone() for one in model.parameters()])


def on_host(weights):
    return [one.cpu() for one in weights]


def exported(trainer, folder):
    """Returns the weights of an exported file, in the model's order."""
    found = load_file(trainer.export(folder / "model.safetensors"))
    return torch.cat([found[name].flatten() for name, _ in trainer.state.model.named_parameters()])


def fit(folder, *algorithms, callbacks=(), task=None, ema=None, observers=(), **settings):
    """Trains 4 epochs of 3 batches; gives the exported weights, those trained, and the steps."""
    steps = Steps()
    plugins = [*algorithms, ema or Ema(decay=0.8, rampup=0)]
    given = {"max_duration": "4ep", "callbacks": [steps, *callbacks], "observers": observers}
    with isolated_trainer(folder, task, algorithms=plugins, **given | settings) as trainer:
        trainer.fit()
        steps.weights = on_host(steps.weights)
        return exported(trainer, folder), weights_of(trainer.state.model).cpu(), steps


def assert_averaged(found, decay=0.8, tolerance=1e-6):
    actual, trained, steps = found
    torch.testing.assert_close(actual.double(), steps.averaged(decay), rtol=0, atol=tolerance)
    for other in (steps.averaged(0.7), trained.double()):
        assert not torch.allclose(actual.double(), other, atol=1e-3)


class Twice:
    """Asks for the gradient a second time before each step."""

    @hookimpl(wrapper=True)
    def optimizer_step(self, state, optimizers, closure):
        closure()
        return (yield)


@pytest.mark.parametrize(
    ("algorithms", "settings"),
    [
        ((), {}),
        ((), {"microbatch_size": 3}),
        ((), {"microbatch_size": "auto"}),
        ((), {"precision": "bf16"}),
        ((Twice(),), {"microbatch_size": 3}),
    ],
    ids=["plain", "microbatches", "auto", "bf16", "closure"],
)
def test_the_average_is_that_of_the_weights_after_each_step(tmp_path, algorithms, settings):
    """However a step is made, there is one of it."""
    assert_averaged(fit(tmp_path, *algorithms, **settings))


class Overflows:
    """Gives some batches a gradient that is not a number."""

    name = "overflows"

    @hookimpl
    def after_backward(self, state):
        if state.clock.batch in (0, 4, 11):
            for param in state.model.parameters():
                param.grad.fill_(torch.inf)


def test_a_step_that_fp16_skips_moves_nothing(tmp_path, no_device_reads):
    """The weights are the old ones, and would count twice; the loop doesn't wait to know it."""
    found = fit(tmp_path, Overflows(), precision="fp16", observers=[no_device_reads])

    steps = found[2]
    pairs = zip(steps.weights, steps.weights[1:], strict=False)
    num_skipped = sum(torch.equal(*pair) for pair in pairs)
    assert num_skipped >= 2
    assert_averaged(found)
    everywhere = steps.weights[0].double()
    for weights in steps.weights[1:]:
        everywhere = 0.8 * everywhere + 0.2 * weights.double()
    assert not torch.allclose(found[0].double(), everywhere, atol=1e-3)


class Skips:
    """Leaves a batch out, and the gradients of another one unused."""

    @hookimpl
    def should_skip_batch(self, state):
        return state.clock.batch == 2

    @hookimpl
    def should_skip_step(self, state):
        return state.clock.batch in (3, 7)


def test_a_batch_without_a_step_moves_nothing(tmp_path):
    """Whoever skipped it."""
    assert_averaged(fit(tmp_path, Skips()))


class Owner:
    """Trains in a way of its own, which knows nothing of `optimizer_step`."""

    name = "owner"

    @hookimpl
    def train_batch(self, state):
        inputs, targets = state.batch
        nn.functional.cross_entropy(state.model(inputs), targets).backward()
        state.optimizers["optimizer"].step()
        state.optimizers["optimizer"].zero_grad()
        return True


def test_a_step_of_an_owner_counts(tmp_path):
    """An owner of `train_batch` says whether it made one."""
    task = tiny_task(
        optimizer=lambda model: {"optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    )

    assert_averaged(fit(tmp_path, Owner(), task=task))


class Shrinks:
    """Projects the weights when a batch is done."""

    name = "zz-shrinks"

    @hookimpl
    def batch_end(self, state):
        with torch.no_grad():
            for param in state.model.parameters():
                param.mul_(0.9)


def test_weights_are_averaged_as_the_batch_leaves_them(tmp_path):
    """An average of weights from outside of the bounds that somebody keeps would be outside."""
    assert_averaged(fit(tmp_path, Shrinks()))


class Surgeon:
    """Puts another model in the task's place."""

    name = "zz-surgeon"

    @hookimpl
    def init(self, state):
        new = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
        state.model = new.to(state.device)


def test_a_model_that_surgery_changed_is_averaged(tmp_path):
    """Its parameters, not those of the model that was built."""
    found = fit(tmp_path, Surgeon())

    assert found[0].numel() == 38
    assert_averaged(found)


def test_the_training_is_the_one_without_it(tmp_path):
    """The averages are looked at, not trained on."""
    _, trained, _ = fit(tmp_path / "with")

    with isolated_trainer(tmp_path / "without", max_duration="4ep") as trainer:
        trainer.fit()

    assert torch.equal(trained, weights_of(trainer.state.model).cpu())


class Sees:
    """Keeps the weights that evaluation and prediction see; may fail there."""

    name = "sees"

    def __init__(self, fails=False):
        self.seen = []
        self.fails = fails

    @hookimpl
    def eval_before_forward(self, state):
        self.seen.append(weights_of(state.model))
        if self.fails:
            raise ArithmeticError

    @hookimpl
    def predict_before_forward(self, state):
        self.seen.append(weights_of(state.model))


def test_evaluation_prediction_and_export_see_the_averages(tmp_path):
    """All that is done with a trained model is done with the same one."""
    sees = Sees()
    with isolated_trainer(tmp_path, algorithms=[Ema(decay=0.8, rampup=0), sees]) as trainer:
        trainer.fit()
        trainer.predict(tiny_batches(1))
        expected = exported(trainer, tmp_path)

        assert len(sees.seen) == 3
        assert all(torch.equal(one, expected) for one in on_host(sees.seen))
        assert not torch.equal(expected, weights_of(trainer.state.model).cpu())


def test_the_weights_are_back_after_a_failure(tmp_path):
    """Whoever catches the exception goes on training with what was trained."""
    plugins = [Ema(decay=0.8, rampup=0), Sees(fails=True)]
    with isolated_trainer(tmp_path, algorithms=plugins, eval_interval="10ep") as trainer:
        with pytest.raises(ArithmeticError):
            trainer.fit()
        after = weights_of(trainer.state.model)
    with isolated_trainer(tmp_path / "plain", tiny_task(eval_dataloaders=None)) as plain:
        plain.fit()

    assert torch.equal(after, weights_of(plain.state.model))


def test_loaded_weights_are_evaluated_themselves(tmp_path):
    """The averages are those of other weights; they begin anew with the next training."""
    sees = Sees()
    with isolated_trainer(tmp_path, algorithms=[Ema(decay=0.8, rampup=0), sees]) as trainer:
        trainer.fit()
        expected = exported(trainer, tmp_path)
        trainer.load_weights(tmp_path / "model.safetensors")
        trainer.eval()

    for seen in on_host([sees.seen[-1], weights_of(trainer.state.model)]):
        assert torch.equal(seen, expected)


def test_weights_of_a_run_are_evaluated_as_the_run_did(tmp_path):
    """`eventloop eval --weights RUN` gives the numbers that the run has printed."""
    sees = Sees()
    given = {"max_duration": "2ep", "checkpoint_interval": "1ep"}
    plugins = [Ema(decay=0.8, rampup=0), sees]
    with isolated_trainer(tmp_path, algorithms=plugins, **given) as trainer:
        trainer.fit()
        trained, expected = weights_of(trainer.state.model), sees.seen[-1]
    run = trainer.state.run_dir

    with isolated_trainer(tmp_path / "new", algorithms=[Ema(), sees]) as other:
        other.load_weights(run, as_evaluated=True)
        other.eval()
        seen = sees.seen[-1]
        other.load_weights(run)
        other.eval()

    assert torch.equal(seen, expected)
    assert torch.equal(sees.seen[-1], trained)
    assert not torch.equal(trained, expected)


@pytest.fixture(scope="module")
def after_six_batches(tmp_path_factory):
    """The averages with a half-life of 6 batches, which are 24 samples, 2 epochs, half the run."""
    return fit(tmp_path_factory.mktemp("six"), ema=Ema(half_life="6ba", rampup=0))


@pytest.mark.parametrize("half_life", ["24sp", "2ep", "0.5dur"])
def test_a_half_life_has_any_unit(tmp_path, after_six_batches, half_life):
    """A batch is as much of it as it is of the unit."""
    actual, _, steps = fit(tmp_path, ema=Ema(half_life=half_life, rampup=0))

    assert torch.equal(actual, after_six_batches[0])
    expected = steps.averaged(0.5 ** (1 / 6))
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-6)


def test_the_half_life_of_a_young_run_is_short(tmp_path):
    """A fifth of what has been trained, until that is more than the half-life of 2 batches."""
    actual, _, steps = fit(tmp_path, ema=Ema(half_life="2ba", rampup=0.2))

    expected = steps.weights[0].double()
    for num_trained, weights in enumerate(steps.weights[1:], 2):
        decay = 0.5 ** (1 / min(2, 0.2 * num_trained))
        expected = decay * expected + (1 - decay) * weights.double()
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(actual.double(), steps.averaged(0.5**0.5), atol=1e-3)


def test_a_half_life_in_tokens_needs_tokens(tmp_path):
    """An average that never moves would be evaluated as if it were one."""
    with pytest.raises(PluginError, match="counts no tokens"):
        fit(tmp_path, ema=Ema(half_life="100tok"))


def test_a_half_life_of_unknown_length_is_refused(tmp_path):
    """Nobody knows how many batches an epoch of a stream has, and guessing helps nobody."""

    class Stream:
        def __iter__(self):
            return iter(tiny_batches())

    task = tiny_task(train_dataloader=Stream())

    with pytest.raises(SettingError, match="no length") as raised:
        fit(tmp_path, task=task, ema=Ema(half_life="2ep"))
    assert 'Ema(half_life="100ba")' in str(raised.value)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"half_life": "1ep", "decay": 0.9}, ValueError, "half_life='1ep' and decay=0.9"),
        ({"decay": 1.0}, ValueError, "decay=1.0 isn't between 0 and 1"),
        ({"decay": 0}, ValueError, "decay=0 isn't"),
        ({"decay": float("nan")}, ValueError, "decay=nan"),
        ({"decay": "0.9"}, TypeError, "decay='0.9' is not a number"),
        ({"rampup": 1.1}, ValueError, r"rampup=1.1 isn't in \[0, 1\]"),
        ({"rampup": "x"}, TypeError, "rampup='x' is not a number"),
        ({"half_life": "100"}, ValueError, "'100' is not a time"),
        ({"half_life": "0ba"}, ValueError, "isn't a finite number above zero"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, error, match):
    """At once, with the value that was given."""
    with pytest.raises(error, match=match):
        Ema(**options)


@pytest.mark.parametrize(
    ("given", "stays"),
    [
        ({"decay": 0.8}, lambda num: 0.8),
        ({"half_life": "4ba"}, lambda num: 0.5 ** (num / 4)),
        ({"half_life": "16sp"}, lambda num: 0.5 ** (num / 4)),
    ],
)
def test_the_averages_move_at_every_so_many_batches(given, stays, tmp_path):
    """After the first batch, the 5th and the 10th, by as much as the batches in between call for."""
    found, _, steps = fit(tmp_path, ema=Ema(**given, rampup=0, update_every=5))

    average, last = steps.weights[0].double(), 1
    for batch in (5, 10):
        share = stays(batch - last)
        average = share * average + (1 - share) * steps.weights[batch - 1].double()
        last = batch
    torch.testing.assert_close(found.double(), average, rtol=0, atol=1e-6)
    every = fit(tmp_path / "every", ema=Ema(**given, rampup=0))[0]
    assert not torch.allclose(found, every, atol=1e-4)


def test_averages_that_move_seldom_are_resumed_between_two_moves(tmp_path):
    """When they moved last is saved with them."""
    whole = fit(tmp_path / "whole", ema=Ema(half_life="4ba", update_every=5))[0]

    folder, given = tmp_path / "stopped", {"checkpoint_interval": "1ba", "max_duration": "4ep"}
    for until in ("3ba", "7ba", None):
        plugins = [Ema(half_life="4ba", update_every=5)]
        with isolated_trainer(folder, algorithms=plugins, **given) as trainer:
            trainer.fit(until=until)
            stopped = exported(trainer, folder)

    assert torch.equal(whole, stopped)


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (2.5, TypeError), (True, TypeError), ("2ba", TypeError)]
)
def test_a_number_of_batches_that_is_none_is_refused(value, error):
    """Where it is written."""
    with pytest.raises(error, match="update_every="):
        Ema(update_every=value)


class Watches:
    """A callback that looks at the weights at the ends of evaluations and predictions."""

    name = "watches"

    def __init__(self):
        self.seen = []

    @hookimpl
    def eval_end(self, state):
        self.seen.append(weights_of(state.model))

    @hookimpl
    def eval_after_all(self, state):
        self.seen.append(weights_of(state.model))

    @hookimpl
    def predict_end(self, state):
        self.seen.append(weights_of(state.model))


def test_a_callback_that_generates_sees_the_averages(tmp_path):
    """In the events of an evaluation the model has the weights that it is evaluated with."""
    watches, steps = Watches(), Steps()
    given = {"callbacks": [watches, steps], "algorithms": [Ema(decay=0.8, rampup=0)]}

    with isolated_trainer(tmp_path, max_duration="4ep", **given) as trainer:
        trainer.fit()
        in_fit, watches.seen = watches.seen[-2:], []
        trainer.eval()
        trainer.predict(tiny_batches(1))
        trained = weights_of(trainer.state.model)

    for found in on_host([*in_fit, *watches.seen]):
        torch.testing.assert_close(found.double(), steps.averaged(0.8), rtol=0, atol=1e-6)
    assert len(watches.seen) == 3
    assert torch.equal(trained, steps.weights[-1])
    assert not torch.allclose(trained, watches.seen[0], atol=1e-3)
