"""The plugin in a training."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from eventloop import PluginError, Task, Trainer, hookimpl
from eventloop.toolbox import split
from eventloop_mixup import Mixup, draw_lam


def dataset(samples=20):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 4, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (samples,), generator=generator))


def tiny_task(*, loader=None, optimizer=None, loss=cross_entropy, **values):
    return Task(
        model=lambda: torch.nn.Linear(4, 3),
        loss=loss,
        train_dataloader=loader or (lambda: DataLoader(dataset(), batch_size=8, shuffle=True)),
        eval_dataloaders={"test": DataLoader(dataset(12), batch_size=5)},
        optimizer=optimizer or (lambda model: torch.optim.SGD(model.parameters(), lr=0.5)),
        metrics={"accuracy": MulticlassAccuracy(3, average="micro")},
        **values,
    )


def fit(*algorithms, task=None, **settings):
    settings = {"max_duration": "2ep", "autoload": False, "device": "cpu"} | settings
    with Trainer(task or tiny_task(), algorithms=algorithms, **settings) as trainer:
        trainer.fit()
    return trainer


def weights(trainer):
    return torch.cat([param.detach().flatten() for param in trainer.state.model.parameters()])


class Recorder:
    """Keeps what the passes over each batch see."""

    def __init__(self):
        self.batches, self.targets, self.losses = [], [], []

    @hookimpl
    def after_dataloader(self, state):
        self.batches.append((state.inputs.clone(), state.targets.clone()))

    @hookimpl
    def after_loss(self, state):
        self.targets.append(state.targets.clone())

    @hookimpl
    def batch_end(self, state):
        self.losses.append(state.loss.clone())


def weights_by_hand(seed=0, alpha=0.4):
    """Trains as the paper says, with one-hot targets and no part of eventloop but the draws."""
    with Trainer(tiny_task(), autoload=False, device="cpu", seed=seed) as trainer:
        generator = trainer.state.generator("mixup")
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    loader = DataLoader(dataset(), batch_size=8, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = 0
    for _ in range(2):
        for inputs, targets in loader:
            permutation = torch.randperm(len(inputs), generator=generator)
            lam = draw_lam(alpha, generator.initial_seed(), step)
            one_hot = torch.nn.functional.one_hot(targets, 3).float()
            soft = lam * one_hot + (1 - lam) * one_hot[permutation]
            mixed = lam * inputs + (1 - lam) * inputs[permutation]
            cross_entropy(model(mixed), soft).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_a_run_ends_with_the_weights_of_a_loop_written_by_hand():
    """The plugin must be the paper's algorithm, wherever its parts hook in."""
    expected = weights_by_hand()

    actual = weights(fit(Mixup(alpha=0.4)))

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(weights_by_hand(alpha=1.0), expected, atol=1e-4)


@pytest.mark.parametrize("size", [1, 3, 4, 5])
def test_microbatches_change_nothing(size):
    """The whole batch is mixed once, so its slicing, even into unequal parts, can't matter."""
    expected = weights(fit(Mixup(alpha=1.0)))

    actual = weights(fit(Mixup(alpha=1.0), microbatch_size=size))

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(weights(fit(microbatch_size=size)), expected, atol=1e-4)


def test_targets_stay_the_originals_for_everybody_else():
    """Metrics of class indices would make nonsense of shuffled targets."""
    recorder = Recorder()

    fit(Mixup(alpha=1.0), recorder, microbatch_size=3)

    assert torch.equal(
        torch.cat(recorder.targets), torch.cat([targets for _, targets in recorder.batches])
    )


def test_evaluation_sees_unmixed_batches():
    """A mixed test set would measure something else."""
    trainer = fit(Mixup(alpha=1.0))
    inputs, targets = dataset(12).tensors
    expected = (trainer.state.model(inputs).argmax(1) == targets).float().mean()

    result = trainer.state.eval_metrics["test"]["accuracy"]

    torch.testing.assert_close(result, expected)


def test_nobody_elses_random_numbers_change():
    """With and without mixup a run sees the same batches, or an ablation compares two things."""
    with_mixup, without = Recorder(), Recorder()

    fit(Mixup(alpha=0.4), with_mixup)
    fit(without)

    torch.testing.assert_close(with_mixup.batches, without.batches, rtol=0, atol=0)
    assert not torch.equal(torch.stack(with_mixup.losses), torch.stack(without.losses))


def test_the_closure_of_a_step_sees_the_same_mix():
    """L-BFGS measures the loss again; after a zero step it must find the same one."""
    seen = []

    class Twice:
        @hookimpl(wrapper=True)
        def optimizer_step(self, state, optimizers, closure):
            seen.append((state.loss.clone(), closure()))
            return (yield)

    fit(Mixup(alpha=1.0), Twice(), microbatch_size=3)

    for first, repeated in seen:
        torch.testing.assert_close(repeated, first)


