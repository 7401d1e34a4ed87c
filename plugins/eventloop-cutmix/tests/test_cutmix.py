"""The plugin in a training."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from eventloop import PluginError, Task, hookimpl
from eventloop_cutmix import Cutmix, cut_and_paste, draw_box
from eventloop_mixup import Mixup
from eventloop_testing import isolated_trainer, run_ranks


def batches(num=5, size=8):
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(num, size, 1, 4, 4, generator=generator)
    return list(zip(images, torch.randint(3, (num, size), generator=generator), strict=True))


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def image_task(**given):
    values = {
        "model": make_model,
        "loss": cross_entropy,
        "train_dataloader": batches(),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
    }
    return Task(**values | given)


@pytest.fixture
def train(tmp_path):
    """Trains for two epochs; gives the trainer."""
    numbers = itertools.count()

    def train(*algorithms, task=None, **settings):
        folder = tmp_path / str(next(numbers))
        settings = {"max_duration": "2ep", "algorithms": algorithms} | settings
        with isolated_trainer(folder, task or image_task(), **settings) as trainer:
            trainer.fit()
        return trainer

    return train


def weights(trainer):
    return torch.cat([one.detach().flatten() for one in trainer.state.model.parameters()]).cpu()


def weights_by_hand(generator, alpha=1.0):
    """Trains as the paper says, with one-hot targets and no part of eventloop but the draws."""
    generator.manual_seed(generator.initial_seed())
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step, (images, targets) in enumerate(batches() * 2):
        permutation = torch.randperm(len(images), generator=generator)
        box = draw_box(alpha, generator.initial_seed(), step, 4, 4)
        share, labels = box.share_outside(4, 4), one_hot(targets, 3).float()
        soft = share * labels + (1 - share) * labels[permutation]
        cross_entropy(model(cut_and_paste(images, permutation, box)), soft).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


@pytest.mark.parametrize("size", [None, 1, 3])
def test_a_run_ends_with_the_weights_of_a_loop_written_by_hand(train, size):
    """The plugin must be the paper's algorithm, however the batch is cut into microbatches."""
    trainer = train(Cutmix(), microbatch_size=size)
    generator = trainer.state.generator("cutmix")

    expected = weights_by_hand(generator)

    torch.testing.assert_close(weights(trainer), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(weights_by_hand(generator, alpha=0.3), expected, atol=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_about_the_same(train, precision):
    """Cutting is done before anything is cast."""
    expected = weights(train(Cutmix()))

    actual = weights(train(Cutmix(), precision=precision, microbatch_size=4))

    torch.testing.assert_close(actual, expected, rtol=0, atol=0.05)
    assert not torch.allclose(weights(train(precision=precision)), expected, atol=0.05)


class Recorder:
    """Keeps what the passes over each batch see, and whose turn it is."""

    name = "recorder"

    def __init__(self, *plugins):
        self.plugins = plugins
        self.batches, self.targets, self.losses, self.turns = [], [], [], []

    @hookimpl
    def after_dataloader(self, state):
        self.batches.append((state.inputs.clone(), state.targets.clone()))

    @hookimpl
    def after_loss(self, state):
        self.targets.append(state.targets.clone())
        if state.microbatch_idx == 0:
            self.turns.append([one._second.are_given for one in self.plugins])

    @hookimpl(wrapper=True)
    def optimizer_step(self, state, optimizers, closure):
        self.losses.append((state.loss.clone(), closure()))
        return (yield)


def test_what_others_see_stays_as_it_is(train, no_device_reads):
    """Targets, random numbers and the closure's loss; and no step waits for the device."""
    cutmix = Cutmix()
    mine, without = Recorder(), Recorder()

    train(cutmix, mine, microbatch_size=3, observers=[no_device_reads])
    train(without)

    torch.testing.assert_close(mine.batches, without.batches, rtol=0, atol=0)
    assert torch.equal(torch.cat(mine.targets), torch.cat([y for _, y in mine.batches]))
    for first, repeated in mine.losses:
        torch.testing.assert_close(repeated, first)
    assert [one for one, _ in mine.losses] != [one for one, _ in without.losses]
    assert not cutmix._second.are_given


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A run with mixup and cutmix: its turns and weights, on each of two ranks."""

    def fit(folder, first, second, **settings):
        recorder = Recorder(first, second)
        given = {"algorithms": [first, second, recorder], "max_duration": "4ep"} | settings
        with isolated_trainer(folder, image_task(), **given) as trainer:
            trainer.fit()
            return recorder.turns, weights(trainer)

    folder = tmp_path_factory.mktemp("both")
    return {
        "one way": fit(folder / "a", Cutmix(), Mixup()),
        "the other way": fit(folder / "b", Mixup(), Cutmix()),
        "seed 1": fit(folder / "c", Cutmix(), Mixup(), seed=1),
        "ranks": run_ranks(fit, folder / "d", Cutmix(), Mixup()),
    }


def test_with_mixup_each_batch_is_drawn_for_one_of_the_two(both):
    """A rectangle pasted into a blend would have four targets and two losses."""
    turns, _ = both["one way"]

    assert len(turns) == 20
    assert all(sum(turn) == 1 for turn in turns)
    assert 4 <= sum(cutmix for cutmix, _ in turns) <= 16


def test_with_mixup_the_order_of_installation_changes_nothing(both):
    """The rule is the same for both; it depends on seed and batch alone."""
    (turns, one), (turned, other) = both["one way"], both["the other way"]

    assert turned == [turn[::-1] for turn in turns]
    assert torch.equal(one, other)
    assert both["seed 1"][0] != turns


def test_with_mixup_all_ranks_take_the_same_turns(both):
    """Weights that drift apart would be found late."""
    (turns, one), (turned, other) = both["ranks"]

    assert turns == turned
    assert torch.equal(one, other)


IMAGES, LABELS = torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64)
UNSUITABLE = {
    "inputs, torch.float32 of shape (2, 4), and": (torch.zeros(2, 4), LABELS),
    "targets, torch.int64 of shape (2, 4, 4)": (IMAGES, torch.zeros(2, 4, 4, dtype=torch.int64)),
    "targets, torch.int64 of shape (4,)": (IMAGES, torch.zeros(4, dtype=torch.int64)),
    "a batch that is dict with 'x', 'labels'": {"x": IMAGES, "labels": LABELS},
}


@pytest.mark.parametrize(("described", "batch"), UNSUITABLE.items(), ids=range(len(UNSUITABLE)))
def test_it_stands_off_from_what_are_no_images(train, described, batch):
    """Masks would have to be cut, too, and a text has no rectangle."""
    with pytest.raises(PluginError, match="doesn't suit this task: it cuts images") as raised:
        train(Cutmix(), task=image_task(train_dataloader=[batch]))

    assert described in str(raised.value)


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
def test_it_stands_off_where_no_loss_sees_the_second_targets(train, plugins, loss, reason):
    """Images in two parts with the targets of one would be trained on, in silence."""
    with pytest.raises(PluginError, match=reason):
        train(Cutmix(), *plugins, task=image_task(loss=loss))


def test_a_later_batch_that_can_not_be_cut_is_an_error(train):
    """Leaving one out in silence would be wrong."""
    task = image_task(train_dataloader=[(IMAGES, LABELS), (torch.zeros(2, 16), LABELS)])

    with pytest.raises(PluginError, match="cutmix cuts images") as raised:
        train(Cutmix(), task=task)
    assert 'disable = ["cutmix"]' in str(raised.value)


@pytest.mark.parametrize("alpha", [0, -1.0, float("nan"), float("inf")])
def test_an_alpha_without_a_distribution_is_refused(alpha):
    """Beta(alpha, alpha) needs a positive, finite alpha."""
    with pytest.raises(ValueError, match=f"alpha={alpha} isn't a positive number"):
        Cutmix(alpha=alpha)


def test_an_alpha_that_is_no_number_is_refused():
    """As `--cutmix.alpha x` is."""
    with pytest.raises(TypeError, match="alpha='x' is not a number"):
        Cutmix(alpha="x")
