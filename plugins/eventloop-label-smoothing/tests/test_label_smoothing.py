"""The plugin in a training."""

import functools
import itertools

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss, one_hot

from eventloop import PluginError, Task, TaskError, hookimpl
from eventloop_gradcache import GradCache
from eventloop_label_smoothing import LabelSmoothing
from eventloop_mixup import Mixup
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task

by_torch = functools.partial(cross_entropy, label_smoothing=0.1)


@pytest.fixture
def fit(tmp_path):
    """Trains; gives the weights and what evaluation measured."""
    numbers = itertools.count()

    def fit(*algorithms, task=None, order="", **settings):
        folder = tmp_path / str(next(numbers))
        folder.mkdir(exist_ok=True)
        (folder / "pyproject.toml").write_text(order)
        settings = {"max_duration": "2ep", "algorithms": algorithms} | settings
        with isolated_trainer(folder, task, **settings) as trainer:
            trainer.fit()
            weights = torch.cat([one.flatten() for one in trainer.state.model.parameters()])
            return weights.detach().cpu(), trainer.state.eval_metrics

    return fit


def test_a_run_ends_with_the_bits_of_a_task_that_smooths_itself(fit):
    """The plugin is torch's label_smoothing=, without a change of the task."""
    expected, _ = fit(task=tiny_task(loss=by_torch))

    actual, _ = fit(LabelSmoothing(epsilon=0.1))

    assert torch.equal(actual, expected)
    assert not torch.equal(fit()[0], expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "settings",
    [
        {"microbatch_size": 3},
        {"precision": "bf16"},
        {"precision": "fp16", "microbatch_size": 1},
        {"compile": {"backend": "eager"}},
    ],
    ids=str,
)
def test_it_works_in_every_mode(fit, settings):
    """In a compiled run the loss would be computed along with the forward pass, unsmoothed."""
    expected, _ = fit(task=tiny_task(loss=by_torch), **settings)

    actual, _ = fit(LabelSmoothing(), **settings)

    assert torch.equal(actual, expected)
    assert not torch.equal(fit(**settings)[0], expected)


def test_two_ranks_smooth_as_torch_does(fit):
    """Each rank's loss is its own."""
    given = {"max_duration": "1ep"}

    def both():
        return fit(task=tiny_task(loss=by_torch), **given)[0], fit(LabelSmoothing(), **given)[0]

    for expected, actual in run_ranks(both):
        assert torch.equal(actual, expected)


def test_soft_targets_are_smoothed(fit):
    """Probabilities keep 1 - epsilon of what they are."""
    soft = [(inputs, one_hot(targets, 3) * 0.8 + 0.2 / 3) for inputs, targets in tiny_batches()]
    task = functools.partial(tiny_task, train_dataloader=soft, eval_dataloaders=None, metrics=None)
    expected, _ = fit(task=task(loss=by_torch))

    actual, _ = fit(LabelSmoothing(), task=task())

    assert torch.equal(actual, expected)


SMOOTHING_INSIDE = '[tool.eventloop.order]\nloss = ["mixup", "label-smoothing"]\n'


def test_mixup_gives_the_same_bits_on_either_side(fit):
    """Both of mixup's losses are smoothed, whoever is installed first or stands outside."""
    expected, _ = fit(Mixup(alpha=1.0), task=tiny_task(loss=by_torch), microbatch_size=3)
    orders = [(LabelSmoothing(), Mixup(alpha=1.0)), (Mixup(alpha=1.0), LabelSmoothing())]

    runs = [fit(*order, microbatch_size=3)[0] for order in orders]
    inside = fit(*orders[0], microbatch_size=3, order=SMOOTHING_INSIDE)[0]

    assert all(torch.equal(run, expected) for run in [*runs, inside])
    assert not torch.equal(fit(Mixup(alpha=1.0), microbatch_size=3)[0], expected)


def test_the_closure_of_a_step_is_smoothed(fit):
    """L-BFGS measures the loss again, and must find the same one."""
    seen = []

    class Twice:
        @hookimpl(wrapper=True)
        def optimizer_step(self, state, optimizers, closure):
            seen.append((state.loss.clone(), closure()))
            return (yield)

    fit(LabelSmoothing(), Twice(), microbatch_size=3)

    assert len(seen) == 6
    for first, repeated in seen:
        torch.testing.assert_close(repeated, first)


def test_evaluation_sees_the_loss_as_it_is(fit):
    """A smoothed test loss would be another measure."""
    task = tiny_task(metrics=None)
    weights, metrics = fit(LabelSmoothing(), task=task)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    inputs, targets = map(torch.cat, zip(*tiny_batches(2), strict=True))

    loss = metrics["test"]["loss"].float().cpu()

    torch.testing.assert_close(loss, cross_entropy(model(inputs), targets).detach())


