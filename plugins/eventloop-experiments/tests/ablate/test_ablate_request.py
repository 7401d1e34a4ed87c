"""What `eventloop ablate` makes of a command line, before anything is trained."""

from __future__ import annotations

import importlib.util
import os
import re
import sys

import pytest

from eventloop import EventloopError, PluginError
from eventloop.commands import UsageError, prepare, read_arguments
from eventloop_experiments.ablate import run
from eventloop_experiments.ablate.ablation_request import COMMAND, read_ablation
from eventloop_experiments.ablate.ablation_runs import runs_of
from eventloop_experiments.ablate.table import header
from eventloop_experiments.runs import Metric, choose_metric

ALPHA = """
from eventloop import hookimpl

class Plugin:
    def __init__(self, *, alpha: float = 0.4) -> None:
        if alpha < 0:
            raise ValueError(f"alpha={alpha} is not a share")

    @hookimpl
    def close(self): pass
"""


@pytest.fixture
def read(tiny, install):
    """Reads a command line in an environment with two algorithms and a callback."""
    install(tiny, "aa-test", ALPHA)
    install(tiny, "bb-test", ALPHA)
    install(tiny, "watch-test", ALPHA, "eventloop.callbacks")

    def read(*argv):
        arguments = read_arguments(["tiny.py", "--no-plugins", *argv], COMMAND)
        return read_ablation(arguments, prepare(arguments, COMMAND))

    return read


BOTH = ("-p", "aa-test", "-p", "bb-test")


def test_every_seed_has_a_run_of_each_variant(read):
    """A seed after the other: an ablation that is stopped early has whole seeds."""
    runs = runs_of(read(*BOTH, "--seeds", "2"))

    names = ["none", "all", "without aa-test", "without bb-test"]
    assert [(one.seed, one.variant.name) for one in runs] == [
        (seed, name) for seed in (0, 1) for name in names
    ]


def test_one_algorithm_is_compared_with_none_alone(read):
    """All and without nothing would be the same run twice."""
    ablation = read("-p", "aa-test")

    assert [one.variant.name for one in runs_of(ablation)[:2]] == ["none", "aa-test"]
    assert len(runs_of(ablation)) == 2 * 5


def test_a_run_is_the_command_line_without_what_is_off(read):
    """A flag of a plugin that is off would be an error."""
    flags = ("--aa-test.alpha", "0.2", "--bb-test.alpha", "0.3", "--clip-norm", "1")
    ablation = read(*BOTH, *flags, "-p", "watch-test", "--limit-eval-batches", "2", "--seeds", "1")
    argv = {one.variant.name: one.argv for one in runs_of(ablation)}

    assert argv["without aa-test"] == (
        "fit", "tiny.py", "--unlocked", "--limit-eval-batches=2", "--no-plugins", "-pbb-test",
        "-pwatch-test", "-pno:aa-test", "--bb-test.alpha=0.3", "--clip-norm=1", "--seed=0",
    )  # fmt: skip
    assert "-pno:bb-test" in argv["none"]
    assert not any("alpha" in word for word in argv["none"])


def test_an_option_that_can_not_be_is_found_before_the_runs(read):
    """Each run with the algorithm would fail, one after the other."""
    with pytest.raises(PluginError, match=r"bb-test can't be built: .*alpha=-1\.0 is not a share"):
        read(*BOTH, "--bb-test.alpha", "-1")


def test_what_is_kept_takes_part_in_all_runs(read):
    """An algorithm that the task can't do without isn't what is asked about."""
    ablation = read(*BOTH, "--keep", "BB_test", "--seeds", "1")

    assert [one.variant.algorithms for one in runs_of(ablation)] == [(), ("aa-test",)]
    assert all("-pbb-test" in one.argv for one in runs_of(ablation))
    assert "in all runs: bb-test" in [*header(ablation, 2, 0)]


def test_an_algorithm_from_a_file_is_left_out_by_not_naming_it(read, tiny):
    """It isn't installed, and so can't be switched off."""
    (tiny / "mine.py").write_text(ALPHA + "    role = 'algorithm'\n")
    runs = runs_of(read("-p", "mine.py:Plugin"))

    assert "-pmine.py:Plugin" in runs[1].argv
    assert not any(
        "mine" in word or "plugin" in word[3:] for word in runs[0].argv[3:] if word.startswith("-p")
    )


