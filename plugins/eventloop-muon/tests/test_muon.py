"""The plugin in a training."""

import itertools
import os

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import PluginError, Task, TaskError, hookimpl, schedules
from eventloop_fsdp import Fsdp
from eventloop_muon import Muon
from eventloop_testing import isolated_trainer, run_ranks

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)


def make_model():
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8), nn.Linear(8, 3)
    )


def make_task(batch_size=8, **changes):
    values = {
        "model": make_model,
        "loss": cross_entropy,
        "train_dataloader": lambda: DataLoader(TensorDataset(X, Y), batch_size),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        "scheduler": schedules.linear(),
    }
    return Task(**(values | changes))


@pytest.fixture
def fit(tmp_path):
    """Trains two epochs of three batches; gives the trainer."""
    numbers = itertools.count()

    def fit(*algorithms, task=None, **settings):
        folder = tmp_path / f"{os.environ.get('RANK', '')}-{next(numbers)}"
        given = {"max_duration": "2ep", "algorithms": algorithms, **settings}
        with isolated_trainer(folder, task or make_task(), **given) as trainer:
            trainer.fit()
        return trainer

    return fit


def weights(trainer):
    """Returns the weights, also those of shards."""
    params = [getattr(one, "full_tensor", one.detach)() for one in trainer.state.model.parameters()]
    return torch.cat([param.detach().flatten() for param in params]).cpu()


