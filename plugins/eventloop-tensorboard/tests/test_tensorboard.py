"""The plugin in a training, read back by TensorBoard itself."""

import errno
import math
import os
import time

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import nn

from eventloop import PluginError, RunFolderError, SettingError, hookimpl
from eventloop.files import disk
from eventloop_tensorboard import Tensorboard
from eventloop_tensorboard.hyperparameters import hyperparameters
from eventloop_testing import (
    differences,
    edited_checkpoint,
    isolated_trainer,
    last_checkpoint,
    run_ranks,
    tiny_batches,
    tiny_task,
)


class Dies:
    """An algorithm that ends the run, or its process, after a batch."""

    name = "dies"
    free_options = (
        "batch",
        "by_kill",
    )

    def __init__(self, batch=None, *, by_kill=False):
        self.batch, self.by_kill = batch, by_kill

    @hookimpl
    def batch_end(self, state):
        if state.clock.batch == self.batch:
            if self.by_kill:
                os._exit(9)
            raise EOFError

    @hookimpl
    def eval_end(self, state):
        state.log_text("samples", {"prompt": ["1+1=", "# 2"], "at": [state.clock.batch, None]})


class Keeps:
    """A callback that keeps what it logs, and what is logged by others."""

    name = "keeps"

    def __init__(self, values=()):
        self.values = iter(values)
        self.rows = []

    @hookimpl
    def epoch_start(self, state):
        for value in self.values:
            state.log("own/value", value)
            break

    @hookimpl
    def log(self, numbers, at):
        self.rows += [(name, at.batch, value) for name, value in numbers.items()]


def fit(folder, dies=None, *, keeps=None, tensorboard=None, task=None, **given):
    """Trains 9 batches, and saves every fourth."""
    settings = {"max_duration": "3ep", "log_interval": "1ba", "checkpoint_interval": "4ba"}
    plugins = {"callbacks": [tensorboard or Tensorboard(), keeps or Keeps()]}
    plugins["algorithms"] = [dies or Dies()]
    with isolated_trainer(folder, task, **plugins, **(settings | given)) as trainer:
        trainer.fit()
    return trainer


def fit_and_die(folder, dies):
    if not dies.by_kill:
        with pytest.raises(EOFError):
            fit(folder, dies)
        return
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # a fork has none of the threads of the pool
        try:
            fit(folder, dies)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def reader(folder):
    sizes = {"scalars": 0, "histograms": 0}
    return EventAccumulator(str(folder / "run" / "tensorboard"), size_guidance=sizes).Reload()


def numbers(folder):
    """Returns all numbers as TensorBoard reads them: name, step, value."""
    found = reader(folder)
    return sorted(
        (name, event.step, event.value)
        for name in found.Tags()["scalars"]
        for event in found.Scalars(name)
    )


def texts(folder):
    """Returns all texts as TensorBoard's own pages read them: name, step, shape and cells."""
    path = str(folder / "run" / "tensorboard")
    found = plugin_event_accumulator.EventAccumulator(path, tensor_size_guidance={"text": 0})
    found.Reload()
    return [
        (
            name,
            one.step,
            [dim.size for dim in one.tensor_proto.tensor_shape.dim],
            list(one.tensor_proto.string_val),
        )
        for name in found.PluginTagToContent("text")
        for one in found.Tensors(name)
    ]


def histograms(folder):
    found = reader(folder)
    return {
        (name, event.step): event.histogram_value
        for name in found.Tags()["histograms"]
        for event in found.Histograms(name)
    }


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory):
    folder, keeps = tmp_path_factory.mktemp("one-go"), Keeps([0.1, 3**40, -1e-30])
    trainer = fit(folder, keeps=keeps)
    return folder, sorted(keeps.rows), trainer


