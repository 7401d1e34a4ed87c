"""A run that is stopped and goes on ends with the bytes of one that wasn't."""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eventloop import TrainerBuilder, hookimpl, schedules
from eventloop.checkpoint.checkpoint_files import (
    Checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from eventloop.checkpoint.part_differences import differences
from eventloop.run.differences import Allowed
from eventloop_testing.case import isolated_trainer, tiny_batches, tiny_task


class Counts:
    """An algorithm with a state, which draws from every generator there is."""

    name = "counts"

    def __init__(self) -> None:
        self.num_batches = 0
        self.sum = torch.zeros(3)

    @hookimpl
    def before_train_batch(self, state: Any) -> None:
        self.num_batches += 1
        generator = state.generator("counts")
        noise = torch.rand(3, generator=generator) + random.random()
        self.sum += noise * self.num_batches
        state.inputs = state.inputs + 0.01 * noise.to(state.device)
        state.log("counts/noise", noise.sum())

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches, "sum": self.sum}

    def load_state_dict(self, state: dict[str, Any], version: str) -> None:
        self.num_batches, self.sum = state["num_batches"], state["sum"]


class Log:
    """A callback that keeps the numbers by their moment; a later one takes the place."""

    name = "log"

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, str], float] = {}

    @hookimpl
    def log(self, state: Any, numbers: dict[str, float], at: Any) -> None:
        self.numbers |= {(at.batch, name): value for name, value in numbers.items()}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))


def task(**given: Any) -> Any:
    values: dict[str, Any] = {
        "model": model,
        "train_dataloader": tiny_batches(5),
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        "scheduler": schedules.cosine(warmup="0.1dur"),
    }
    return tiny_task(**(values | given))


def trainer(folder: Path, log: Log | None = None, **given: Any) -> Any:
    """Builds a trainer that saves every second batch and keeps everything."""
    values: dict[str, Any] = {
        "algorithms": [Counts()],
        "callbacks": [log or Log()],
        "max_duration": "3ep",
        "microbatch_size": 2,
        "checkpoint_interval": "2ba",
        "checkpoint_keep": None,
    } | given
    return isolated_trainer(folder, values.pop("task", None) or task(), **values)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Returns what a run in one go ends with, and its log."""
    folder, log = tmp_path_factory.mktemp("uninterrupted"), Log()
    with trainer(folder, log) as one:
        one.fit()
    return ended_with(folder), log.numbers


def ended_with(folder):
    """Returns what the newest checkpoint of a run holds."""
    return read_checkpoint(max((folder / "run" / "checkpoints").glob("ba*"))).parts


def differing(one, other):
    return [difference.path for difference in differences(one, other)]


def kill_after(folder, batch):
    """Leaves the run as a kill would have after a batch: later checkpoints were never written."""
    for path in (folder / "run" / "checkpoints").glob("ba*"):
        if int(path.name[2:]) > batch:
            shutil.rmtree(path)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("batch", range(15))
def test_killed_anywhere_it_ends_the_same(tmp_path, uninterrupted, batch):
    """Mid-epoch, at the last batch of an epoch, at the first of the next, before the first."""
    log = Log()
    with trainer(tmp_path, log) as one:
        one.fit()
    kill_after(tmp_path, batch)

    with trainer(tmp_path, log) as one:
        one.fit()

    expected, numbers = uninterrupted
    assert differing(expected, ended_with(tmp_path)) == []
    assert log.numbers == numbers


@pytest.mark.nightly
def test_killed_again_and_again_it_ends_the_same(tmp_path, uninterrupted):
    """Each process gets a few batches further."""
    log = Log()
    for batch in (0, 2, 2, 4, 5, 8, 10, 12, 14, 15):
        with trainer(tmp_path, log) as one:
            one.fit()
        kill_after(tmp_path, batch)

    expected, numbers = uninterrupted
    assert differing(expected, ended_with(tmp_path)) == []
    assert log.numbers == numbers


def fresh_generators(parts):
    parts["rank0"]["generators"]["host"]["torch"] = torch.Generator().manual_seed(5).get_state()


def fresh_python(parts):
    kept = random.Random(5).getstate()[1]
    parts["rank0"]["generators"]["host"]["python"]["words"] = torch.tensor(kept)


def fresh_named(parts):
    parts["rank0"]["generators"]["named"] = {}


def no_plugin(parts):
    parts["plugins"] = {}


def no_momenta(parts):
    for states in parts["optimizers"].values():
        states["state"] = {}


def other_schedule(parts):
    for pairs in parts["training"]["schedulers"].values():
        for one in pairs:
            one["state"]["end"] *= 2


def data_shifted(parts):
    parts["rank0"]["feed"]["num_taken"] -= 1


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "spoil",
    [
        fresh_generators,
        fresh_python,
        fresh_named,
        no_plugin,
        no_momenta,
        other_schedule,
        data_shifted,
    ],
)
def test_what_is_left_out_makes_it_end_otherwise(tmp_path, uninterrupted, spoil):
    """Control: the comparison isn't blind to any of these."""
    assert differing(uninterrupted[0], spoiled(tmp_path, spoil))


