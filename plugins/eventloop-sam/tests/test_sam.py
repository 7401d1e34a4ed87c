"""The plugin in a training."""

import itertools
import os

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import PluginError, Task, hookimpl
from eventloop_fsdp import Fsdp
from eventloop_sam import Sam
from eventloop_testing import isolated_trainer, recorder, run_ranks

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
RHO = 0.5  # large, so that the second gradient is another one


def make_model(*layers, dtype=torch.float32):
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def make_task(*layers, batch_size=8, shuffle=True, optimizer=None, dtype=torch.float32):
    data = TensorDataset(X.to(dtype), Y)
    return Task(
        model=lambda: make_model(*layers, dtype=dtype),
        loss=cross_entropy,
        train_dataloader=lambda: DataLoader(data, batch_size, shuffle=shuffle),
        optimizer=optimizer or (lambda model: torch.optim.SGD(model.parameters(), lr=0.5)),
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
    parameters = trainer.state.model.parameters()
    return torch.cat([param.detach().flatten() for param in parameters]).cpu()


def assert_near(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def weights_by_hand(*, adaptive=False, every=1, second=True):
    """Trains as the papers say, in float64, with no part of eventloop or of the package."""
    torch.manual_seed(0)
    model = make_model(dtype=torch.float64)
    params = list(model.parameters())
    step = 0
    for _ in range(2):
        for inputs, targets in DataLoader(TensorDataset(X.double(), Y), 8, shuffle=True):
            gradients = torch.autograd.grad(cross_entropy(model(inputs), targets), params)
            if second and step % every == 0:
                kept = [param.detach().clone() for param in params]
                sizes = [param.abs() if adaptive else torch.ones_like(param) for param in kept]
                pairs = list(zip(sizes, gradients, strict=True))
                norm = sum(((t * g) ** 2).sum() for t, g in pairs) ** 0.5
                for param, (t, g) in zip(params, pairs, strict=True):
                    param.data = param.data + RHO * t**2 * g / norm
                gradients = torch.autograd.grad(cross_entropy(model(inputs), targets), params)
                for param, value in zip(params, kept, strict=True):
                    param.data = value
            for param, gradient in zip(params, gradients, strict=True):
                param.data = param.data - 0.5 * gradient
            step += 1
    return torch.cat([param.detach().flatten() for param in params])


@pytest.mark.parametrize("options", [{}, {"every": 2}, {"adaptive": True}], ids=str)
def test_a_run_ends_with_the_weights_of_a_loop_written_by_hand(fit, options):
    """The plugin must be the paper's algorithm, wherever its parts hook in."""
    expected = weights_by_hand(**options)

    actual = weights(fit(Sam(rho=RHO, **options), task=make_task(dtype=torch.float64)))

    assert_near(actual, expected, 1e-12)
    assert not torch.allclose(weights_by_hand(second=False), expected, atol=1e-3)


@pytest.mark.parametrize("size", [1, 3])
def test_microbatches_change_nothing(fit, size):
    """The way up is that of the whole batch."""
    expected = weights(fit(Sam(rho=RHO)))

    assert_near(weights(fit(Sam(rho=RHO), microbatch_size=size)), expected)


def whole(trainer):
    """Returns the weights, also those of shards."""
    params = [getattr(one, "full_tensor", one.detach)() for one in trainer.state.model.parameters()]
    return torch.cat([param.detach().flatten() for param in params])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_with_accumulation_end_with_the_weights_of_one(fit, strategy):
    """All ranks go up the same way, that of the global batch, and have one norm."""

    def run(batch_size, *others, **settings):
        task = make_task(batch_size=batch_size, shuffle=False)
        return whole(fit(Sam(rho=RHO), *others, task=task, **settings))

    def run_rank():
        others = [Fsdp()] if strategy == "fsdp" else []
        return run(4, *others, microbatch_size=2)

    expected = run(8)
    actual = run_ranks(run_rank, timeout_s=60)

    for one in actual:
        assert_near(one, expected)
    assert not torch.allclose(expected, run(4), atol=1e-3)


def test_bf16_and_fp16_are_near(fit):
    """The gradient that the way up is made of is unscaled by then."""
    expected = weights(fit(Sam(rho=RHO)))

    assert_near(weights(fit(Sam(rho=RHO), precision="bf16")), expected, 0.05)
    assert_near(weights(fit(Sam(rho=RHO), precision="fp16")), expected, 0.005)
    assert not torch.allclose(weights(fit(precision="fp16")), expected, atol=0.05)


class Overflows:
    """Makes the loss of one pass of the third batch infinite; keeps weights and buffers."""

    def __init__(self, which):
        self.which, self.num_passes, self.weights, self.buffers = which, 0, [], []

    @hookimpl
    def before_train_batch(self, state):
        self.num_passes = 0

    @hookimpl(wrapper=True)
    def loss(self, state):
        loss = yield
        self.num_passes += 1
        is_bad = state.clock.batch == 2 and self.num_passes == self.which
        return loss * float("inf") if is_bad else loss

    @hookimpl
    def batch_end(self, state):
        for kept, tensors in (
            (self.weights, state.model.parameters()),
            (self.buffers, state.model.buffers()),
        ):
            kept.append(torch.cat([one.detach().double().flatten() for one in tensors]))


@pytest.mark.parametrize("which", [1, 2])
def test_an_overflow_in_either_pass_skips_the_step(fit, which):
    """The way up is infinite, or the second gradient is; neither may reach weights or buffers."""
    overflows = Overflows(which)

    settings = {"precision": "fp16", "on_bad_loss": "ignore", "max_duration": "5ba"}
    fit(Sam(rho=RHO), overflows, task=make_task(nn.BatchNorm1d(8)), **settings)

    pairs = itertools.pairwise(overflows.weights)
    assert [torch.equal(*pair) for pair in pairs] == [False, True, False, False]
    assert all(one.isfinite().all() for one in overflows.weights + overflows.buffers)


def two_optimizers(model):
    named = {"first": model[0], "last": model[2]}
    return {name: torch.optim.SGD(one.parameters(), lr=0.5) for name, one in named.items()}


def test_several_optimizers_are_one_step(fit):
    """The way up has one norm over all weights, whoever moves them afterwards."""
    expected = weights(fit(Sam(rho=RHO)))

    assert_near(weights(fit(Sam(rho=RHO), task=make_task(optimizer=two_optimizers))), expected, 0)


def test_an_update_of_some_optimizers_moves_their_weights_alone(fit):
    """The others aren't part of its loss's neighbourhood."""
    seen = []

    class Updates:
        """Makes two updates a batch."""

        @hookimpl
        def train_batch(self, state):
            def loss_fn(state):
                both = [layer.weight.detach().clone() for layer in state.model[::2]]
                seen.append(both)
                return cross_entropy(state.model(state.inputs), state.targets)

            state.update(loss_fn, ["first"])
            return state.update(loss_fn, ["last"])

    fit(Sam(rho=RHO), Updates(), task=make_task(optimizer=two_optimizers), max_duration="1ba")

    first, up, last, up_again = seen
    assert [torch.equal(*pair) for pair in zip(first, up, strict=True)] == [False, True]
    assert [torch.equal(*pair) for pair in zip(last, up_again, strict=True)] == [True, False]


def test_events_fire_once_a_batch(fit):
    """Whoever counts or logs sees one pass, and the loss of the weights, not of the way up."""
    with_sam, without = recorder(), recorder()

    fit(Sam(rho=RHO), with_sam, microbatch_size=3)
    fit(without, microbatch_size=3)

    assert with_sam.seen == without.seen


class TwoPasses:
    """Control: passes twice without putting anything back."""

    @hookimpl(wrapper=True)
    def optimizer_step(self, state, optimizers, closure):
        closure()
        return (yield)


class Mean(nn.Module):
    """Keeps a running mean by replacing its buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


@pytest.mark.parametrize("make_layer", [lambda: nn.BatchNorm1d(8), Mean], ids=["norm", "replaced"])
def test_running_statistics_are_those_of_the_first_pass(fit, make_layer):
    """Evaluation must see the statistics of the weights, each batch once."""

    def buffers(*plugins):
        trainer = fit(*plugins, task=make_task(make_layer()), max_duration="1ba")
        return torch.cat([one.double().flatten() for one in trainer.state.model.buffers()])

    expected = buffers()

    assert torch.equal(buffers(Sam(rho=RHO)), expected)
    assert not torch.equal(buffers(TwoPasses()), expected)


class Masks(nn.Dropout):
    """Keeps the masks of all passes."""

    def __init__(self):
        super().__init__(0.5)
        self.kept = []

    def forward(self, inputs):
        mask = super().forward(torch.ones_like(inputs))
        if self.training:  # else the loss of halves is compared with that of the whole
            self.kept.append(mask)
        return inputs * mask


@pytest.mark.parametrize("size", [None, 3])
def test_both_passes_draw_the_same_dropout(fit, size):
    """The neighbour is one of the same function; and nobody's later draws change."""

    def masks(*plugins):
        trainer = fit(*plugins, task=make_task(Masks()), microbatch_size=size, max_duration="1ep")
        return trainer.state.model[1].kept

    once, twice, control = masks(), masks(Sam(rho=RHO)), masks(TwoPasses())

    step = 1 if size is None else 3
    firsts = [one for idx, one in enumerate(twice) if idx // step % 2 == 0]
    seconds = [one for idx, one in enumerate(twice) if idx // step % 2 == 1]
    torch.testing.assert_close(firsts, once, rtol=0, atol=0)
    torch.testing.assert_close(seconds, once, rtol=0, atol=0)
    assert not torch.equal(control[0], control[step])


def test_weights_come_back_when_the_second_pass_fails(fit, tmp_path):
    """Whoever catches the error goes on with the weights that it had."""

    class Fails:
        """Fails in the second pass, with the weights there."""

        num_passes = 0

        @hookimpl
        def loss(self, state):
            self.num_passes += 1
            self.seen = [one.detach().clone() for one in state.model.parameters()]
            if self.num_passes == 2:
                raise ArithmeticError
            self.before = self.seen
            return cross_entropy(state.outputs, state.targets)

    fails = Fails()
    trainer = isolated_trainer(tmp_path, make_task(), algorithms=[Sam(rho=RHO), fails])
    with trainer, pytest.raises(ArithmeticError):
        trainer.fit()

    params = list(trainer.state.model.parameters())
    assert all(map(torch.equal, params, fails.before))
    assert not any(map(torch.equal, params, fails.seen))


def test_how_much_higher_the_loss_is_there_is_logged(fit):
    """A number for nothing: flat minima have a low one."""
    rows = []

    class Logs:
        """Keeps what is logged."""

        @hookimpl
        def log(self, state, numbers):
            rows.append(numbers)

    fit(Sam(rho=RHO, every=2), Logs(), log_interval="1ba", max_duration="3ba")

    assert [row.get("sam/sharpness", 0) > 0 for row in rows] == [True, False, True]


def test_an_optimizer_that_takes_several_gradients_is_left_alone(fit):
    """LBFGS would ask for them at the weights as they are, and the second pass be in vain."""
    task = make_task(optimizer=lambda model: torch.optim.LBFGS(model.parameters()))

    with pytest.raises(PluginError, match="'lbfgs' is LBFGS, which takes several gradients a step"):
        fit(Sam(), task=task)


def test_sparse_gradients_are_left_alone(fit):
    """Torch's own message about them fills a screen, at the first step."""
    with pytest.raises(PluginError, match="the gradients of '1' are sparse, of which torch knows"):
        fit(Sam(), task=make_task(nn.EmbeddingBag(2, 8, sparse=True)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rho": 0}, ValueError, "rho=0 isn't a positive number"),
        ({"rho": float("nan")}, ValueError, "rho=nan isn't a positive number"),
        ({"rho": "x"}, TypeError, "rho='x' is not a number"),
        ({"every": 0}, ValueError, "every=0 isn't a number of batches"),
        ({"every": 1.5}, TypeError, "every=1.5 is not a number of batches"),
    ],
)
def test_options_out_of_range_are_refused(options, error, message):
    """Before anything is trained."""
    with pytest.raises(error, match=message):
        Sam(**options)
