"""The first run with a plugin that affects the training, and what switches it off."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from eventloop import Trainer, hookimpl
from eventloop.plugin.new_algorithms import can_stop_runs
from eventloop.plugin.records import Plugin

OFF_UNTIL_NAMED = """
from eventloop import hookimpl
class Plugin:
    off_until_named = True
    @hookimpl
    def fit_end(self): print("took part")
"""


@pytest.fixture
def fit(tiny, run, install):
    """Trains beside the installed algorithm `demo-test`; returns the lines about what is new."""
    install("demo-test")

    def fit(*argv):
        ran = run("fit", "tiny.py", *argv)
        assert ran.status == 0, ran.err
        return [one for one in ran.out.splitlines() if one.startswith("new: demo-test ")]

    return fit


def test_the_first_run_with_an_installed_algorithm_says_so(fit):
    """What was installed for a comparison would change all later runs unnoticed."""
    first, second = fit(), fit()

    assert len(first) == 1
    assert "`-p no:demo-test`" in first[0]
    assert '`disable = ["demo-test"]`' in first[0]
    assert second == []


def test_a_run_that_names_it_is_not_the_first(fit):
    """A comparison with `-p` is no consent to all later runs."""
    assert fit("-p", "demo-test") == []
    assert fit("-p", "no:demo-test") == []
    assert len(fit()) == 1


def test_where_nothing_can_be_written_the_run_goes_on(fit, tiny):
    """A checkout may be read-only; the line comes again in another process then."""
    (tiny / ".eventloop").write_text("not a folder")

    assert len(fit()) == 1


def test_from_python_it_is_said_on_stderr(fit, tiny, make_task, capsys):
    """A notebook shows it below the cell; what a script prints stays its own."""
    for _ in range(2):
        with Trainer(make_task(), max_duration="1ep") as trainer:
            trainer.fit()

    out, err = capsys.readouterr()
    assert err.count("eventloop: new: demo-test ") == 1
    assert "demo-test" not in out
    assert "demo_test" in json.loads((tiny / ".eventloop" / "algorithms.json").read_text())


def test_disable_and_enable_write_the_configuration(fit, tiny, run):
    """The file is a person's: comments and ends of lines stay."""
    before = b"[tool.eventloop]\r\nseed = 3  # mine\r\n"
    (tiny / "pyproject.toml").write_bytes(before)

    off = run("plugins", "disable", "demo_test")

    assert off.out.startswith("demo-test: off, disable, pyproject.toml")
    assert (tiny / "pyproject.toml").read_bytes() == before + b'disable = ["demo-test"]\r\n'
    assert fit() == []
    assert run("plugins", "enable", "demo-test").out.startswith("demo-test: active")
    assert len(fit()) == 1


@pytest.mark.parametrize("subcommand", ["enable", "disable"])
def test_what_is_not_installed_is_refused(fit, run, subcommand):
    """A name that matches nothing would have no effect."""
    ran = run("plugins", subcommand, "demo-tset")

    assert ran.status == 2
    assert "the closest is 'demo-test'" in ran.err


def test_an_algorithm_may_be_off_until_it_is_named(tiny, run, install):
    """A flag, an option or the configuration names it."""
    install("shy-test", OFF_UNTIL_NAMED)

    without = run("fit", "tiny.py").out
    listed = run("plugins").out
    named = run("fit", "tiny.py", "-p", "shy-test").out
    run("plugins", "enable", "shy-test")

    assert "took part" not in without
    assert "off until named: `-p shy-test`, or `eventloop plugins enable shy-test`" in without
    assert "off until named" in listed
    assert "took part" in named
    assert "took part" in run("fit", "tiny.py").out
    assert 'required = ["shy-test"]' in (tiny / "pyproject.toml").read_text()


STOPS = """
from eventloop import hookimpl
class Plugin:
    @hookimpl
    def epoch_end(self, state): state.request_stop("enough")
"""
WATCHES = """
from eventloop import hookimpl
class Plugin:
    @hookimpl
    def should_stop(self, state) -> None: "Takes the time."
"""


def test_a_callback_that_can_stop_a_run_is_announced_too(tiny, run, install):
    """One that came with a set of plugins ends runs that were given 100 epochs."""
    install("stops-test", STOPS, group="eventloop.callbacks")
    install("watches-test", WATCHES, group="eventloop.callbacks")

    first, second = (
        [line for line in run("fit", "tiny.py").out.splitlines() if line.startswith("new: ")]
        for _ in range(2)
    )

    (line,) = (line for line in first if "-test" in line)
    assert line.startswith(
        "new: stops-test (eventloop-stops-test 1.0) is installed, can stop a run"
    )
    assert "`-p no:stops-test`" in line
    assert not any("-test" in line for line in second)


class Base:
    """Stops a run from a function inside of a method."""

    def _stop_later(self, state):
        return lambda: state.request_stop("late")


class Inherits(Base):
    """Has it from its base."""


class Answers:
    """May say yes."""

    @hookimpl
    def should_stop(self, state):
        return state.clock.batch > 2


class Looks:
    """Only takes the time, and says so."""

    @hookimpl
    def should_stop(self, state) -> None:
        """Takes the time."""


class Declares(Looks):
    """Has another package stop the run."""

    stops_runs = True


class Denies(Answers):
    """Answers with False alone."""

    stops_runs = False


@pytest.mark.parametrize(
    ("target", "can_stop"),
    [
        (Inherits(), True),
        (Answers(), True),
        (Looks(), False),
        (Declares(), True),
        (Denies(), False),
        (object(), False),
    ],
)
def test_whether_a_callback_can_stop_a_run_is_read_from_its_code_or_declared(target, can_stop):
    """Its author needn't know of it."""
    assert can_stop_runs(Plugin("made", "callback", target)) == can_stop


def test_a_module_can_stop_runs_as_well():
    """A plugin may be a module with functions."""
    module = ModuleType("stops")
    exec("def batch_end(state):\n    state.request_stop('enough')", vars(module))

    assert can_stop_runs(Plugin("stops", "callback", module))
    assert not can_stop_runs(Plugin("empty", "callback", ModuleType("empty")))


def test_of_this_project_s_callbacks_early_stopping_alone_can(clean, make_task):
    """Control: those that only watch aren't announced, though some implement `should_stop`."""
    with Trainer(make_task(), max_duration="1ep") as trainer:
        callbacks = [plugin for plugin in trainer.plugins if plugin.role == "callback"]

    assert {plugin.name for plugin in callbacks if can_stop_runs(plugin)} <= {"early-stopping"}