def spoiled(folder, spoil, **given):
    """Returns what a run ends with that goes on from a checkpoint in which something was spoiled."""
    with trainer(folder, **given) as one:
        one.fit()
    kill_after(folder, 4)
    place = max((folder / "run" / "checkpoints").glob("ba*"))
    checkpoint = read_checkpoint(place)
    spoil(checkpoint.parts)
    shutil.rmtree(place)
    write_checkpoint(place, checkpoint.parts, checkpoint.facts, batch=4)
    with trainer(folder, **given) as one:
        one.fit()
    return ended_with(folder)


def scheduler_anew(parts):
    for pairs in parts["training"]["schedulers"].values():
        for one in pairs:
            one["state"] |= {"last_epoch": 0, "_step_count": 1}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("spoil", "is_same"), [(scheduler_anew, False), (lambda parts: None, True)]
)
def test_a_scheduler_of_torch_that_begins_anew_makes_it_end_otherwise(tmp_path, spoil, is_same):
    """Control: it counts its own steps, where eventloop's schedules read the clock."""
    stepping = task(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
    whole = tmp_path / "whole"
    with trainer(whole, task=stepping) as one:
        one.fit()

    found = differing(ended_with(whole), spoiled(tmp_path / "spoiled", spoil, task=stepping))

    assert (found == []) is is_same


def test_a_damaged_checkpoint_is_passed_over(tmp_path, uninterrupted):
    """The run goes on from the one before, and replaces it when it comes there."""
    with trainer(tmp_path) as one:
        one.fit("8ba")
    weights = tmp_path / "run" / "checkpoints" / "ba00000008" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)

    with trainer(tmp_path) as one:
        assert one.notes[0].startswith("ba00000008 isn't used: model.safetensors: ")
        assert one.state.clock.batch == 6
        one.fit()

    assert differing(uninterrupted[0], ended_with(tmp_path)) == []
    read_checkpoint(weights.parent)


def test_a_complete_run_does_nothing_and_says_so(tmp_path):
    """Whoever starts a job again by mistake loses nothing."""
    with trainer(tmp_path) as one:
        one.fit()
    before = ended_with(tmp_path)

    with trainer(tmp_path) as one, pytest.warns(UserWarning, match="nothing to train: 3ep is done"):
        result = one.fit()

    assert differing(before, ended_with(tmp_path)) == []
    assert result.history[-1]["batch"] == 15


def test_an_extended_run_keeps_its_schedule(tmp_path):
    """`dur` is a fraction of the run as it was first started."""
    with trainer(tmp_path) as one:
        one.fit()

    with trainer(tmp_path, max_duration="4ep", allowed=Allowed(config_change=True)) as one:
        rate = next(iter(one.state.optimizers.values())).param_groups[0]["lr"]
        assert str(one.state.duration) == "3ep"
        assert rate == pytest.approx(0.0, abs=1e-6)
        assert any("max_duration: 3ep -> 4ep" in note for note in one.notes)
        with pytest.warns(UserWarning, match="learning rate"):
            one.fit()
        assert one.state.clock.batch == 20


class Longer:
    """Gives later epochs twice the batches, as a curriculum does."""

    name = "longer"

    @hookimpl
    def should_rebuild_dataloader(self, state: Any) -> bool:
        return bool(state.clock.epoch == 1)

    @hookimpl
    def build_train_dataloader(self, state: Any) -> Any:
        return tiny_batches(8 if state.clock.epoch else 4)


def test_a_fraction_of_an_epoch_stays_what_it_was(tmp_path):
    """Of the run's first epochs, however long one is when the run is resumed."""
    evaluated = {}
    for name, ends in (("in one go", ["3ep"]), ("resumed", ["2ep", "3ep"])):
        settings = {"max_duration": "3ep", "eval_interval": "0.5ep", "checkpoint_interval": "1ep"}
        for until in ends:
            trainer = isolated_trainer(tmp_path / name, algorithms=[Longer()], **settings)
            with trainer:
                history = trainer.fit(until=until).history
        evaluated[name] = [row["batch"] for row in history]

    assert evaluated["resumed"] == evaluated["in one go"] == list(range(2, 22, 2))


def test_a_run_begins_at_a_checkpoint_in_memory(tmp_path):
    """One that is in a file of another framework, which nothing is unpacked for."""
    with isolated_trainer(tmp_path / "a", tiny_task(), max_duration="2ep") as trainer:
        trainer.fit(until="3ba")
        parts, facts = trainer.state.capture()
        taken = {"path": Path("other.ckpt"), "batch": 3, "eventloop": "0.1", "names": tuple(parts)}
        checkpoint = copy.deepcopy(Checkpoint(facts=facts, parts=parts, **taken))
        trainer.fit()
    expected = trainer.state.model.state_dict()

    builder = TrainerBuilder(checkpoint=checkpoint, allowed=Allowed(config_change=True))
    with builder.build(tiny_task(), autoload=False, max_duration="2ep") as resumed:
        assert resumed.state.clock.batch == 3
        resumed.fit()

    actual = resumed.state.model.state_dict()
    assert all(torch.equal(actual[name], one) for name, one in expected.items())


