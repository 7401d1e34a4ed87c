"""The manifest: what a run is made of."""

from __future__ import annotations

import itertools
import json
import os

import pytest
import torch

from eventloop.cli import main
from eventloop.errors import EventloopError, ResumeError
from eventloop.files import disk
from eventloop.run.differences import Allowed
from eventloop.run.run_manifest import write_manifest
from eventloop_testing import run_ranks
from eventloop_testing.case import isolated_trainer

TOKENS = """
import torch
from eventloop import Task

def task():
    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "labels": torch.zeros(2).long()}
    return Task(
        model=torch.nn.Embedding(4, 4),
        forward=lambda model, inputs: model(inputs["input_ids"]).mean(1),
        loss=torch.nn.functional.cross_entropy,
        train_dataloader=[batch],
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        settings={"max_duration": "1ba", "device": "cpu"},
    )
"""
PICKY = """
from eventloop import hookimpl

class Plugin:
    @hookimpl
    def close(self): pass

    @hookimpl
    def unsuitable(self, state):
        return "the batch has no float tensor"
"""
NEEDY = """
class Plugin:
    def __init__(self, *, teacher: str): pass
"""


def test_plugins_that_stand_off_are_in_header_and_manifest_with_their_reasons(
    clean, install, capsys
):
    """Installed means active, softened in two ways that are never silent."""
    install("aa-picky", PICKY)
    install("bb-needy", NEEDY)
    (clean / "tokens.py").write_text(TOKENS)

    status = main(["fit", "tokens.py", "--run-dir", "out"])

    header = capsys.readouterr().out
    off = {one["name"]: one["reason"] for one in json.loads(_text(clean))["off"]}
    assert status == 0
    assert off["aa-picky"] == "the batch has no float tensor"
    assert off["bb-needy"] == "waiting for --bb-needy.teacher"
    assert "aa-picky (the batch has no float tensor)" in header
    assert "bb-needy (waiting for --bb-needy.teacher)" in header


def test_naming_an_unsuitable_plugin_makes_it_an_error(clean, install, capsys):
    """Who asks for it must learn that it can't work here."""
    install("aa-picky", PICKY)
    (clean / "tokens.py").write_text(TOKENS)

    status = main(["fit", "tokens.py", "-p", "aa-picky"])

    assert status == 1
    assert "aa-picky was asked for, but doesn't suit this task" in capsys.readouterr().err


def test_requiring_an_unsuitable_plugin_names_the_line(clean, install, capsys):
    """It stands in a file that somebody else may have written."""
    install("aa-picky", PICKY)
    (clean / "tokens.py").write_text(TOKENS)
    (clean / "pyproject.toml").write_text('[tool.eventloop]\nrequired = ["aa-picky"]\n')

    assert main(["fit", "tokens.py"]) == 1
    message = capsys.readouterr().err

    assert "by      required, pyproject.toml" in message
    assert "fix     take 'aa-picky' out of `required = [...]`" in message


def test_a_manifest_says_what_the_run_is_made_of(make_trainer, make_plugin, tmp_path):
    """From it somebody else could make the run again."""
    trainer = make_trainer(callbacks=[make_plugin("watch", batch_end=lambda state: None)], seed=3)

    manifest = json.loads(write_manifest(trainer.state.manifest, tmp_path / "run").read_text())

    assert [one["name"] for one in manifest["plugins"]] == ["watch"]
    assert manifest["settings"]["seed"] == 3
    assert manifest["settings"]["max_duration"] == "1ep"
    assert manifest["order"].startswith("sha256:")
    assert {"torch", "python", "eventloop"} <= manifest["versions"].keys()


def read_in(folder):
    return json.loads((folder / "run" / "manifest.json").read_text())


def fit_in(folder, callback=None, **given):
    settings = {"checkpoint_interval": "2ba"} | given
    callbacks = [] if callback is None else [callback]
    with isolated_trainer(folder, callbacks=callbacks, **settings) as trainer:
        trainer.fit()


def test_a_trainer_in_python_writes_it_too(tmp_path):
    """What a run was made of is asked for months later, whoever started it."""
    fit_in(tmp_path, seed=3)

    found = read_in(tmp_path)
    assert found["settings"]["seed"] == 3
    assert (found["resumed"], found["changes"], found["earlier_starts"]) == (None, [], [])
    assert "optimizers" in found


def test_without_a_run_dir_or_a_fit_nothing_is_written(tmp_path, monkeypatch):
    """What is tried out, or looked at, leaves nothing behind."""
    monkeypatch.chdir(tmp_path)

    isolated_trainer(tmp_path).close()
    fit_in(tmp_path, run_dir=None, checkpoint_interval=None)

    assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]


