"""The Trainer: start, failure, end, and what it says to bad input."""

from __future__ import annotations

import inspect
import socket

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task, Trainer
from eventloop.errors import EventloopError, SettingError, TaskError
from eventloop_check import Check


@pytest.mark.parametrize("loader", [[], (), DataLoader(TensorDataset(torch.zeros(3, 2)),
                                                       batch_size=4, drop_last=True)])  # fmt: skip
def test_an_empty_train_loader_is_refused(loader, make_trainer, make_task):
    """Before training; drop_last is the usual cause."""
    trainer = make_trainer(make_task(train_dataloader=loader))

    with pytest.raises(TaskError, match=r"the train data loader has no batch[\s\S]*drop_last"):
        trainer.fit()


def test_a_mapping_without_labels_can_not_be_a_loss(make_trainer, make_task):
    """Its targets stand under "labels"."""
    task = make_task(train_dataloader=[{"input": torch.zeros(4, 3), "label": torch.zeros(4)}],
                     forward=lambda model, batch: model(batch["input"]))  # fmt: skip

    with pytest.raises(TaskError, match=r"has none; forward takes 'input'\n") as caught:
        make_trainer(task).fit()

    assert "a batch of dict with 'input', 'label'" in str(caught.value)
    assert "rename 'label' to 'labels' in the data set or collate_fn" in str(caught.value)


def test_a_model_without_memory_is_refused(make_trainer, make_task):
    """A strategy may give it some; else nothing would be trained, in silence."""
    with pytest.raises(TaskError, match="'weight' is on the meta device, and has no values"):
        make_trainer(make_task(model=lambda: nn.Linear(3, 3, device="meta")))


def test_a_task_without_an_optimizer_is_refused(make_trainer, make_task):
    """It would train nothing for ten epochs."""
    with pytest.raises(TaskError, match=r"no optimizer holds a parameter[\s\S]*optimizer="):
        make_trainer(make_task(optimizer=None)).fit()


def test_a_fit_without_max_duration_is_refused(make_trainer):
    """One epoch is no better guess than a hundred."""
    with pytest.raises(SettingError, match=r"max_duration is not set[\s\S]*max_duration="):
        make_trainer(max_duration=None).fit()


def test_the_task_may_say_how_long_and_a_keyword_overrides_it(make_task, clean):
    """Weaker than every other layer, stronger than the default."""
    task = make_task(settings={"max_duration": "2ba", "seed": 3})

    for given, batches in (({}, 2), ({"max_duration": "1ba"}, 1)):
        with Trainer(task, autoload=False, device="cpu", **given) as trainer:
            trainer.fit()
        assert trainer.state.clock.batch == batches
        assert trainer.state.settings.seed == 3


@pytest.mark.parametrize("name", ["eval_interval", "log_interval"])
def test_tokens_must_be_counted_for_an_interval_in_them(
    name, make_trainer, make_task, make_batches
):
    """It would never come, in silence."""
    with pytest.raises(SettingError, match=f"{name} is 1000tok, but tokens aren't counted"):
        make_trainer(make_task(eval_dataloaders=make_batches()), **{name: "1000tok"}).fit()


@pytest.mark.parametrize("given", [{}, {"loss_weight": lambda targets: len(targets)}])
def test_tokens_must_be_counted_for_a_run_that_ends_by_them(given, make_trainer, make_task):
    """A run until 1000tok without num_tokens would never end."""
    trainer = make_trainer(make_task(**given), max_duration="1000tok")

    with pytest.raises(
        SettingError, match=r"ends at 1000tok, but tokens aren't counted[\s\S]*num_t"
    ):
        trainer.fit()