class Centre(nn.Module):
    """A loss that learns: a running mean, and numbers that an optimizer has."""

    def __init__(self, weight=1.0):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("weight", torch.full((3,), weight))
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, outputs, targets):
        if torch.is_grad_enabled():
            self.mean.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)
        return nn.functional.cross_entropy(outputs - self.mean + self.shift, targets, self.weight)


def fit_with_loss(folder: Path, loss: Centre, until: str | None = None) -> dict[str, Any]:
    """Trains model and loss together; gives the weights of both."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([*model.parameters(), *loss.parameters()], 0.05)

    task = tiny_task(loss=loss, optimizer=optimizer)
    allowed = Allowed(config_change=True)
    settings = {"max_duration": "3ep", "checkpoint_interval": "1ba"}
    with isolated_trainer(folder, task, allowed=allowed, **settings) as trainer:
        trainer.fit(until=until)
        weights = {**trainer.state.model.state_dict(), **loss.state_dict()}
        return {name: one.clone() for name, one in weights.items()}


def test_a_loss_that_learns_goes_on(tmp_path):
    """Its buffers and parameters aren't the model's, and would begin anew."""
    expected = fit_with_loss(tmp_path / "in one go", Centre())

    fit_with_loss(tmp_path / "stopped", Centre(), "4ba")
    actual = fit_with_loss(tmp_path / "stopped", Centre())

    assert all(torch.equal(one, expected[name]) for name, one in actual.items())


class Teacher(nn.Module):
    """Compares with a frozen network, and makes a buffer when it is called first."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(3, 3).requires_grad_(False)
        self.num = None

    def forward(self, outputs, targets):
        if self.num is None:
            del self.num
            self.register_buffer("num", torch.zeros(()))
        self.num = self.num + 1
        return nn.functional.mse_loss(outputs, self.teacher(outputs).detach() + self.num)


def test_what_of_a_loss_never_changes_is_not_saved(tmp_path):
    """A teacher may be as large as the model; buffers may be replaced, and come later."""
    with isolated_trainer(
        tmp_path, tiny_task(loss=Teacher()), checkpoint_interval="1ep"
    ) as trainer:
        trainer.fit()

    checkpoint = max((tmp_path / "run" / "checkpoints").iterdir())
    assert read_checkpoint(checkpoint).parts["plugins"]["task"]["state"].keys() == {"num"}


def test_a_loss_keeps_the_numbers_that_it_is_given_now(tmp_path):
    """Weights of the classes that were changed aren't those of the checkpoint."""
    fit_with_loss(tmp_path, Centre(), "4ba")

    assert fit_with_loss(tmp_path, Centre(2.0))["weight"].tolist() == [2.0] * 3


def test_a_group_without_parameters_goes_on(tmp_path):
    """As helpers make them that part weights from biases, where there is none of a kind."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": [*model.parameters()]}, {"params": [], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, 0.1)

    for until in ("2ba", None):
        settings = {"max_duration": "2ep", "checkpoint_interval": "1ba"}
        with isolated_trainer(tmp_path, tiny_task(optimizer=optimizer), **settings) as trainer:
            trainer.fit(until=until)

    assert trainer.state.clock.batch == 6


class Decay:
    """A function with a state, of which torch saves what it holds."""

    def __init__(self):
        self.seen = 0

    def __call__(self, epoch):
        self.seen += 1
        return 1 / (1 + epoch)


def test_a_schedule_of_functions_and_objects_goes_on(tmp_path):
    """Each is compared with its own: one holds nothing, the other something."""

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda epoch: 0.9**epoch, Decay()])

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": one} for one in (model[0].parameters(), model[2].parameters())], 0.1
        )

    for until in ("2ba", None):
        task = tiny_task(optimizer=optimizer, scheduler=scheduler)
        settings = {"max_duration": "2ep", "checkpoint_interval": "1ba"}
        with isolated_trainer(tmp_path, task, **settings) as trainer:
            trainer.fit(until=until)

    assert trainer.state.clock.batch == 6


@pytest.mark.parametrize(
    ("stop", "note"),
    [("2ba", "epoch 1, batch 2"), ("3ba", "epoch 1, batch 3"), ("4ba", "epoch 2, batch 4")],
)
def test_the_header_counts_epochs_as_progress_does(stop, note, make_trainer, tmp_path):
    """In mid-epoch it is the epoch under way, at its end the one that ended."""
    settings = {"run_dir": tmp_path / "run", "max_duration": "4ep", "checkpoint_interval": "1ba"}
    with make_trainer(**settings) as trainer:
        trainer.fit(until=stop)

    notes = make_trainer(**settings).notes

    assert any(one.startswith("resumed: ") and one.endswith(note) for one in notes)
