"""The plugin in a training, in one go, killed and resumed."""

import contextlib
import csv
import json
import os

import pytest
import torch

from eventloop import PluginError, RunFolderError, hookimpl
from eventloop_csv import Csv
from eventloop_jsonl import Jsonl
from eventloop_testing import isolated_trainer, last_checkpoint, run_ranks

COUNTS = ("epoch", "batch", "sample", "token")


class Dies:
    """An algorithm that ends its process, or the run, after a batch."""

    name = "dies"
    free_options = ("batch", "by_kill")

    def __init__(self, batch=None, *, by_kill=False):
        self.batch, self.by_kill = batch, by_kill

    @hookimpl
    def batch_end(self, state):
        if state.clock.batch > 3:
            state.log("late", state.clock.batch / 7)
        if state.clock.batch == self.batch:
            if self.by_kill:
                os._exit(9)
            raise EOFError


def fit(folder, dies=None, *, run="run", **given):
    """Trains 6 batches with a checkpoint before the first, after the fourth, and after the last."""
    settings = {"max_duration": "2ep", "log_interval": "1ba", "checkpoint_interval": "4ba"}
    settings |= {"run_dir": folder / run, "eval_interval": "1ba"} | given
    plugins = {"algorithms": [dies or Dies()], "callbacks": [Csv(), Jsonl()]}
    with isolated_trainer(folder, **plugins, **settings) as trainer:
        trainer.fit()


def fit_and_die(folder, batch, *, by_kill=False):
    if not by_kill:
        with pytest.raises(EOFError):
            fit(folder, Dies(batch))
        return
    child = os.fork()
    if not child:
        torch.set_num_threads(1)  # a fork has none of the threads of the pool
        try:
            fit(folder, Dies(batch, by_kill=True))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def table(folder):
    """Returns the header and the rows without the seconds, which no two runs share."""
    with (folder / "metrics.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    return header, [row[:4] + row[5:] for row in rows]


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-go") / "run"
    fit(folder.parent)
    return folder


def test_the_numbers_are_those_of_jsonl(in_one_go):
    """All of them, bit for bit, each at its moment."""
    with (in_one_go / "metrics.csv").open(newline="") as file:
        wide = [
            (name, float(value), *(int(row[count]) for count in COUNTS), float(row["seconds"]))
            for row in csv.DictReader(file)
            for name, value in row.items()
            if value and name not in (*COUNTS, "seconds")
        ]
    lines = map(json.loads, (in_one_go / "metrics.jsonl").read_text().splitlines())
    long = [
        (line["name"], line["value"], *(line[count] for count in COUNTS), line["seconds"])
        for line in lines
    ]

    assert sorted(wide) == sorted(long)
    assert {name for name, *_ in wide} == {
        "train/loss", "lr/sgd", "test/accuracy", "test/loss", "late"
    }  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("batches", "by_kill"),
    [([1], False), ([3], True), ([5], False), ([6], True), ([3, 4, 6, 6], True)],
)
def test_a_resumed_run_has_the_rows_of_one_in_one_go(tmp_path, in_one_go, batches, by_kill):
    """And the columns, in their order: what came after the last checkpoint is taken back."""
    for batch in batches:
        fit_and_die(tmp_path, batch, by_kill=by_kill)

    fit(tmp_path)

    assert table(tmp_path / "run") == table(in_one_go)


def test_there_are_rows_to_be_taken_back(tmp_path):
    """Control: without a resume they are there, and so is their column."""
    fit_and_die(tmp_path, 6, by_kill=True)

    header, rows = table(tmp_path / "run")
    assert header[-1] == "late"
    assert max(int(row[1]) for row in rows) == 5
    assert not (tmp_path / "run" / "checkpoints" / "ba00000005").exists()


def test_two_equal_runs_keep_the_same(tmp_path):
    """Seconds differ, and with them the lengths of rows."""
    for run in ("one", "other"):
        fit(tmp_path / run)

    one, other = (last_checkpoint(tmp_path / run) for run in ("one", "other"))
    assert one.parts["plugins"]["csv"] == other.parts["plugins"]["csv"]
    num_rows = one.parts["plugins"]["csv"]["state"]["num_rows"]
    assert num_rows == len(table(tmp_path / "one" / "run")[1])


def test_looking_at_a_run_takes_nothing_back(tmp_path, in_one_go):
    """Another process may be training in its folder; what an evaluation logs outlives the cut."""
    fit_and_die(tmp_path, 6)
    before = table(tmp_path / "run")[1]
    given = {"max_duration": "2ep", "log_interval": "1ba", "checkpoint_interval": "4ba"}
    given |= {"eval_interval": "1ba", "algorithms": [Dies()], "callbacks": [Csv()]}

    with isolated_trainer(tmp_path, **given) as trainer:
        trainer.eval()
        looked = table(tmp_path / "run")[1]
        trainer.fit()

    extra = looked[len(before) :]
    assert looked[: len(before)] == before
    assert len(extra) == 1
    rows = table(tmp_path / "run")[1]
    assert len(rows) == len(table(in_one_go)[1]) + 1
    assert extra[0] in rows


def test_a_run_from_a_checkpoint_of_another_leaves_that_ones_file_alone(tmp_path):
    """They are two runs from then on."""
    fit_and_die(tmp_path, 6)
    before = table(tmp_path / "run")

    fit(tmp_path, run="fork", resume=str(tmp_path / "run" / "checkpoints" / "ba00000004"))

    assert table(tmp_path / "run") == before
    assert {row[1] for row in table(tmp_path / "fork")[1]} == {"5", "6"}


def test_two_ranks_write_one_file(tmp_path):
    """Rank 0 does, and cuts it."""

    def run(folder, dies=None):
        with contextlib.suppress(EOFError):
            fit(folder, dies)

    run_ranks(run, tmp_path / "one-go")
    run_ranks(run, tmp_path, Dies(4))
    run_ranks(run, tmp_path)

    assert table(tmp_path / "run") == table(tmp_path / "one-go" / "run")


def test_the_file_of_another_program_is_named(tmp_path):
    """A run that can't write its numbers must not go on as if it did."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_text("name,value\n")

    with pytest.raises(PluginError, match="its first columns aren't epoch") as raised:
        fit(tmp_path)

    assert str(tmp_path / "run" / "metrics.csv") in str(raised.value)


def test_a_link_in_the_place_of_the_file_is_refused(tmp_path):
    """A folder may be a stranger's."""
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / "run" / "metrics.csv").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(RunFolderError, match="a link to somewhere else"):
        fit(tmp_path)

    assert (tmp_path / "elsewhere").read_text() == ""


def test_a_run_that_starts_over_has_each_row_once(tmp_path):
    """Killed before its first checkpoint; the rows of before are kept beside the new ones."""
    fit(tmp_path, run="whole", checkpoint_interval=None)
    with pytest.raises(EOFError):
        fit(tmp_path, Dies(3), checkpoint_interval=None)
    before = (tmp_path / "run" / "metrics.csv").read_bytes()

    fit(tmp_path, checkpoint_interval=None)

    assert table(tmp_path / "run") == table(tmp_path / "whole")
    assert (tmp_path / "run" / "metrics.old.csv").read_bytes() == before
