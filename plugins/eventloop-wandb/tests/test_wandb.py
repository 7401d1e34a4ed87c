"""The plugin in a training, read back from W&B's offline files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from eventloop import PluginError, RunFolderError, hookimpl
from eventloop.toolbox import RunFolder
from eventloop_jsonl import Jsonl
from eventloop_testing import (
    differences,
    edited_checkpoint,
    isolated_trainer,
    last_checkpoint,
    run_ranks,
)
from eventloop_wandb import Wandb, offline_rows
from eventloop_wandb.offline import _messages
from eventloop_wandb.plugin import MOMENT, OF_WANDB

COUNTS = ("epoch", "batch", "sample", "token")


@pytest.fixture(autouse=True, scope="module")
def variables_are_read():
    """W&B reads its variables once in a process, where another module's test may have used it."""
    wandb.teardown()


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No test reaches the network, or an account of this machine."""
    for name in [one for one in os.environ if one.startswith("WANDB_") and one != "WANDB_SERVICE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


class Dies:
    """An algorithm that logs numbers of its own, and ends its process, or the run, after a batch."""

    name = "dies"
    free_options = ("batch", "by_kill")

    def __init__(self, batch=None, *, by_kill=False):
        self.batch, self.by_kill = batch, by_kill

    @hookimpl
    def batch_end(self, state):
        batch = state.clock.batch
        state.log("own/über.all", [math.nan, math.inf, -1e-300, 2.0**70, 1 / 3][batch % 5])
        if batch == self.batch:
            if self.by_kill:
                os.kill(os.getpid(), 9)
            raise EOFError

    @hookimpl
    def eval_end(self, state):
        state.log_text("said", f"\x1b\ud800 after {state.clock.batch}")
        state.log_text("samples", {"prompt": ["a", "\ud800"], "score": [state.clock.batch, None]})


def fit(folder, dies=None, *, options=None, fits=1, **given):
    """Trains 9 batches with a checkpoint after every fourth."""
    settings = {"max_duration": "3ep", "log_interval": "1ba", "checkpoint_interval": "4ba"}
    settings |= {"run_dir": folder, "eval_interval": "1ep"} | given
    plugins = {"algorithms": [dies or Dies()], "callbacks": [Wandb(**(options or {})), Jsonl()]}
    with isolated_trainer(folder.parent, **plugins, **settings) as trainer:
        for idx in range(fits):
            trainer.fit(until=f"{3 * (idx + 1) // fits}ep")
        trainer.eval()


def run_id_of(folder):
    (found,) = {one.run_id for one in records_of(folder, "run")}
    return found


def rows_of(folder):
    """Returns the rows of the history, each with its step."""
    return sorted(offline_rows(RunFolder(folder), run_id_of(folder)).items())


def numbers_of(folder, *, with_seconds=True):
    """Returns all numbers of the history, as `logged` has them."""
    moment = (*COUNTS, "seconds") if with_seconds else COUNTS
    return sorted(
        (name, *(row[f"moment/{one}"] for one in moment), repr(float(value)))
        for _, row in rows_of(folder)
        for name, value in row.items()
        if name not in (*OF_WANDB, "test/said", "test/samples") and not name.startswith(MOMENT)
    )


def texts_of(folder):
    """Returns all texts of the history, and the rows of all tables, each with its batch."""
    found = []
    for _, row in rows_of(folder):
        if "test/said" in row:
            found.append((row["moment/batch"], row["test/said"]))
        if "test/samples" in row:
            (file,) = (folder / "wandb").glob(f"*/files/{row['test/samples']['path']}")
            found.append((row["moment/batch"], json.loads(file.read_text())))
    return found


def logged(folder, *, with_seconds=True):
    """Returns all numbers that eventloop-jsonl has."""
    moment = (*COUNTS, "seconds") if with_seconds else COUNTS
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return sorted(
        (one["name"], *(one[count] for count in moment), repr(float(one["value"])))
        for one in lines
        if "value" in one
    )


def steps_of(folder):
    """Returns the steps of all rows, in the files of all processes."""
    return sorted(one.step.num for one in records_of(folder, "history"))


def records_of(folder, kind):
    """Returns W&B's records of a kind, from the files of all processes."""
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    records = [Record.FromString(one) for file in files for one in _messages(file.read_bytes())]
    return [getattr(one, kind) for one in records if one.WhichOneof("record_type") == kind]


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-go") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        fit(folder, options={"mode": "offline"})  # whatever W&B read before this fixture
    return folder


