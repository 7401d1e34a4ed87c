"""The plugin in a training."""

import itertools
import os

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import PluginError, Task, hookimpl
from eventloop_agc import Agc, unit_norms
from eventloop_fsdp import Fsdp
from eventloop_sam import Sam
from eventloop_testing import isolated_trainer, run_ranks

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
CLIP = 0.05


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def make_task(batch_size=8, dtype=torch.float32):
    return Task(
        model=lambda: make_model().to(dtype),
        loss=cross_entropy,
        train_dataloader=lambda: DataLoader(TensorDataset(X.to(dtype), Y), batch_size),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
    )


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


def weights_by_hand(num_clipped=4):
    """Trains in float64 with no part of the package, clipping the first parameters alone."""
    torch.manual_seed(0)
    model = make_model().double()
    params = list(model.parameters())
    for inputs, targets in [*DataLoader(TensorDataset(X.double(), Y), 8)] * 2:
        gradients = torch.autograd.grad(cross_entropy(model(inputs), targets), params)
        for idx, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
            rows = gradient if param.ndim == 2 else gradient[None]
            sizes = (param if param.ndim == 2 else param[None]).detach().norm(dim=1).clamp(min=1e-3)
            scales = (CLIP * sizes / rows.norm(dim=1)).clamp(max=1)[:, None]
            step = rows * scales if idx < num_clipped else rows
            param.data = param.data - 0.5 * step.reshape(param.shape)
    return torch.cat([param.detach().flatten() for param in params])


@pytest.mark.parametrize(
    ("exclude", "num_clipped"), [(None, 4), ([], 6), (["2.*", "4.*"], 2)], ids=str
)
def test_a_run_ends_with_the_weights_of_a_loop_written_by_hand(fit, exclude, num_clipped):
    """The last linear layer isn't clipped, unless somebody says otherwise."""
    expected = weights_by_hand(num_clipped)

    task = make_task(dtype=torch.float64)
    actual = weights(fit(Agc(clip=CLIP, exclude=exclude), task=task))

    assert_near(actual, expected, 1e-12)
    assert not torch.allclose(weights_by_hand(0), expected, atol=1e-3)


def test_microbatches_change_nothing_and_reduced_precision_little(fit):
    """Gradients are whole and unscaled when they are clipped."""
    expected = weights(fit(Agc(clip=CLIP)))

    assert_near(weights(fit(Agc(clip=CLIP), microbatch_size=3)), expected)
    assert_near(weights(fit(Agc(clip=CLIP), precision="bf16")), expected, 0.02)
    assert_near(weights(fit(Agc(clip=CLIP), precision="fp16")), expected, 0.003)
    assert not torch.allclose(weights(fit()), expected, atol=0.1)


class Logs:
    """Keeps what is logged."""

    def __init__(self):
        self.rows = []

    @hookimpl
    def log(self, state, numbers):
        self.rows.append(numbers)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_with_accumulation_end_with_the_weights_of_one(fit, strategy):
    """Units are those of the whole model, also where a rank holds some of their rows."""

    def run(batch_size, *others, **settings):
        logs = Logs()
        given = {"task": make_task(batch_size), "log_interval": "1ba", **settings}
        trained = weights(fit(Agc(clip=CLIP), logs, *others, **given))
        return trained, [row["train/clipped_units"] for row in logs.rows]

    def run_rank():
        others = [Fsdp()] if strategy == "fsdp" else []
        return run(4, *others, microbatch_size=2)

    expected, shares = run(8)
    ranks = run_ranks(run_rank, timeout_s=60)

    for actual, _ in ranks:
        assert_near(actual, expected)
    assert ranks[0][1] == pytest.approx(shares)
    assert 0 < min(shares) <= 1
    assert not torch.allclose(run(4)[0], expected, atol=1e-3)


class Gain(nn.Module):
    """Scales by its only parameter, of one element."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return inputs * self.gain


@pytest.mark.nightly
def test_a_parameter_of_one_element_is_clipped_as_in_one_process(fit):
    """One of two ranks holds none of it: a gain, and an output's bias and its row of weights."""

    def run(*others, batch_size):
        task = make_task(batch_size)
        task.model = lambda: nn.Sequential(nn.Linear(4, 1), Gain(), nn.Linear(1, 3))
        return weights(fit(Agc(clip=CLIP, exclude=[]), *others, task=task))

    expected = run(batch_size=8)
    ranks = run_ranks(lambda: run(Fsdp(), batch_size=4), timeout_s=60)

    assert_near(ranks[0], expected)
    assert_near(ranks[1], expected)


class Keeps:
    """Keeps the lengths of the hidden units' gradients, as shares of their weights', by step."""

    def __init__(self):
        self.kept = []

    @hookimpl(wrapper=True, trylast=True)
    def optimizer_step(self, state):
        weight = state.model[2].weight
        self.kept.append((unit_norms(weight.grad) / unit_norms(weight.detach())).max().item())
        return (yield)


def test_the_second_gradient_of_sam_is_clipped_too(fit):
    """The closure of a step clips, at the weights where it is asked."""
    keeps, free = Keeps(), Keeps()

    fit(Agc(clip=1e-4), Sam(rho=0.01), keeps)
    fit(Sam(rho=0.01), free)

    assert max(keeps.kept) < 1.1e-4
    assert max(free.kept) > 1e-2


@pytest.mark.parametrize("setting", ["clip_norm", "clip_value"])
def test_a_second_clipping_is_an_error_that_names_both(fit, setting):
    """One of them would have no effect, in silence."""
    with pytest.raises(PluginError, match=rf"agc .*: {setting}=1\.0 clips .*leave one of them out"):
        fit(Agc(), **{setting: 1.0})


def test_a_run_that_clips_already_has_it_stand_off(fit):
    """It is only installed; the setting was written."""
    trainer = fit(clip_norm=1.0)

    assert Agc().unsuitable(trainer.state) == (
        "clip_norm=1.0 clips the gradients already: leave one of them out"
    )
    assert Agc().unsuitable(fit().state) is None


def test_sparse_gradients_are_left_alone(fit):
    """Torch's own message about them fills a screen, at the first step."""
    task = make_task()
    task.model = lambda: nn.EmbeddingBag(2, 3, sparse=True)

    with pytest.raises(PluginError, match="the gradients of '' are sparse, of which torch knows"):
        fit(Agc(), task=task)


def test_a_pattern_without_a_parameter_is_named(fit):
    """A misspelt one would clip what shouldn't be."""
    with pytest.raises(
        PluginError, match=r"agc.exclude: 'head\.\*' is the name of no parameter; t"
    ):
        fit(Agc(exclude=["head.*"]))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"clip": 0}, ValueError, "clip=0 isn't a positive number"),
        ({"eps": float("nan")}, ValueError, "eps=nan isn't a positive number"),
        ({"clip": "x"}, TypeError, "clip='x' is not a number"),
        ({"exclude": "0.*"}, TypeError, r"exclude='0\.\*' is not a list; write \['0\.\*'\]"),
    ],
)
def test_options_out_of_range_are_refused(options, error, message):
    """Before anything is trained."""
    with pytest.raises(error, match=message):
        Agc(**options)