@pytest.mark.parametrize("size", [2, 4])
def test_a_loss_of_the_whole_batch_is_smoothed(fit, size):
    """GradCache computes it once; those of its microbatches have its gradients, and no classes."""
    expected, _ = fit(GradCache(microbatch_size=size), task=tiny_task(loss=by_torch))

    actual, _ = fit(LabelSmoothing(), GradCache(microbatch_size=size))

    assert torch.equal(actual, expected)


class WithLoss(torch.nn.Linear):
    def forward(self, inputs, labels=None):
        logits = super().forward(inputs)
        return {"logits": logits, "loss": cross_entropy(logits, labels)}


def mapping_task(**given):
    batches = [{"inputs": inputs, "labels": labels} for inputs, labels in tiny_batches()]
    return Task(
        model=lambda: WithLoss(3, 3),
        train_dataloader=batches,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        **given,
    )


def test_a_task_with_mappings_and_a_loss_is_smoothed(fit):
    """What the fix of a model with a loss of its own says must work."""
    expected = fit(task=mapping_task(loss=lambda outputs, y: by_torch(outputs["logits"], y)))[0]

    loss = lambda outputs, y: cross_entropy(outputs["logits"], y)  # noqa: E731
    actual, _ = fit(LabelSmoothing(), task=mapping_task(loss=loss))

    assert torch.equal(actual, expected)


FLOATS = [(inputs, inputs) for inputs, _ in tiny_batches()]


class Updates:
    """Owns `train_batch`, and computes its loss by itself."""

    name = "updates"

    @hookimpl
    def train_batch(self, state):
        return state.update(lambda state: state.model(state.inputs).mean())


@pytest.mark.parametrize(
    ("plugins", "task", "reason"),
    [
        ([], mapping_task(), "the loss is the model's own"),
        ([Updates()], tiny_task(), "train_batch is updates's, which has losses of its own"),
        ([], tiny_task(train_dataloader=FLOATS), "the targets are neither classes nor"),
    ],
)
def test_it_stands_off_where_there_is_nothing_to_smooth(fit, plugins, task, reason):
    """Who insists on it learns why; else the header does."""
    with pytest.raises(PluginError, match=reason):
        fit(LabelSmoothing(), *plugins, task=task)


def test_a_loss_without_cross_entropy_is_an_error(fit):
    """A run that isn't smoothed must not look as if it were."""
    loss = lambda outputs, targets: mse_loss(outputs, one_hot(targets, 3).float())  # noqa: E731

    with pytest.raises(TaskError, match="doesn't call torch's cross_entropy") as raised:
        fit(LabelSmoothing(), task=tiny_task(loss=loss))
    assert 'disable = ["label-smoothing"]' in str(raised.value)


def test_a_task_that_smooths_itself_is_an_error(fit):
    """It says whose smoothing is how strong, and how to leave one out."""
    with pytest.raises(
        TaskError, match=r"smooths labels by 0\.1 itself, and shall by 0\.2"
    ) as raised:
        fit(LabelSmoothing(epsilon=0.2), task=tiny_task(loss=by_torch))
    assert 'disable = ["label-smoothing"]' in str(raised.value)


@pytest.mark.parametrize("epsilon", [0, -0.1, 1.1, float("nan")])
def test_an_epsilon_that_is_no_share_is_refused(epsilon):
    """0 would have no effect."""
    with pytest.raises(ValueError, match=rf"epsilon={epsilon} isn't in \(0, 1\]"):
        LabelSmoothing(epsilon=epsilon)


def test_an_epsilon_that_is_no_number_is_refused():
    """As `--label-smoothing.epsilon x` is."""
    with pytest.raises(TypeError, match="epsilon='x' is not a number"):
        LabelSmoothing(epsilon="x")


class Ends:
    """An algorithm that ends a run in the middle of a batch."""

    name = "ends"
    free_options = ("batch",)

    def __init__(self, batch=-1):
        self.batch = batch

    @hookimpl
    def after_train_batch(self, state):
        if state.clock.batch == self.batch:
            raise EOFError


def test_a_run_that_goes_on_ends_with_the_same_bits(fit, tmp_path):
    """There is nothing to save: what a resumed run smooths by is its option."""
    given = {"run_dir": tmp_path / "run", "checkpoint_interval": "2ba"}
    expected, _ = fit(LabelSmoothing(), Ends())
    with pytest.raises(EOFError):
        fit(LabelSmoothing(), Ends(4), **given)

    actual, _ = fit(LabelSmoothing(), Ends(), **given)

    assert torch.equal(actual, expected)
    assert not torch.equal(fit(Ends())[0], expected)
