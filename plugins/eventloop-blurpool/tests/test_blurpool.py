"""The plugin in a training."""

import pytest
import torch
from torch import nn

from eventloop import PluginError, hookimpl
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop_blurpool import BlurConv2d, Blurpool, anti_aliased
from eventloop_testing import differences, isolated_trainer, run_ranks, tiny_task

NUM_BATCHES = 5


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def batches():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_BATCHES, 4, 1, 8, 8, generator=generator)
    return [(batch, batch.mean(3).argmax(2)[:, 0] % 3) for batch in images]


def image_task(**given):
    values = {"train_dataloader": batches(), "eval_dataloaders": None}
    return tiny_task(**values | {"model": make_model} | given)


def fit(folder, *algorithms, task=None, **given):
    given = {"max_duration": "2ep"} | given
    plugins = algorithms or (Blurpool(min_channels=4),)
    with isolated_trainer(folder, task or image_task(), algorithms=plugins, **given) as trainer:
        trainer.fit()
    return trainer


class Nothing:
    @hookimpl
    def close(self):
        pass


def weights(trainer):
    return torch.cat([param.detach().flatten() for param in trainer.state.model.parameters()]).cpu()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with blurred layers."""
    return fit(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The same without."""
    return fit(tmp_path_factory.mktemp("plain"), Nothing())


def test_a_run_ends_with_the_weights_of_a_loop_written_by_hand(trained, plain):
    """The plugin is the surgery and nothing else."""
    torch.manual_seed(0)
    model, _ = anti_aliased(make_model(), min_channels=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches() * 2:
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.cat([param.detach().flatten() for param in model.parameters()])

    torch.testing.assert_close(weights(trained), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(weights(plain), expected, atol=1e-4)


def test_the_header_says_what_blurs(trained, plain):
    """Who wonders at a number has to see which layers are others."""
    note = "blurpool: 1 convolution and 1 max pool blur before leaving pixels out (2, 3)"

    assert note in trained.notes
    assert trained.state.plugin("blurpool").replaced == ("2", "3")
    assert not any("blurpool" in one for one in plain.notes)


@pytest.mark.parametrize("given", [{"microbatch_size": 1}, {"microbatch_size": 3}])
def test_microbatches_change_nothing(tmp_path, trained, given):
    """Each image is blurred by itself."""
    actual = weights(fit(tmp_path, **given))

    torch.testing.assert_close(actual, weights(trained), rtol=0, atol=1e-6)


def test_the_closure_of_a_step_gives_the_same_loss(tmp_path):
    """Nothing is drawn or kept between two passes."""
    seen = []

    class Twice:
        @hookimpl(wrapper=True)
        def optimizer_step(self, state, optimizers, closure):
            seen.append((state.loss.clone(), closure()))
            return (yield)

    fit(tmp_path, Blurpool(min_channels=4), Twice(), microbatch_size=2, max_duration="1ep")

    assert len(seen) == NUM_BATCHES
    assert all(torch.equal(first, repeated) for first, repeated in seen)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_trains_alike(tmp_path, trained, precision):
    """The filter has the type of what it filters."""
    actual = fit(tmp_path, precision=precision)

    torch.testing.assert_close(weights(actual), weights(trained), rtol=0, atol=2e-2)
    assert not torch.equal(weights(actual), weights(trained))


@pytest.mark.nightly
def test_compiled_it_is_the_same_run(tmp_path, trained):
    """In one graph, without a break."""
    given = {"backend": "aot_eager", "fullgraph": True}

    actual = weights(fit(tmp_path, compile=given))

    torch.testing.assert_close(actual, weights(trained), rtol=0, atol=1e-6)


def of_rank(folder):
    """Trains with half of each batch, as two ranks do; a list is shared out by batches."""
    halves = [tuple(part[i : i + 2] for part in batch) for batch in batches() for i in (0, 2)]
    return weights(fit(folder, task=image_task(train_dataloader=halves)))


def test_two_ranks_end_with_the_weights_of_one(tmp_path, trained):
    """The surgery comes before the model is wrapped."""
    first, second = run_ranks(of_rank, tmp_path)

    assert torch.equal(first, second)
    torch.testing.assert_close(first, weights(trained), rtol=0, atol=1e-6)


class Stops(Exception):
    pass


class StopsAt:
    name = "stops-at"
    free_options = ("batch",)

    def __init__(self, batch=-1):
        self.batch = batch

    @hookimpl
    def after_train_batch(self, state):
        if state.clock.batch == self.batch:
            raise Stops


def saved(folder, stop=-1):
    """Trains with a checkpoint every second batch, and may be stopped in the middle of one."""
    plugins = (Blurpool(min_channels=4), StopsAt(stop))
    fit(folder, *plugins, microbatch_size=3, checkpoint_interval="2ba")


def last(folder):
    return read_checkpoint(max((folder / "run" / "checkpoints").glob("ba*"))).parts


def test_stopped_and_resumed_it_ends_with_the_same_bits(tmp_path, plain):
    """The layers are replaced again, then loaded: names and optimizer states fit."""
    saved(tmp_path / "whole")
    with pytest.raises(Stops):
        saved(tmp_path / "stopped", 7)
    early = last(tmp_path / "stopped")

    saved(tmp_path / "stopped")

    whole = last(tmp_path / "whole")
    assert list(differences(whole, last(tmp_path / "stopped"))) == []
    assert list(differences(whole, early)) != []
    assert whole["model"].keys() == plain.state.model.state_dict().keys()


def test_weights_go_into_a_model_without_it_and_back(tmp_path):
    """Files have the names of the plain model: old ones can be loaded, new ones served."""
    file = tmp_path / "weights.safetensors"
    given = {"algorithms": [Blurpool(min_channels=4)], "seed": 1}
    with isolated_trainer(tmp_path / "plain", image_task()) as plain:
        plain.export(file)
    with isolated_trainer(tmp_path / "blurred", image_task(), **given) as blurred:
        before = weights(blurred)
        blurred.load_weights(file)

        after = weights(blurred)

    assert isinstance(blurred.state.model[3], BlurConv2d)
    assert torch.equal(after, weights(plain))
    assert not torch.equal(before, after)


def test_it_stands_off_where_nothing_leaves_pixels_out(tmp_path):
    """A model of words, say; whoever asked for it learns why."""
    with pytest.raises(PluginError, match="no max pool and no 2-D convolution of 16 input") as told:
        fit(tmp_path, Blurpool(), task=tiny_task())

    assert "doesn't suit this task" in str(told.value)


@pytest.mark.parametrize(
    ("given", "error", "shown"),
    [
        ({"filter_size": 1}, ValueError, "filter_size=1 is outside 2 to 7"),
        ({"filter_size": 8}, ValueError, "filter_size=8"),
        ({"filter_size": 3.0}, TypeError, "filter_size=3.0"),
        ({"min_channels": 0}, ValueError, "min_channels=0"),
        ({"min_channels": "3"}, TypeError, "min_channels='3'"),
        ({"convs": False, "max_pools": False}, ValueError, "nothing to replace"),
    ],
)
def test_options_without_a_meaning_are_refused(given, error, shown):
    """With the value that was seen."""
    with pytest.raises(error, match=shown):
        Blurpool(**given)