def test_the_mix_is_forgotten_with_its_batch():
    """Whoever computes a loss between batches must get the plain one."""
    mixup, mixed = Mixup(), []

    class Looks:
        @hookimpl
        def after_backward(self, state):
            mixed.append(mixup._second.are_given)

    fit(mixup, Looks())

    assert len(mixed) == 6
    assert all(mixed)
    assert not mixup._second.are_given


def test_the_mix_is_forgotten_after_a_failure():
    """The next fit of the same trainer begins clean."""

    class Failing:
        @hookimpl
        def after_backward(self, state):
            raise ArithmeticError

    mixup = Mixup()
    with pytest.raises(ArithmeticError):
        fit(mixup, Failing())

    assert not mixup._second.are_given


def test_who_splits_batches_also_splits_the_shuffled_targets():
    """A plugin may slice otherwise than the core; inputs and both targets must stay together."""

    class LastFirst:
        @hookimpl
        def split_batch(self, state):
            return split(state.batch, 3)[::-1]

    expected = weights(fit(Mixup(alpha=1.0)))

    actual = weights(fit(Mixup(alpha=1.0), LastFirst()))

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


class HostReads(TorchDispatchMode):
    """Counts what reads a number from a tensor."""

    num_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_reads += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing_from_the_device():
    """On a GPU each read would stop the loop until the device is idle."""
    counted = []

    class Counting:
        @hookimpl(wrapper=True, tryfirst=True)
        def train_batch(self, state):
            with HostReads() as reads:
                result = yield
            counted.append(reads.num_reads)
            return result

    with HostReads() as control:
        torch.ones(()).item()
    fit(Counting(), Mixup(), microbatch_size=3)

    assert control.num_reads == 1
    assert counted == [0] * 6


UNSUITABLE = {
    "a pair of inputs, torch.uint8 of shape (2, 4), and targets, torch.int64 of shape (2,)": (
        torch.zeros(2, 4, dtype=torch.uint8),
        torch.zeros(2, dtype=torch.int64),
    ),
    "targets, torch.int64 of shape (3,)": (torch.zeros(2, 4), torch.zeros(3, dtype=torch.int64)),
    "targets, torch.float32 of shape ()": (torch.zeros(2, 4), torch.zeros(())),
    "inputs, dict with 'image', and targets": (
        {"image": torch.zeros(2, 4)},
        torch.zeros(2, dtype=torch.int64),
    ),
    "a batch that is dict with 'x', 'labels'": {"x": torch.zeros(2, 4), "labels": torch.zeros(2)},
    "a batch that is tuple of 3 (Tensor, Tensor, Tensor)": (torch.zeros(2, 4),) * 3,
    "a batch that is one tensor of shape (2, 4)": torch.zeros(2, 4),
}


@pytest.mark.parametrize(("described", "batch"), UNSUITABLE.items(), ids=range(len(UNSUITABLE)))
def test_a_batch_that_cannot_be_mixed_is_named(described, batch):
    """Who installed mixup for another task must learn what it wants, and how to switch it off."""
    with pytest.raises(
        PluginError, match="doesn't suit this task: it mixes float inputs"
    ) as raised:
        fit(Mixup(), task=tiny_task(loader=[batch]))

    assert described in str(raised.value)


def test_a_later_batch_that_cannot_be_mixed_is_an_error():
    """The first batch was fine, so that mixup is on; leaving one out in silence would be wrong."""
    good, bad = (torch.zeros(2, 4), torch.zeros(2).long()), torch.zeros(2, 4)

    with pytest.raises(PluginError, match="floating-point tensor of inputs") as raised:
        fit(Mixup(), task=tiny_task(loader=[good, bad]))
    assert 'disable = ["mixup"]' in str(raised.value)


class Updates:
    """Owns `train_batch`, and computes its loss by itself."""

    name = "updates"

    @hookimpl
    def train_batch(self, state):
        return state.update(lambda state: cross_entropy(state.model(state.inputs), state.targets))


@pytest.mark.parametrize(
    ("plugins", "loss", "reason"),
    [([], None, "the loss is the model's own"), ([Updates()], cross_entropy, "is updates's")],
    ids=["own loss", "own train_batch"],
)
def test_it_stands_off_where_no_loss_sees_the_second_targets(plugins, loss, reason):
    """Blended inputs with the targets of one half would be trained on, in silence."""
    with pytest.raises(PluginError, match=reason):
        fit(Mixup(), *plugins, task=tiny_task(loss=loss))


@pytest.mark.parametrize("alpha", [0, -0.2, float("nan"), float("inf")])
def test_an_alpha_without_a_distribution_is_refused(alpha):
    """Beta(alpha, alpha) needs a positive, finite alpha."""
    with pytest.raises(ValueError, match="positive number"):
        Mixup(alpha=alpha)


def test_an_alpha_that_is_no_number_is_refused():
    """As `--mixup.alpha x` is."""
    with pytest.raises(TypeError, match="alpha='x' is not a number"):
        Mixup(alpha="x")
