"""The plugin in a training."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import PluginError, SettingError, Task, hookimpl
from eventloop_selective_backprop import SelectiveBackprop, draw
from eventloop_testing import isolated_trainer, run_ranks, tiny_task


def dataset(samples=20):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 4, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (samples,), generator=generator))


def task(**given):
    """Trains on 8, 8 and 4 samples an epoch."""
    return Task(**{
        "model": lambda: nn.Linear(4, 3),
        "loss": cross_entropy,
        "train_dataloader": lambda: DataLoader(dataset(), batch_size=8, shuffle=True),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
    } | given)  # fmt: skip


def fit(folder, *algorithms, task=None, **given):
    given = {"max_duration": "2ep"} | given
    with isolated_trainer(folder, task or globals()["task"](), algorithms=algorithms, **given) as t:
        t.fit()
    return t


def weights(trainer):
    return torch.cat([param.detach().flatten() for param in trainer.state.model.parameters()]).cpu()


class Recorder:
    """Keeps how many samples each batch has, read and trained on, and what is logged."""

    def __init__(self):
        self.read, self.trained, self.logged = [], [], []

    @hookimpl
    def batch_start(self, state):
        self.read.append(len(state.inputs))

    @hookimpl
    def after_train_batch(self, state):
        self.trained.append(len(state.inputs))

    @hookimpl
    def log(self, state, numbers, at):
        self.logged += [numbers.get("selective-backprop/loss")]


def by_hand(tmp_path, keep_frac):
    """Trains as the paper says, with torch's own loss of each sample; only the draws are the same."""
    with isolated_trainer(tmp_path, task()) as trainer:
        generator = trainer.state.generator("selective-backprop")
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    loader = DataLoader(dataset(), batch_size=8, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        for inputs, targets in loader:
            with torch.no_grad():
                losses = cross_entropy(model(inputs), targets, reduction="none")
            num = round(len(inputs) * keep_frac)
            kept = draw(losses, num, 1 / keep_frac - 1, generator)
            cross_entropy(model(inputs[kept]), targets[kept]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_a_run_ends_with_the_weights_of_a_loop_written_by_hand(tmp_path):
    """The plugin must be the paper's algorithm, wherever its parts hook in."""
    expected = by_hand(tmp_path, 0.5)

    actual = weights(fit(tmp_path, SelectiveBackprop(keep_frac=0.5)))

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(by_hand(tmp_path, 0.25), expected, atol=1e-4)


@pytest.mark.parametrize("size", [1, 3])
def test_microbatches_change_nothing(tmp_path, size):
    """Samples are selected before the batch is split, and weighed as those that are left."""
    expected = weights(fit(tmp_path / "whole", SelectiveBackprop()))

    actual = weights(fit(tmp_path, SelectiveBackprop(), microbatch_size=size))

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(weights(fit(tmp_path / "off")), expected, atol=1e-4)


def test_the_batch_shrinks_and_the_clock_counts_what_was_read(tmp_path):
    """An epoch is over when the data are, however many of them were trained on."""
    recorder = Recorder()

    trainer = fit(tmp_path, SelectiveBackprop(keep_frac=0.25), recorder)

    assert recorder.read == [8, 8, 4] * 2
    assert recorder.trained == [2, 2, 1] * 2
    assert trainer.state.clock.sample == 40


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({"start": "1ep"}, [8, 8, 4, 4, 4, 2]),
        ({"end": "4ba"}, [4, 4, 2, 4, 8, 4]),
        ({"start": "8sp", "end": "0.5dur"}, [8, 4, 2, 8, 8, 4]),
        ({"interrupt": 2}, [4, 8, 2, 8, 4, 4]),
        ({"interrupt": 3, "start": "2ba"}, [8, 8, 4, 4, 4, 4]),
    ],
)
def test_it_selects_between_start_and_end_but_for_each_nth_batch(tmp_path, options, trained):
    """By the clock alone, so that a resumed run does the same."""
    recorder = Recorder()

    fit(tmp_path, SelectiveBackprop(**options), recorder)

    assert recorder.trained == trained