def test_a_resumed_run_tells_of_every_start(tmp_path, make_plugin):
    """Of the present one in full, of each before by when, how and with what."""

    def divide(state):
        1 / (state.clock.batch - 2)

    ends = make_plugin(batch_start=divide)
    with pytest.raises(ZeroDivisionError):
        fit_in(tmp_path, ends)
    first = read_in(tmp_path)
    allowed = Allowed(config_change=True)

    fit_in(tmp_path, max_duration="2ep", allowed=allowed)
    fit_in(tmp_path, max_duration="3ep", allowed=allowed)

    found = read_in(tmp_path)
    begun, second = found["earlier_starts"]
    assert begun == {key: first[key] for key in begun}
    assert {"started", "command_line", "versions", "git"} <= begun.keys()
    assert begun["resumed"] is None
    assert second["resumed"].endswith("ba00000002")
    assert second["changes"] == ["settings.max_duration: 1ep -> 2ep"]
    assert found["changes"] == ["settings.max_duration: 2ep -> 3ep"]
    assert found["settings"]["max_duration"] == "3ep"
    ends = [one["end"] and (one["end"]["status"], one["end"]["epoch"])
            for one in (begun, second, found)]  # fmt: skip
    assert ends == [None, ("finished", 2), ("finished", 3)]


@pytest.mark.parametrize(
    ("reason", "kind", "status"),
    [
        ("early-stopping: no better", "plugin", "stopped"),
        ("pruned by hand, rank 0 received SIGTERM", "plugin", "stopped"),
        ("no better than trial 3", "pruned", "pruned"),
        ("time is over", "signal", "interrupted"),
    ],
)
def test_how_a_run_ended_is_in_it(reason, kind, status, tmp_path, make_plugin):
    """A trial that was pruned isn't one that was trained to its end; the kind says it, not the words."""
    fit_in(tmp_path, make_plugin(batch_end=lambda state: state.request_stop(reason, kind)))

    end = read_in(tmp_path)["end"]
    assert (end["status"], end["reason"], end["batch"]) == (status, reason, 1)


def test_a_part_of_a_run_is_no_end(tmp_path):
    """More is to come."""
    with isolated_trainer(tmp_path) as trainer:
        trainer.fit(until="1ba")
        first = read_in(tmp_path)["end"]
        trainer.fit()

    assert first is None
    assert read_in(tmp_path)["end"]["status"] == "finished"


def test_one_trainer_is_one_start(tmp_path):
    """However often it is told to train on."""
    with isolated_trainer(tmp_path) as trainer:
        trainer.fit(until="1ba")
        trainer.fit()

    assert read_in(tmp_path)["earlier_starts"] == []


def test_a_process_that_is_refused_leaves_it_alone(tmp_path):
    """It is that of the process which trains there."""
    with isolated_trainer(tmp_path) as trainer:
        trainer.fit()
        before = (tmp_path / "run" / "manifest.json").read_text()
        child = os.fork()
        if not child:
            status = 1
            torch.set_num_threads(1)
            try:
                fit_in(tmp_path, seed=7)
            except ResumeError:
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)

    assert status == 0
    assert (tmp_path / "run" / "manifest.json").read_text() == before


@pytest.mark.parametrize(
    ("there", "num_kept"),
    [
        *[("", 0), ("{", 0), ("[]", 0), ("[" * 100_000, 0)],
        ('{"started": 1, "earlier_starts": 3}', 1),
        ('{"started": 1, "earlier_starts": [[], 3, {"started": 0}]}', 2),
        # From Python 3.12 on this can be read, but not be written.
        (f'{{"started": 1, "git": {"[" * 1500}{"]" * 1500}}}', 0),
    ],
    ids=range(7),
)
def test_what_can_not_be_read_stops_nobody(tmp_path, there, num_kept):
    """The checkpoints say of themselves what they were made with."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text(there)

    fit_in(tmp_path)

    assert len(read_in(tmp_path)["earlier_starts"]) == num_kept


def test_a_kill_leaves_the_old_one_or_the_new_one(tmp_path, monkeypatch):
    """Between any two operations on the disk."""
    write_manifest({"number": 1}, tmp_path / "run")
    seen = set()

    class Killed(BaseException):
        pass

    names = ("create", "write", "sync", "replace", "sync_folder", "remove_file")
    originals = {name: getattr(disk, name) for name in names}
    for count in range(1, 100):
        left = itertools.count(count, -1)
        with monkeypatch.context() as patch:
            for name, original in originals.items():

                def dies(*args, original=original):
                    if next(left) == 1:
                        raise Killed
                    return original(*args)

                patch.setattr(disk, name, dies)
            try:
                write_manifest({"number": 2}, tmp_path / "run")
            except Killed:
                seen.add(read_in(tmp_path)["number"])
            else:
                break

    assert seen == {1, 2}
    assert read_in(tmp_path)["number"] == 2
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["manifest.json"]


def test_a_folder_that_takes_no_file_is_named(tmp_path):
    """Before anything is trained."""
    (tmp_path / "run" / "manifest.json").mkdir(parents=True)

    with pytest.raises(EventloopError, match=r"manifest\.json' is a folder, but the run needs"):
        fit_in(tmp_path)


def test_rank_zero_writes_it(tmp_path):
    """Once for all."""
    run_ranks(fit_in, tmp_path)

    assert read_in(tmp_path)["earlier_starts"] == []


def _text(folder):
    return (folder / "out" / "manifest.json").read_text()


def test_ranks_may_fit_twice(tmp_path):
    """Only one of them writes it; none may wait for the others alone."""

    def fit():
        with isolated_trainer(tmp_path, max_duration="2ba") as trainer:
            trainer.fit(until="1ba")
            trainer.fit()
            return trainer.state.clock.batch

    assert run_ranks(fit, timeout_s=60.0) == [2, 2]