@pytest.mark.parametrize(
    ("name", "value"), [("eval_interval", "0.5ep"), ("log_interval", "0.5ep"), ("log_interval", "0.1dur")]
)  # fmt: skip
def test_a_fraction_of_an_epoch_needs_a_loader_with_a_length(name, value, make_trainer, make_task):
    """Found when the trainer is built, with the setting's name."""
    task = make_task(train_dataloader=lambda: iter([]))

    with pytest.raises(SettingError, match=rf"{name}: .* has no length[\s\S]*{name} in batches"):
        make_trainer(task, **{name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_duration": "5 epoch"}, "max_duration: '5 epoch' is not a time; write '5ep'"),
        ({"max_dration": "5ep"}, "'max_dration'; the closest is 'max_duration'"),
        ({"precision": "bf61"}, "precision: 'bf61' isn't one of .*; the closest is 'bf16'"),
        ({"device": "gpu"}, "no device 'gpu'; here it is cuda"),
        ({"clip_norm": -1.0}, "clip_norm: -1.0 isn't a positive number"),
        ({"microbatch_size": 0}, "microbatch_size: 0 is less than one sample"),
        ({"seed": "abc"}, "seed: 'abc' isn't of type int"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_with_its_name(given, message, make_trainer):
    """When the trainer is built."""
    with pytest.raises(SettingError, match=message):
        make_trainer(**given)


AT_EXIT = """
import sys, torch
from eventloop import Task, Trainer, hookimpl

class Closer:
    @hookimpl
    def close(self, state):
        sys.stdout.write(f"closed at batch {state.clock.batch}")

task = Task(model=torch.nn.Linear(2, 1), loss=torch.nn.functional.mse_loss,
            train_dataloader=[(torch.zeros(2, 2), torch.zeros(2, 1))],
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
trainer = Trainer(task, callbacks=[Closer()], autoload=False, max_duration="1ep", device="cpu")
trainer.fit()
END
"""


@pytest.mark.nightly
@pytest.mark.parametrize("end", ["", "raise KeyError('oops')"])
def test_the_exit_of_the_interpreter_closes(end, run_python):
    """A script without `with` keeps its last lines too, and none twice."""
    ran = run_python(AT_EXIT.replace("END", end))

    assert ran.stdout == "closed at batch 1", ran.stderr


def test_exported_weights_come_back(make_trainer, make_task, clean):
    """Weights alone, in a format that nobody can hide code in."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    trainer = make_trainer(make_task(model=model))
    trainer.fit()

    path = trainer.export(clean / "new" / "model.safetensors")
    other = make_trainer(make_task(model=nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))))
    other.load_weights(path)

    expected, actual = (one.state.model.state_dict() for one in (trainer, other))
    assert expected.keys() == actual.keys()
    assert all(torch.equal(value, actual[name]) for name, value in expected.items())


def test_weights_of_another_model_are_refused(make_trainer, make_task, clean):
    """A model that keeps what it was built with would be evaluated as if it had been trained."""
    path = make_trainer().export(clean / "model.safetensors")
    other = make_trainer(make_task(model=nn.Sequential(nn.Linear(3, 3))))

    with pytest.raises(TaskError, match=r"weights in .*model.safetensors can't be loaded"):
        other.load_weights(path)
    with pytest.raises(TaskError, match=r"none of the 2 weights in .* is one of this model's"):
        other.load_weights(path, strict=False)


def test_weights_that_fit_in_part_are_loaded_where_that_is_asked_for(make_trainer, make_task,
                                                                     clean):  # fmt: skip
    """What isn't loaded is named; other shapes never fit."""
    trainer = make_trainer(make_task(model=nn.Linear(3, 3, bias=False)))
    path = trainer.export(clean / "model.safetensors")
    larger, other = make_trainer(), make_trainer(make_task(model=nn.Linear(3, 4)))

    with pytest.warns(UserWarning, match="lacks 1 weight of the model, left as built: 'bias'"):
        larger.load_weights(path, strict=False)
    with pytest.raises(TaskError, match="size mismatch"), pytest.warns(match="lacks 1 weight"):
        other.load_weights(path, strict=False)

    assert torch.equal(larger.state.model.weight, trainer.state.model.weight)


@pytest.mark.parametrize("content", [None, b"", b"not safetensors at all", b"\xff" * 100])
def test_a_file_that_holds_no_weights_is_refused(content, make_trainer, clean):
    """Missing, empty, or of another kind."""
    path = clean / "model.safetensors"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(TaskError, match=r"model.safetensors can't be loaded[\s\S]*--export"):
        make_trainer().load_weights(path)


def test_each_run_has_a_folder_of_its_own_and_makes_none(make_trainer, clean):
    """Whoever writes the first file makes it."""
    trainers = [make_trainer(Task(model=nn.Linear(1, 1), name="digits")) for _ in range(8)]

    folders = {trainer.state.run_dir for trainer in trainers}

    assert len(folders) == 8
    assert {str(folder.parent) for folder in folders} == {"runs/digits"}
    assert list(clean.glob("runs")) == []


def test_plugins_are_listed_from_the_task_to_the_callbacks(make_trainer, make_plugin):
    """In the order in which they are called; the core isn't one of them."""
    trainer = make_trainer(callbacks=[make_plugin("d"), make_plugin("c")],
                           algorithms=[make_plugin("z"), make_plugin("y")])  # fmt: skip

    assert [one.name for one in trainer.plugins] == ["task", "y", "z", "c", "d"]


def test_the_task_brings_plugins(make_trainer, make_task, make_plugin):
    """A task file that needs one says so."""
    task = make_task(algorithms=[make_plugin("a")], callbacks=[make_plugin("b")])

    assert [one.name for one in make_trainer(task).plugins] == ["task", "a", "b"]


def test_an_owner_is_found_in_three_layers(make_trainer, make_plugin):
    """Plugin, then task, then core."""
    trainer = make_trainer(algorithms=[make_plugin("mine", forward=lambda state: state.inputs)])

    owners = [trainer.owner(action).name for action in ("forward", "loss", "backward")]

    assert owners == ["mine", "task", "core"]
    with pytest.raises(ValueError, match="no action is named 'foward'; the closest is 'forward'"):
        trainer.owner("foward")


@pytest.mark.parametrize("until", ["5 epoch", "0ba", 5])
def test_until_must_be_a_time(until, make_trainer):
    """As max_duration."""
    with pytest.raises(ValueError, match=r"is not a time|isn't a finite|no unit"):
        make_trainer().fit(until=until)


def test_ranks_that_cant_be_reached_are_an_error(make_trainer, monkeypatch):
    """One variable alone comes from a shell that was in a job once."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(EventloopError, match=r"can't be reached[\s\S]*RANK=nothing"):
        make_trainer()


def test_a_port_that_is_taken_is_told_of(make_trainer, monkeypatch):
    """Two jobs on one machine, each with the port of the other's example."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in given.items():
            monkeypatch.setenv(name, value)

        with pytest.raises(EventloopError, match=r"fix  set MASTER_PORT to a free port"):
            make_trainer()


def test_the_loss_of_a_task_can_be_called_by_plugins(make_trainer, make_task):
    """A second loss of other outputs, on perturbed inputs say, needs the function itself."""
    trainer = make_trainer(make_task(loss=nn.functional.mse_loss))

    assert trainer.state.criterion is nn.functional.mse_loss
    assert make_trainer(make_task(loss=None)).state.criterion is None


def test_a_plugin_sees_who_looks_on(make_trainer):
    """A plugin can tell that a run is checked, and what was found."""
    check = Check()

    trainer = make_trainer(observers=[check])

    assert check in trainer.state.observers


def test_a_trainer_takes_a_task_plugins_and_settings_alone():
    """What commands and tools bring beside them goes through the builder."""
    parameters = inspect.signature(Trainer).parameters

    assert list(parameters) == ["task", "algorithms", "callbacks", "settings"]