@pytest.mark.parametrize("size", [None, 4])
def test_samples_without_a_target_are_not_trained_on(tmp_path, size):
    """Their loss is 0 / 0: preferred, or alone in a microbatch, one would end the run."""
    inputs, targets = dataset(24).tensors
    targets = torch.where(torch.arange(24) % 4 > 0, -100, targets)
    labelled = []

    class Looks:
        @hookimpl
        def before_forward(self, state):
            labelled.append((state.targets >= 0).all().item())

    some = task(train_dataloader=lambda: DataLoader(TensorDataset(inputs, targets), 8))
    fit(tmp_path, SelectiveBackprop(keep_frac=0.75), Looks(), task=some, microbatch_size=size)

    assert len(labelled) >= 6
    assert all(labelled)


class Normed(nn.Sequential):
    """A network whose training draws random numbers and moves statistics."""

    def __init__(self):
        super().__init__(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3)
        )


class Freezes:
    """Keeps one layer in evaluation mode."""

    @hookimpl
    def fit_start(self, state):
        state.model[3].eval()


class Traces:
    """Keeps what the passes of the selection could change: modes, buffers, generators."""

    @hookimpl(before="selective-backprop")
    def before_train_batch(self, state):
        self.before = self.trace(state)

    @hookimpl
    def split_batch(self, state):
        assert len(state.inputs) <= 4
        for one, other in zip(self.before, self.trace(state), strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
        return [state.batch]

    def trace(self, state):
        buffers = [buffer.clone() for buffer in state.model.buffers()]
        modes = [module.training for module in state.model.modules()]
        assert modes.count(False) == 1
        return [*buffers, modes, torch.get_rng_state()]


def test_the_extra_pass_leaves_no_trace(tmp_path):
    """Neither statistics of batch norm nor anybody's random numbers; a frozen layer stays so."""
    traces = Traces()

    trainer = fit(tmp_path, SelectiveBackprop(), Freezes(), traces, task=task(model=Normed))

    assert len(traces.before) == 8
    assert trainer.state.model[1].num_batches_tracked == 6


def test_the_closure_of_a_step_sees_the_same_samples(tmp_path):
    """L-BFGS measures the loss again; before a step it must find the same one."""
    seen = []

    class Twice:
        @hookimpl(wrapper=True)
        def optimizer_step(self, state, optimizers, closure):
            seen.append((state.loss.clone(), closure()))
            return (yield)

    fit(tmp_path, SelectiveBackprop(), Twice(), microbatch_size=3)

    for first, repeated in seen:
        torch.testing.assert_close(repeated, first)
    assert len(seen) == 6


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("size", [None, 2])
def test_mixed_precision_trains_on_selected_samples(tmp_path, precision, size):
    """The losses are those of the run's precision; the share that is kept is the same."""
    recorder = Recorder()
    given = {"precision": precision, "microbatch_size": size, "log_interval": "1ba"}

    trainer = fit(tmp_path, SelectiveBackprop(), recorder, task=task(model=Normed), **given)

    assert recorder.trained == [4, 4, 2] * 2
    assert weights(trainer).isfinite().all()
    assert all(0.5 < one < 3 for one in recorder.logged if one is not None)


class NamedMixup:
    """Stands for mixup: notes what it would mix."""

    name = "mixup"

    def __init__(self):
        self.seen = []

    @hookimpl
    def before_train_batch(self, state):
        self.seen.append(len(state.inputs))


@pytest.mark.parametrize("turn", [1, -1])
def test_samples_are_selected_before_they_are_mixed(tmp_path, turn):
    """In whatever order the two are given; a blend has no loss of its own."""
    mixup = NamedMixup()

    fit(tmp_path, *[SelectiveBackprop(), mixup][::turn])

    assert mixup.seen == [4, 4, 2] * 2


def ranks_fit(folder):
    recorder = Recorder()
    trainer = fit(folder, SelectiveBackprop(), recorder, log_interval="1ba")
    return recorder.trained, weights(trainer), trainer.state.clock.sample


def test_each_rank_keeps_its_share(tmp_path):
    """So that shapes agree, nobody waits, and all end with one model."""
    one, other = run_ranks(ranks_fit, tmp_path)

    assert one[0] == other[0] == [4, 1] * 2
    assert torch.equal(one[1], other[1])
    assert one[2] == 40


class WithLoss(nn.Linear):
    def forward(self, inputs):
        logits = super().forward(inputs)
        return {"logits": logits, "loss": logits.square().mean()}


def reads(outputs, targets):
    return cross_entropy(outputs, targets) * (1 if outputs.sum() > 0 else 2)


def standardised(outputs, targets):
    outputs = outputs - outputs.mean(0)
    return (outputs / outputs.norm()).sum()


PAIR = torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64)
UNSUITABLE = {
    "the loss is part of the outputs": {"model": lambda: WithLoss(4, 3), "loss": None},
    "the task has no loss": {"loss": None},
    "required positional argument": {"forward": lambda model, batch: model.forward()},
    "data-dependent control flow": {"loss": reads},
    "that of a batch of one is NaN": {"loss": standardised},
    "the batch holds 'a'": {
        "train_dataloader": [(*PAIR, ["a", "b", "c", "d"])],
        "forward": lambda model, batch: model(batch[0]),
    },
}