def test_the_same_line_has_the_same_folder(read, tiny):
    """So that it goes on; another one begins anew."""
    folder = read(*BOTH).folder

    assert folder.name.startswith("ablate-tiny-")
    assert read(*BOTH, "--seeds", "9", "--metric", "test/accuracy").folder == folder
    assert read(*BOTH, "--task.lr", "0.2").folder != folder
    assert read("-p", "aa-test").folder != folder


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "there is no algorithm to ablate"),
        (("-p", "watch-test"), "there is no algorithm to ablate"),
        (("-p", "aa-test", "--keep", "aa-test"), "there is no algorithm to ablate"),
        ((*BOTH, "--keep", "aa_tes"), "no active algorithm is named 'aa_tes'; the closest is"),
        ((*BOTH, "--seed", "3"), "--seed belongs to each run"),
        ((*BOTH, "--resume", "never"), "--resume belongs to each run"),
        ((*BOTH, "--seeds", "0"), "--seeds takes a whole number, 1 or more, not '0'"),
        ((*BOTH, "--run-dir", "s3://bucket/run"), "is not a folder"),
    ],
)
def test_what_cannot_be_compared_is_refused(argv, message, read):
    """Before a single run."""
    with pytest.raises(UsageError, match=message):
        read(*argv)


def test_the_threads_are_shared_among_jobs(read, monkeypatch):
    """Two runs with as many threads as there are cores each would be slower than one by one."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    assert (read(*BOTH, "--jobs", "4").jobs, read(*BOTH, "--jobs", "4").threads) == (4, 2)
    assert read(*BOTH, "--jobs", "1").threads is None
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert read(*BOTH, "--device", "cpu").jobs == 4
    assert read(*BOTH, "--device", "cpu", "--nproc", "2").jobs == 2


KNOWN = {"train/loss": False, "test/accuracy": True, "test/size": None}


@pytest.mark.parametrize(
    ("wanted", "metric"),
    [
        ("test/accuracy", Metric("test/accuracy", True)),
        ("eval/test/accuracy", Metric("test/accuracy", True)),
        ("min test/accuracy", Metric("test/accuracy", False)),
        ("test/size", Metric("test/size", None)),
        ("train/loss", Metric("train/loss", False)),
    ],
)
def test_a_metric_is_named_as_it_is_shown(wanted, metric):
    """As for `checkpoint_best`."""
    assert choose_metric(wanted, KNOWN) == metric


@pytest.mark.parametrize(
    ("wanted", "known", "message"),
    [
        (None, KNOWN, 'several metrics\n.*`--metric test/accuracy` or `--metric "max test/size"`'),
        (None, {"train/loss": False}, "no metric of eval data\n.*`--metric train/loss`"),
        ("test/acuracy", KNOWN, "'test/acuracy'; the closest is 'test/accuracy'"),
        ("most test/accuracy", KNOWN, "no metric is named 'most test/accuracy'"),
    ],
)
def test_a_metric_that_is_not_clear_is_refused_with_those_there_are(wanted, known, message):
    """Its name can't be guessed."""
    with pytest.raises(UsageError, match=message):
        choose_metric(wanted, known)


def test_a_picture_needs_matplotlib_before_anything_is_trained(tiny, monkeypatch):
    """Not after an hour."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(UsageError, match=re.escape('pip install "eventloop-experiments[plot]"')):
        run(["tiny.py", "--plot", "table.png"])


@pytest.mark.nightly
def test_a_task_that_cannot_be_trained_is_told_of_once(tiny, install, monkeypatch, capfd):
    """Not once a run, and before any is begun."""
    install(tiny, "aa-test", ALPHA)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

    with pytest.raises(EventloopError, match="a dry run without the algorithms failed"):
        run(["tiny.py", "-p", "aa-test", "--no-plugins", "--checkpoint-best", "x"])

    assert capfd.readouterr().err.startswith("SettingError: checkpoint_best: ")
    assert not list((tiny / "runs").glob("*/*/"))


def test_the_help_describes_its_options(tiny, capsys):
    """With those of the task."""
    assert run(["tiny.py", "--help", "--no-plugins"]) == 0

    out = capsys.readouterr().out
    assert out.startswith("usage: eventloop ablate TASK")
    assert "--seeds N" in out
    assert "--task.lr" in out