def test_tensorboard_reads_the_numbers_that_were_logged(in_one_go):
    """As float32, with the batch that they belong to."""
    folder, logged, _ = in_one_go

    assert numbers(folder) == [
        (name, step, float(np.float32(value))) for name, step, value in logged
    ]
    assert {name for name, _, _ in logged} == {
        "train/loss", "lr/sgd", "test/accuracy", "test/loss", "own/value"
    }  # fmt: skip


def test_numbers_without_a_value_are_there_too(tmp_path):
    """A curve that ends says less than one that goes off."""
    fit(tmp_path, keeps=Keeps([math.nan, 1e300, -(10**400)]))

    found = [value for name, _, value in numbers(tmp_path) if name == "own/value"]
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf]


def test_histograms_are_those_of_parameters_and_gradients(in_one_go):
    """Of the first batch, and of the first of each epoch after it."""
    folder, _, trainer = in_one_go
    found = histograms(folder)

    names = [name for name, _ in trainer.state.model.named_parameters()]
    tags = [f"{kind}/{name}" for kind in ("parameters", "gradients") for name in names]
    assert found.keys() == {(tag, step) for tag in tags for step in (1, 4, 7)}
    assert found["gradients/0.weight", 4].num == 24
    assert found["gradients/0.weight", 4].sum_squares > 0


class Measures:
    """An algorithm that computes what the histograms are of."""

    name = "measures"

    def __init__(self):
        self.sums = {}

    @hookimpl(trylast=True)
    def after_train_batch(self, state):
        for name, param in state.model.named_parameters():
            step = state.clock.batch + 1
            self.sums[f"parameters/{name}", step] = param.double().sum().item()
            self.sums[f"gradients/{name}", step] = param.grad.double().sum().item()


@pytest.mark.parametrize(
    "given", [{}, {"precision": "bf16"}, {"precision": "fp16"}, {"microbatch_size": 3}]
)
def test_a_histogram_is_of_the_step_that_it_stands_at(tmp_path, given):
    """Gradients are whole and unscaled, parameters those that gave them."""
    measures = Measures()

    fit(tmp_path, measures, tensorboard=Tensorboard(histograms="2ba"), **given)

    found = histograms(tmp_path)
    assert {step for _, step in found} == {1, 3, 5, 7, 9}
    for key, histogram in found.items():
        assert histogram.sum == pytest.approx(measures.sums[key], abs=1e-4)


def test_several_updates_of_a_batch_make_one_histogram_each(tmp_path):
    """A GAN's parameters stand in both updates, its gradients each in one."""

    class TwoUpdates:
        name = "two-updates"

        @hookimpl
        def train_batch(self, state):
            for name in ("0", "2"):
                stepped = state.update(
                    lambda state: state.model(state.inputs).square().mean(), optimizers=[name]
                )
            return stepped

    def optimizers(model):
        return {name: torch.optim.SGD(model[int(name)].parameters(), lr=0.1) for name in ("0", "2")}

    fit(tmp_path, TwoUpdates(), task=tiny_task(optimizer=optimizers), max_duration="1ep")

    found = reader(tmp_path)
    tags = found.Tags()["histograms"]
    assert {tag for tag in tags if "weight" in tag} == {
        "parameters/0.weight", "parameters/2.weight", "gradients/0.weight", "gradients/2.weight"
    }  # fmt: skip
    assert all(len(found.Histograms(tag)) == 1 for tag in tags)