class Updates:
    """Owns `train_batch`, and computes its loss by itself."""

    name = "updates"

    @hookimpl
    def train_batch(self, state):
        return state.update(lambda state: state.model(state.inputs).mean())


def test_it_stands_off_where_the_loss_is_another(tmp_path):
    """Samples would be drawn by a loss that isn't trained on."""
    with pytest.raises(PluginError, match="train_batch is updates's"):
        fit(tmp_path, SelectiveBackprop(), Updates())


@pytest.mark.parametrize(("reason", "values"), UNSUITABLE.items(), ids=range(len(UNSUITABLE)))
def test_it_stands_off_where_samples_have_no_loss(tmp_path, reason, values):
    """Who installed it for another task must learn what it wants."""
    with pytest.raises(PluginError, match="no loss of each sample can be had") as raised:
        fit(tmp_path, SelectiveBackprop(), task=task(**values))

    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep_frac": 0}, ValueError, "keep_frac=0 isn't between 0 and 1"),
        ({"keep_frac": 1.0}, ValueError, "keep_frac=1.0"),
        ({"keep_frac": "half"}, TypeError, "keep_frac='half' is not a number"),
        ({"interrupt": 1}, ValueError, "interrupt=1 is neither 0 nor 2 or more"),
        ({"interrupt": -2}, ValueError, "interrupt=-2"),
        ({"interrupt": 2.5}, TypeError, "interrupt=2.5 is not a number of batches"),
        ({"start": "half"}, ValueError, "'half' is not a time"),
    ],
)
def test_an_option_without_a_meaning_is_refused(options, error, message):
    """With the value that was seen."""
    with pytest.raises(error, match=message):
        SelectiveBackprop(**options)


def test_a_share_of_a_run_without_a_length_is_refused(tmp_path):
    """Before training, with the line to write."""
    with pytest.raises(SettingError, match=r"selective-backprop.start: 0.5dur is a fraction"):
        fit(tmp_path, SelectiveBackprop(start="0.5dur"), max_duration=None)


@pytest.mark.parametrize(
    ("start", "end", "shown"),
    [
        ("3ep", "2ep", "start=3ep isn't before end=2ep"),
        ("6ba", "2ep", "start=6ba isn't before end=2ep"),
        ("0.5dur", "2ep", "start=0.5dur isn't before end=2ep"),
        ("4ep", None, "start=4ep isn't before max_duration=4ep"),
        ("1dur", None, "start=1dur isn't before max_duration=4ep"),
    ],
)
def test_a_start_after_which_nothing_is_selected_is_refused(tmp_path, start, end, shown):
    """The run would be one without the plugin, in silence."""
    with pytest.raises(SettingError, match=shown):
        fit(tmp_path, SelectiveBackprop(start=start, end=end), max_duration="4ep")


def test_it_stands_off_where_the_loss_compares_samples(tmp_path):
    """Without some of them it is another loss."""
    with pytest.raises(PluginError, match="the loss may be one over pairs of samples"):
        isolated_trainer(tmp_path, tiny_task(loss_splits=False), algorithms=[SelectiveBackprop()])


def test_a_plugin_whose_loss_compares_samples_is_left_alone(tmp_path):
    """It says so in its class, whatever its name."""

    class Compares:
        name = "compares"
        loss_splits = False

        @hookimpl
        def batch_end(self, state):
            pass

    with pytest.raises(PluginError, match="samples of a batch: compares has loss_splits=False"):
        fit(tmp_path, SelectiveBackprop(), Compares())
