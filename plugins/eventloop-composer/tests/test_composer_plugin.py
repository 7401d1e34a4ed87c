"""Composer's objects beside a task of eventloop's, by name and as instances."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from composer.algorithms import EMA, GradientClipping
from composer.core import Algorithm, Callback, Event
from composer.loggers import InMemoryLogger
from torch import nn

from eventloop import PluginError, Trainer, hookimpl
from eventloop.cli import main
from eventloop_composer import Composer
from eventloop_testing import check_plugin, tiny_task

pytestmark = pytest.mark.filterwarnings("ignore")


class Doubles(Algorithm):
    """Replaces what it can: the batch, the outputs and the loss."""

    def match(self, event, state):
        return event in (Event.AFTER_DATALOADER, Event.AFTER_FORWARD, Event.AFTER_LOSS)

    def apply(self, event, state, logger):
        if event == Event.AFTER_DATALOADER:
            inputs, targets = state.batch
            state.batch = (inputs * 2, targets)
        elif event == Event.AFTER_FORWARD:
            state.outputs = state.outputs * 2
        else:
            state.loss = state.loss * 2


class DoublesHere:
    """The same for eventloop."""

    @hookimpl
    def after_dataloader(self, state):
        state.inputs = state.inputs * 2

    @hookimpl
    def after_forward(self, state):
        state.outputs = state.outputs * 2

    @hookimpl
    def after_loss(self, state):
        state.loss = state.loss * 2


class Stops(Callback):
    """Stops the run after two batches, and logs a number."""

    def batch_end(self, state, logger):
        logger.log_metrics({"stops/batch": state.timestamp.batch.value})
        if state.timestamp.batch == 2:
            state.stop_training()


def fitted(*algorithms, **settings):
    values = {"max_duration": "2ep", "autoload": False} | settings
    with Trainer(tiny_task(), algorithms=algorithms, **values) as trainer:
        trainer.fit()
    return trainer


def same_weights(one, other):
    pairs = zip(one.state.model.parameters(), other.state.model.parameters(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("size", [None, 2])
def test_what_an_algorithm_replaces_is_replaced_in_our_state(size):
    """The States say the same after an event, microbatch by microbatch."""
    here = fitted(DoublesHere(), microbatch_size=size)

    bridged = fitted(Composer(algorithms=[Doubles()]), microbatch_size=size)

    assert same_weights(bridged, here)
    assert not same_weights(bridged, fitted(microbatch_size=size))


def test_a_callback_stops_the_run_and_its_numbers_reach_our_loggers():
    """`stop_training` shortens Composer's max_duration, which is ours."""
    rows = []

    class Rows:
        @hookimpl
        def log(self, state, numbers, at):
            rows.append((at.batch, numbers.get("stops/batch")))

    with Trainer(
        tiny_task(),
        algorithms=[Composer(callbacks=[Stops()])],
        callbacks=[Rows()],
        max_duration="2ep",
        autoload=False,
    ) as trainer:
        trainer.fit()

    assert trainer.state.clock.batch == 2
    assert "Composer" in trainer.state.stop_reason
    assert [one for one in rows if one[1] is not None] == [(1, 1.0), (2, 2.0)]


def test_composers_loggers_get_what_its_trainer_logs():
    """Loss, time and sizes, by Composer's names."""
    memory = InMemoryLogger()

    fitted(Composer(loggers=[memory]), microbatch_size=2)

    assert {"loss/train/total", "time/batch", "time/epoch", "time/sample"} <= memory.data.keys()
    assert memory.data["trainer/device_train_microbatch_size"][0][1] == 2


def test_tokens_that_a_task_counts_are_logged_with_each_batch():
    """They are counted on the host alone, before the batch is copied to the device."""
    memory = InMemoryLogger()
    task = tiny_task(num_tokens=lambda batch: 7)
    with Trainer(
        task, algorithms=[Composer(loggers=[memory])], max_duration="3ba", autoload=False
    ) as trainer:
        trainer.fit()

    assert [value for _, value in memory.data["time/token"]] == [0, 7, 14, 21]