@pytest.mark.about_cpu  # the pretend accelerator has no sparse tensors
def test_what_has_no_histogram_is_passed_over(tmp_path):
    """Frozen parameters have no gradient, empty and sparse ones nothing to count."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.top = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)
            self.top.bias.requires_grad_(False)
            self.empty = nn.Parameter(torch.zeros(0))

        def forward(self, words):
            return self.top(self.words(words))

    batches = [(torch.arange(4), torch.tensor([0, 1, 2, 0]))]
    optimizer = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1)}
    task = tiny_task(model=Odd, train_dataloader=batches, eval_dataloaders=None, **optimizer)
    fit(tmp_path, task=task, max_duration="1ep")

    assert sorted(reader(tmp_path).Tags()["histograms"]) == [
        "gradients/top.weight", "parameters/top.bias", "parameters/top.weight",
        "parameters/words.weight",
    ]  # fmt: skip


def test_without_histograms_there_are_none(tmp_path):
    """They are the part that costs something."""
    fit(tmp_path, tensorboard=Tensorboard(histograms=None))

    assert histograms(tmp_path) == {}
    assert numbers(tmp_path)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("batches", "by_kill"),
    [([1], False), ([4], True), ([5], False), ([9], False), ([6, 7, 5, 9], True)],
)
def test_a_resumed_run_reads_as_one_in_one_go(tmp_path, in_one_go, batches, by_kill):
    """No point is there twice, none of what was taken back is left, however often it was killed."""
    folder, _, _ = in_one_go
    for batch in batches:
        fit_and_die(tmp_path, Dies(batch, by_kill=by_kill))

    fit(tmp_path)

    expected = [row for row in numbers(folder) if row[0] != "own/value"]
    assert numbers(tmp_path) == expected
    assert histograms(tmp_path) == histograms(folder)
    assert texts(tmp_path) == texts(folder)


def test_texts_stand_at_their_step(in_one_go):
    """A table with its head; each cell is indented, so that no Markdown is made of it."""
    cells = [
        [b"    prompt", b"    at", b"    1+1=", b"    %d" % step, b"    # 2", b""]
        for step in (3, 6, 9)
    ]

    assert texts(in_one_go[0]) == [
        ("test/samples/text_summary", step, [3, 2], one) for step, one in zip((3, 6, 9), cells)
    ]


def test_there_are_points_to_be_hidden(tmp_path):
    """Control: the killed process had written beyond its checkpoint."""
    fit_and_die(tmp_path, Dies(7))

    assert max(step for _, step, _ in numbers(tmp_path)) == 6
    assert not (tmp_path / "run" / "checkpoints" / "ba00000006").exists()


def test_points_at_the_checkpoint_itself_are_there_once(tmp_path, in_one_go):
    """The evaluation of an epoch comes after a checkpoint of its last batch, under its number."""
    given = {"checkpoint_interval": "3ba", "eval_interval": "3ba"}
    with pytest.raises(EOFError):
        fit(tmp_path, Dies(5), **given)

    fit(tmp_path, **given)

    steps = [step for name, step, _ in numbers(tmp_path) if name == "test/accuracy"]
    assert steps == [3, 6, 9]


def test_two_equal_runs_differ_in_what_is_of_one_run_alone(tmp_path):
    """`checkpoints diff` leaves out wall times, and sees whatever else differs."""
    for name in "ab":
        fit(tmp_path / name)
    parts = [last_checkpoint(tmp_path / name).parts for name in "ab"]

    told = {one.of_one_run for one in differences(*parts, times=True)}

    assert list(differences(*parts)) == []
    assert parts[0]["plugins"]["tensorboard"]["state"]["events"]
    assert told == {"seconds", "plugins/tensorboard/state/of_this_run"}


def test_a_run_goes_on_from_an_older_checkpoint(tmp_path, in_one_go):
    """There the events have their wall times; they keep those of when they were logged."""
    before = time.time()
    fit_and_die(tmp_path, Dies(5))
    between = time.time()
    with edited_checkpoint(tmp_path) as checkpoint:
        state = checkpoint.parts["plugins"]["tensorboard"]["state"]
        times = state.pop("of_this_run")["wall_times"]
        for idx, (data, at) in enumerate(zip(state["events"], times, strict=True)):
            event = Event.FromString(data)
            event.wall_time = at
            state["events"][idx] = event.SerializeToString()

    fit(tmp_path)

    again = [one.wall_time for one in reader(tmp_path).Scalars("train/loss") if one.step == 4]
    assert numbers(tmp_path) == [row for row in numbers(in_one_go[0]) if row[0] != "own/value"]
    assert [before < one < between for one in again] == [True]


def test_a_resumed_run_keeps_the_wall_times_of_what_it_writes_again(tmp_path):
    """A number is drawn at the time that it was logged at."""
    before = time.time()
    fit_and_die(tmp_path, Dies(5))
    between = time.time()

    fit(tmp_path)

    again = [one.wall_time for one in reader(tmp_path).Scalars("train/loss") if one.step == 4]
    assert [before < one < between for one in again] == [True]


def test_a_run_that_begins_anew_hides_the_one_before(tmp_path):
    """Two runs in one folder would be drawn as one curve that goes back and forth."""
    for duration in ("3ep", "1ep"):
        fit(tmp_path, max_duration=duration, checkpoint_interval=None)

    assert {step for _, step, _ in numbers(tmp_path)} == {1, 2, 3}


def test_hyperparameters_are_settings_and_options(in_one_go):
    """So that the table of runs can be sorted by what differs."""
    folder, _, _ = in_one_go
    content = reader(folder).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams

    assert found["max_duration"].string_value == "3ep"
    assert found["seed"].number_value == 0
    assert "run_dir" not in found


def test_numbers_of_the_manifest_are_numbers_again():
    """It has floats as text, which would be sorted as text."""
    manifest = {
        "settings": {"clip_norm": "0.5", "deterministic": False, "run_dir": "x", "compile": None},
        "task": {"options": {"lr": "1e-3", "kind": "big", "sizes": [1, 2]}},
        "plugins": [{"name": "mixup", "options": {"alpha": "0.2"}}],
    }

    assert hyperparameters(manifest) == {
        "clip_norm": 0.5, "deterministic": False, "task.lr": 0.001, "task.kind": "big",
        "task.sizes": "[1, 2]", "mixup.alpha": 0.2,
    }  # fmt: skip


def test_two_ranks_write_once(tmp_path):
    """Rank 0 does; gradients are averaged by then."""

    def run(folder):
        fit(folder, task=tiny_task(train_dataloader=tiny_batches(6)))

    run_ranks(run, tmp_path)

    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
    losses = [step for name, step, _ in numbers(tmp_path) if name == "train/loss"]
    assert losses == list(range(1, 10))
    assert histograms(tmp_path)["gradients/0.weight", 1].num == 24


def test_a_folder_that_takes_no_events_is_named(tmp_path):
    """A file in the place of the folder, before anything is trained."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").touch()

    with pytest.raises(RunFolderError, match="tensorboard' is a file, but the run needs a folder"):
        fit(tmp_path)


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    """With the folder, and the way to go on without the plugin."""
    create = disk.create

    def full(name, at=None):
        if str(name).startswith("events."):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(name, at)

    monkeypatch.setattr(disk, "create", full)

    with pytest.raises(PluginError, match=r"can't be written to .*No space left") as raised:
        fit(tmp_path)
    assert str(tmp_path / "run" / "tensorboard") in str(raised.value)
    assert 'disable = ["tensorboard"]' in str(raised.value)


def test_a_trainer_that_trains_nothing_writes_nothing(tmp_path):
    """Looking at a model makes no folders."""
    isolated_trainer(tmp_path, callbacks=[Tensorboard()]).close()

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["often", "0ba"])
def test_a_time_that_is_none_is_refused(value):
    """Before the run."""
    with pytest.raises(ValueError, match=value):
        Tensorboard(histograms=value)


def test_an_interval_in_tokens_needs_tokens(tmp_path):
    """After the first histogram none would come, in silence."""
    with pytest.raises(SettingError, match="histograms is 5tok, but tokens aren't counted"):
        fit(tmp_path, tensorboard=Tensorboard(histograms="5tok"))