def test_the_numbers_are_those_of_jsonl(in_one_go):
    """All of them, bit for bit, each at its moment, seconds too."""
    found = numbers_of(in_one_go)

    assert found == logged(in_one_go)
    assert len(found) > 30
    assert {one[-1] for one in found} >= {"nan", "inf", "-1e-300", repr(2.0**70), repr(1 / 3)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("batches", [(6,), (5, 6, 7, 9)], ids=["once", "four times"])
def test_a_resumed_run_is_one_run_with_each_number_once(tmp_path, in_one_go, batches):
    """What was sent after the checkpoint isn't sent again."""
    folder = tmp_path / "run"
    for batch in batches:
        with pytest.raises(EOFError):
            fit(folder, Dies(batch))
    assert len(rows_of(folder)) > 0

    fit(folder)

    assert steps_of(folder) == list(range(len(rows_of(folder))))
    assert numbers_of(folder, with_seconds=False) == numbers_of(in_one_go, with_seconds=False)
    assert texts_of(folder) == texts_of(in_one_go)


def test_texts_and_tables_are_there_at_their_batch(in_one_go):
    """A text as it is, but for what is no character; a table as W&B's own."""
    assert texts_of(in_one_go) == [
        one
        for batch in (3, 6, 9, 9)  # evaluated once more when all is done
        for one in (
            (batch, f"\x1b? after {batch}"),
            (batch, {"columns": ["prompt", "score"], "data": [["a", batch], ["?", None]]}),
        )
    ]


@pytest.mark.nightly
def test_rows_that_a_kill_loses_are_sent_again(tmp_path, in_one_go):
    """W&B writes 32 KiB at once; what a killed process had of them is in the checkpoint."""
    folder = tmp_path / "run"
    # Not a fork, which would share the process that writes W&B's files.
    code = f"from test_wandb import *; fit(Path({str(folder)!r}), Dies(6, by_kill=True))"
    environment = {name: one for name, one in os.environ.items() if name != "WANDB_SERVICE"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    killed = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert killed.returncode == -9
    assert records_of(folder, "history") == []

    fit(folder)

    assert steps_of(folder) == list(range(len(rows_of(folder))))
    assert numbers_of(folder, with_seconds=False) == numbers_of(in_one_go, with_seconds=False)


def test_two_equal_runs_differ_in_what_is_of_one_run_alone(tmp_path):
    """`checkpoints diff` leaves out ids and seconds, and sees whatever else differs."""
    for name in "ab":
        fit(tmp_path / name / "run")
    parts = [last_checkpoint(tmp_path / name).parts for name in "ab"]

    told = {one.of_one_run for one in differences(*parts, times=True)}

    assert list(differences(*parts)) == []
    assert told == {"seconds", "plugins/wandb/state/of_this_run"}


def test_a_run_goes_on_from_an_older_checkpoint(tmp_path, in_one_go):
    """There nothing is told apart as being of this run."""
    folder = tmp_path / "run"
    with pytest.raises(EOFError):
        fit(folder, Dies(6))
    with edited_checkpoint(tmp_path) as checkpoint:
        state = checkpoint.parts["plugins"]["wandb"]["state"]
        state.update(state.pop("of_this_run"))
        assert len(state["rows"]) > 4

    fit(folder)

    assert numbers_of(folder, with_seconds=False) == numbers_of(in_one_go, with_seconds=False)
    assert {one[5] > 0 for one in numbers_of(folder)} == {True}


def test_several_fits_are_one_run(tmp_path, in_one_go):
    """W&B's run ends with the trainer."""
    folder = tmp_path / "run"
    fit(folder, fits=3)

    assert numbers_of(folder) == logged(folder)
    assert len(records_of(folder, "exit")) == len(records_of(folder, "run")) == 1


def test_a_run_that_is_begun_with_a_checkpoint_is_another(tmp_path, in_one_go):
    """Naming a checkpoint begins a run of its own, with its numbers alone."""
    folder = tmp_path / "run"
    oldest = min((in_one_go / "checkpoints").iterdir())
    fit(folder, resume=str(oldest))

    assert run_id_of(folder) != run_id_of(in_one_go)
    assert rows_of(folder)[0][0] == 0
    assert numbers_of(folder) == logged(folder)


def test_it_is_told_what_the_run_was_told(tmp_path):
    """By the options' names; W&B's own variables stand for what isn't set."""
    folder = tmp_path / "run"
    given = {"project": "digits", "name": "first", "group": "all", "tags": ["a", "b"], "notes": "n"}
    fit(folder, options=given, clip_norm=0.5)

    (run,) = records_of(folder, "run")
    config = {one.key: json.loads(one.value_json) for one in run.config.update}
    assert (run.project, run.display_name, run.run_group) == ("digits", "first", "all")
    assert (list(run.tags), run.notes) == (["a", "b"], "n")
    assert (config["clip_norm"], config["max_duration"]) == (0.5, "3ep")
    # By the plugin's name; where the package isn't installed, an instance is called by its `name`.
    (own,) = (config[name] for name in ("wandb", "first") if name in config)
    assert own["project"] == "digits"


def test_a_failed_run_says_so(tmp_path):
    """By the status that a process ends with."""
    folder = tmp_path / "run"
    with pytest.raises(EOFError):
        fit(folder, Dies(6))

    assert [one.exit_code for one in records_of(folder, "exit")] == [1]


@pytest.mark.nightly
def test_one_rank_of_two_logs(tmp_path):
    """Rank 0, once."""
    folder = tmp_path / "run"
    run_ranks(fit, folder)

    assert numbers_of(folder) == logged(folder)


def test_without_a_key_the_way_out_is_named(tmp_path, monkeypatch):
    """An account that isn't there is found when the fit begins, before the network is asked."""
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("HOME", str(tmp_path))

    with pytest.raises(PluginError, match="W&B fails") as caught:
        fit(tmp_path / "run", options={"mode": "online"})

    assert 'Wandb(mode="offline")' in str(caught.value)


def test_a_link_in_the_runs_folder_is_refused(tmp_path):
    """W&B would write where it leads."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "wandb").symlink_to(tmp_path)

    with pytest.raises(RunFolderError):
        fit(folder)


def test_another_mode_is_refused():
    """Before anything is trained."""
    with pytest.raises(ValueError, match="mode='dryrun' is neither online nor offline"):
        Wandb(mode="dryrun")


def test_a_trainer_that_only_evaluates_keeps_nothing(tmp_path):
    """There is no training that its numbers could belong to."""
    with isolated_trainer(tmp_path, callbacks=[Wandb()], run_dir=tmp_path / "run") as trainer:
        trainer.eval()

    assert not (tmp_path / "run" / "wandb").exists()