def test_gradients_are_there_when_a_batch_has_ended():
    """Composer's OptimizerMonitor looks at them then; its trainer empties them with the next batch."""
    seen = []

    class Looks(Callback):
        def batch_end(self, state, logger):
            seen.append(next(state.model.parameters()).grad is not None)

        def before_train_batch(self, state, logger):
            seen.append(next(state.model.parameters()).grad is None)

    fitted(Composer(callbacks=[Looks()]))

    assert len(seen) == 12
    assert all(seen)
    assert same_weights(fitted(), fitted(Composer(callbacks=[Looks()])))


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("composer.algorithms.MixUpp", "MixUp"),
        ("nowhere.Mixup", "can't be imported"),
        ("composer.callbacks.LRMonitor", "not a composer.core.algorithm.Algorithm"),
        ({"composer.algorithms.MixUp": {"beta": 1}}, "unexpected keyword argument 'beta'"),
    ],
)
def test_what_is_not_an_algorithm_is_refused_by_name(option, problem):
    """The closest name, what it is instead, or what it doesn't take."""
    with pytest.raises(PluginError, match=problem):
        Composer(algorithms=[option])


def test_names_classes_arguments_and_instances_are_all_taken():
    """As a command line, a file and Python write them."""
    clipping = {"GradientClipping": {"clipping_type": "norm", "clipping_threshold": 0.1}}

    plugin = Composer(algorithms=["composer.algorithms:ChannelsLast", clipping, EMA])

    names = [type(one).__name__ for one in plugin.algorithms]
    assert names == ["ChannelsLast", "GradientClipping", "EMA"]
    assert isinstance(plugin.algorithms[1], GradientClipping)


def test_the_plugin_keeps_the_contract_of_every_plugin():
    """Saved, stopped, resumed, beside other options: as the catalogue checks all others."""
    check_plugin(
        Composer,
        role="algorithm",
        options={"algorithms": [Doubles], "callbacks": ["composer.callbacks.LRMonitor"]},
        task=tiny_task,
    )


@pytest.mark.nightly
def test_a_plugin_that_sleeps_imports_nothing_and_breaks_nothing():
    """Torchvision beside another torch can't be imported, by torchmetrics neither, until this is."""
    code = (
        "import sys, eventloop_composer.plugin as plugin\n"
        "assert not {'composer', 'torchvision'} & sys.modules.keys()\n"
        "assert plugin.Composer.wakes_with == ('algorithms', 'callbacks', 'loggers')\n"
        "import torchmetrics, torchvision\n"
    )

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr


def test_names_work_on_the_command_line(tmp_path, monkeypatch, capsys):
    """As YAML: names alone, and with arguments."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("from eventloop_testing import tiny_task\ntask = tiny_task()\n")
    named = (
        "[{composer.algorithms.GradientClipping: {clipping_type: norm, clipping_threshold: 0.5}}]"
    )
    flags = ["--composer.algorithms", named, "--composer.callbacks", "[LRMonitor]"]

    status = main(
        ["fit", "train.py", "--max-duration", "2ba", "--no-plugins", "-p", "composer", *flags]
    )

    assert status == 0
    assert "GradientClipping" in capsys.readouterr().out


@pytest.mark.nightly
def test_importing_composer_leaves_signals_and_operators_alone():
    """Its engine takes SIGINT and SIGTERM, a run of ours ends with a checkpoint; two packages may mend torchvision."""
    code = """
import signal
import torch
library = torch.library.Library("torchvision", "FRAGMENT")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
signal.signal(signal.SIGTERM, signal.SIG_DFL)
from eventloop_composer.importing import import_composer
import_composer()
import composer.core.engine
from eventloop_composer import Trainer
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_an_algorithm_that_wants_the_graph_gets_it():
    """`backwards_create_graph` keeps the graph of the gradients."""

    class Wants(Algorithm):
        backwards_create_graph = True
        found: bool | None = None

        def match(self, event, state):
            return event == Event.AFTER_BACKWARD

        def apply(self, event, state, logger):
            type(self).found = next(state.model.parameters()).grad.requires_grad

    def net():
        return nn.Linear(3, 3)

    with Trainer(
        tiny_task(model=net),
        algorithms=[Composer(algorithms=[Wants()])],
        max_duration="1ba",
        autoload=False,
    ) as trainer:
        trainer.fit()

    assert Wants.found is True