def assert_near(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def weights_by_hand(adamw_lr=0.02):
    """Trains with torch's two optimizers, no part of the package, and a rate that falls to 0."""
    torch.manual_seed(0)
    model = make_model()
    hidden = [model[2].weight, model[4].weight]
    ends = [model[0].weight, model[5].weight]
    biases = [layer.bias for layer in model[::2]] + [model[5].bias]
    muon = torch.optim.Muon(hidden, lr=0.05, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": ends, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, adamw_lr, (0.9, 0.95), fused=True)
    step = 0
    for _ in range(2):
        for inputs, targets in DataLoader(TensorDataset(X, Y), 8):
            cross_entropy(model(inputs), targets).backward()
            for optimizer, lr in ((muon, 0.05), (adamw, adamw_lr)):
                for group in optimizer.param_groups:
                    group["lr"] = lr * (1 - step / 6)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_a_run_ends_with_the_weights_of_torchs_own_optimizers(fit):
    """The task's schedule moves both rates in proportion, each from its own start."""
    expected = weights_by_hand()

    actual = weights(fit(Muon(lr=0.05, adamw_lr=0.02)))

    assert_near(actual, expected)
    assert not torch.allclose(weights_by_hand(adamw_lr=0.05), expected, atol=1e-3)


def test_the_header_says_what_became_of_the_tasks_optimizer(fit):
    """Nobody may wonder what the rate in the task file does."""
    plugin = Muon()

    trainer = fit(plugin)

    assert plugin.header_note() == (
        "Muon for 2 weights (96 numbers), AdamW for 6 weights (81 numbers), instead of the task's "
        "optimizer"
    )
    assert {name: type(one).__name__ for name, one in trainer.state.optimizers.items()} == {
        "muon": "Muon",
        "adamw": "AdamW",
    }


def test_microbatches_and_reduced_precision_are_near(fit):
    """Newton-Schulz is computed in bf16 whatever the run's precision, so last bits differ."""
    expected = weights(fit(Muon(lr=0.05)))

    for settings in ({"microbatch_size": 3}, {"precision": "bf16"}, {"precision": "fp16"}):
        assert_near(weights(fit(Muon(lr=0.05), **settings)), expected, 0.03)
    assert not torch.allclose(weights(fit()), expected, atol=0.1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_end_near_one(fit, strategy):
    """What is added up in another order may be rounded to another number of bf16."""

    def run_rank():
        others = [Fsdp()] if strategy == "fsdp" else []
        return weights(fit(Muon(lr=0.05), *others, task=make_task(4), microbatch_size=2))

    expected = weights(fit(Muon(lr=0.05)))
    first, second = run_ranks(run_rank, timeout_s=60)

    assert torch.equal(first, second)
    assert_near(first, expected, 0.03)
    assert not torch.allclose(weights(fit(Muon(lr=0.05), task=make_task(4))), expected, atol=0.05)


class Overflows:
    """Makes the loss of the third batch infinite; keeps the weights."""

    def __init__(self):
        self.kept = []

    @hookimpl(wrapper=True)
    def loss(self, state):
        loss = yield
        return loss * float("inf") if state.clock.batch == 2 else loss

    @hookimpl
    def batch_end(self, state):
        params = state.model.parameters()
        self.kept.append(torch.cat([param.detach().flatten() for param in params]))


def test_an_overflow_skips_the_step_of_both(fit):
    """Half a step would be neither method's."""
    overflows = Overflows()

    fit(Muon(), overflows, precision="fp16", on_bad_loss="ignore", max_duration="5ba")

    pairs = itertools.pairwise(overflows.kept)
    assert [torch.equal(*pair) for pair in pairs] == [False, True, False, False]


def test_a_model_of_hidden_matrices_alone_needs_no_adamw(fit):
    """An optimizer without parameters is an error of torch's."""
    task = make_task(model=lambda: nn.Linear(4, 3, bias=False))

    trainer = fit(Muon(hidden=["*"]), task=task)

    assert list(trainer.state.optimizers) == ["muon"]


def frozen():
    model = make_model()
    model[2].weight.requires_grad_(False)
    model[4].weight.requires_grad_(False)
    return model


class Updates:
    """Makes two updates a batch; `named` asks for the task's optimizer."""

    name = "updates"
    free_options = ("named", "stop")

    def __init__(self, *, named=None, stop=None):
        self.named, self.stop = named, stop

    @hookimpl
    def train_batch(self, state):
        for part in (0, 1):
            samples = slice(part * 8, part * 8 + 8)
            state.batch = (X[samples].to(state.device), Y[samples].to(state.device))
            stepped = state.update(self.loss_of, self.named)
        if state.clock.batch == self.stop:
            raise EOFError
        return stepped

    def loss_of(self, state):
        inputs, targets = state.microbatch
        return cross_entropy(state.model(inputs), targets)


class Steps(Updates):
    """An owner that steps an optimizer of its own, as a bridge does."""

    @hookimpl
    def optimizer_step(self, state, optimizers, closure):
        return True


def two_optimizers(model):
    first, ends = model[:2].parameters(), model[2:].parameters()
    return {"first": torch.optim.SGD(first, lr=0.1), "ends": torch.optim.SGD(ends, lr=0.1)}


def test_where_the_loop_makes_the_updates_several_optimizers_are_replaced(fit):
    """Nothing asks for them by name then."""
    trainer = fit(Muon(), task=make_task(optimizer=two_optimizers))

    assert list(trainer.state.optimizers) == ["muon", "adamw"]


def test_updates_that_name_no_optimizer_are_of_both(fit):
    """As reinforcement learning makes them, several a batch."""
    trainer = fit(Muon(lr=0.05), Updates(), task=make_task(scheduler=None))

    torch.manual_seed(0)
    model = make_model()
    hidden = [model[2].weight, model[4].weight]
    wide = [model[0].weight, model[5].weight]
    narrow = [layer.bias for layer in model[::2]] + [model[5].bias]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]
    both = [
        torch.optim.Muon(hidden, lr=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, 0.05, (0.9, 0.95), fused=True),
    ]
    for part in [slice(0, 8), slice(8, 16)] * 6:
        cross_entropy(model(X[part]), Y[part]).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    assert_near(weights(trainer), torch.cat([one.detach().flatten() for one in model.parameters()]))


def test_several_updates_a_batch_are_resumed_exactly(fit, tmp_path):
    """Momentum and counts of both optimizers are in the checkpoint."""
    given = {"checkpoint_interval": "2ba", "run_dir": tmp_path / "run"}
    with pytest.raises(EOFError):
        fit(Muon(), Updates(stop=4), **given)

    resumed = fit(Muon(), Updates(), **given)

    assert torch.equal(weights(resumed), weights(fit(Muon(), Updates())))


def test_an_update_that_names_the_tasks_optimizer_is_an_error(fit):
    """It is known when it happens; what it would have trained is gone."""
    with pytest.raises(PluginError, match="no optimizer is named 'sgd'") as caught:
        fit(Muon(), Updates(named=["sgd"]))

    assert (
        "name some of 'muon', 'adamw', which muon built instead of the task's, or none for all; or"
        in str(caught.value)
    )
    assert 'switch muon off with `disable = ["muon"]`' in str(caught.value)


@pytest.mark.parametrize(
    ("others", "changes", "reason"),
    [
        ([], {"model": lambda: nn.Linear(4, 3)}, "no matrix between the first and the last layer"),
        ([], {"model": frozen}, "no matrix between the first and the last layer is trained"),
        (
            [Steps()],
            {},
            "train_batch and optimizer_step are updates's, which steps optimizers of its own; make torch.optim.Muon among them",
        ),
        (
            [Updates(named=["first"])],
            {"optimizer": two_optimizers, "scheduler": None},
            "train_batch is updates's, which may ask for the task's optimizers by name, 'ends', 'first'; make torch.optim.Muon among them",
        ),
    ],
    ids=["shallow", "frozen", "steps", "two"],
)
def test_it_leaves_the_tasks_optimizer_where_it_has_nothing_to_do(fit, others, changes, reason):
    """Installed for another task, it mustn't be in the way; asked for, it says why."""
    task = make_task(**changes)

    with pytest.raises(PluginError, match=reason):
        fit(Muon(), *others, task=task)


def test_installed_it_stands_off(fit, tmp_path):
    """The task trains with its own optimizer then."""
    plugin = Muon()
    task = make_task(model=lambda: nn.Linear(4, 3))
    state = isolated_trainer(tmp_path, task).state

    assert plugin.build_optimizers(state) is None
    assert list(state.optimizers) == ["sgd"]


def test_a_schedule_for_one_of_the_two_is_refused(fit):
    """The other would train on at its first rate, and nobody would know."""
    task = make_task(scheduler={"adamw": schedules.linear()})

    with pytest.raises(PluginError, match="schedulers for 'adamw', but muon's optimizers are 'a"):
        fit(Muon(), task=task)


def test_a_schedule_for_the_tasks_optimizer_is_refused(fit):
    """The task's names are gone, and nothing in the task says why."""
    task = make_task(scheduler={"sgd": schedules.linear()})

    with pytest.raises(TaskError, match=r"muon, adamw\n[\s\S]* if a plugin built them instead"):
        fit(Muon(), task=task)


def test_a_pattern_without_a_parameter_is_named(fit):
    """A misspelt one would train the wrong matrices."""
    with pytest.raises(PluginError, match=r"muon.hidden or muon.not_hidden: 'head' is the name of"):
        fit(Muon(hidden=["head"]))


def test_patterns_that_leave_nothing_are_the_reason(fit):
    """The rule that they take the place of isn't."""
    with pytest.raises(PluginError, match=r"of hidden=\['0.bias'\], not_hidden=\[\] no matrix is"):
        fit(Muon(hidden=["0.bias"]))


def test_a_text_is_no_list_of_patterns():
    """Each of its characters would be one."""
    with pytest.raises(TypeError, match=r"not_hidden='0' is not a list; write \['0'\]"):
        Muon(not_hidden="0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0}, "lr=0 isn't a positive number"),
        ({"adamw_lr": -1.0}, r"adamw_lr=-1\.0 isn't a positive number"),
        ({"momentum": 1}, r"momentum: 1 isn't in \[0, 1\)"),
        ({"betas": (0.9, 1.5)}, r"betas: 1\.5 isn't in \[0, 1\)"),
        ({"weight_decay": float("inf")}, "weight_decay=inf isn't 0 or more"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    """Before anything is trained."""
    with pytest.raises(ValueError, match=message):
        Muon(**options)
