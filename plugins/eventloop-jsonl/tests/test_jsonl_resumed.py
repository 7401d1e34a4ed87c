"""A run that was killed and resumed has each line once."""

import contextlib
import json
import os

import pytest
import torch

from eventloop import hookimpl
from eventloop_jsonl import Jsonl
from eventloop_testing import isolated_trainer, last_checkpoint, run_ranks


class Dies:
    """An algorithm that ends its process, or the run, after a batch."""

    name = "dies"
    free_options = (
        "batch",
        "by_kill",
    )

    def __init__(self, batch=None, *, by_kill=False):
        self.batch = batch
        self.by_kill = by_kill

    @hookimpl
    def eval_end(self, state):
        state.log_text("samples", {"of": [state.eval_name], "at": [state.clock.batch]})

    @hookimpl
    def batch_end(self, state):
        if state.clock.batch == self.batch:
            if self.by_kill:
                os._exit(0)
            raise EOFError
        state.log_text("said", f"after {state.clock.batch}")


def fit(folder, dies=None, *, path=None, run="run", **given):
    """Trains 6 batches with a checkpoint before the first, after the fourth, and after the last."""
    settings = {"max_duration": "2ep", "log_interval": "1ba", "checkpoint_interval": "4ba"}
    settings |= {"run_dir": folder / run, "eval_interval": "1ba"} | given
    plugins = {"algorithms": [dies or Dies()], "callbacks": [Jsonl(path=path)]}
    with isolated_trainer(folder, **plugins, **settings) as trainer:
        trainer.fit()


def fit_and_die(folder, dies, **given):
    if dies.by_kill:
        child = os.fork()
        if not child:
            torch.set_num_threads(1)  # a fork has none of the threads of the pool
            try:
                fit(folder, dies, **given)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    else:
        with pytest.raises(EOFError):
            fit(folder, dies, **given)


def rows(path):
    """Returns the lines without what no two runs share."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if key not in ("seconds", "run")} for row in found
    ]


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-go")
    fit(folder)
    return rows(folder / "run" / "metrics.jsonl")


@pytest.mark.sampled(30)
@pytest.mark.parametrize("by_kill", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 4, 5, 6])
@pytest.mark.parametrize("name", [None, "all.jsonl"])
def test_a_resumed_run_has_the_lines_of_one_in_one_go(tmp_path, in_one_go, name, batch, by_kill):
    """In their order: what the killed process wrote after its last checkpoint is taken back."""
    path = None if name is None else tmp_path / name

    fit_and_die(tmp_path, Dies(batch, by_kill=by_kill), path=path)
    fit(tmp_path, path=path)

    assert rows(path or tmp_path / "run" / "metrics.jsonl") == in_one_go


def test_texts_are_among_the_lines(in_one_go):
    """So that the comparisons of this file are about them, too: of training and of evaluation."""
    said = [row["text"] for row in in_one_go if row["name"] == "said"]
    samples = [row["table"] for row in in_one_go if row["name"] == "test/samples"]

    assert said == [f"after {batch}" for batch in range(1, 7)]
    assert samples == [{"of": ["test"], "at": [batch]} for batch in range(1, 7)]


def test_there_are_lines_to_be_taken_back(tmp_path, in_one_go):
    """Control: without a resume they are there."""
    fit_and_die(tmp_path, Dies(6))
    path = tmp_path / "run" / "metrics.jsonl"

    assert max(row["batch"] for row in rows(path)) == 5
    assert not (tmp_path / "run" / "checkpoints" / "ba00000005").exists()


@pytest.mark.parametrize("name", [None, "all.jsonl"])
def test_two_equal_runs_keep_the_same(tmp_path, name):
    """The lines of both are of different seconds, and thus of different lengths."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        fit(folder, path=None if name is None else folder / name)

    one, other = (last_checkpoint(folder).parts["plugins"]["jsonl"] for folder in folders)
    assert one == other
    assert one["state"]["num_lines"] == len(rows(folders[0] / (name or "run/metrics.jsonl")))


@pytest.mark.nightly
def test_several_kills_leave_no_trace(tmp_path, in_one_go):
    """Each process writes after a checkpoint, and is killed."""
    for batch in (3, 4, 6, 6):
        fit_and_die(tmp_path, Dies(batch, by_kill=True))
    fit(tmp_path)

    assert rows(tmp_path / "run" / "metrics.jsonl") == in_one_go


def test_lines_of_another_run_stay(tmp_path, in_one_go):
    """What it wrote meanwhile into the same file is none of ours, and nothing is taken from between."""
    path = tmp_path / "all.jsonl"
    fit_and_die(tmp_path, Dies(6), path=path)
    before = path.read_text()
    fit(tmp_path, path=path, run="another")
    others = path.read_text().removeprefix(before)

    fit(tmp_path, path=path)

    assert path.read_text().startswith(before + others)
    assert rows(path)[-1] == in_one_go[-1]


@pytest.mark.parametrize("found", ["", "shorter\n", "quite another file\n" * 500])
def test_another_file_is_not_cut(tmp_path, found):
    """Somebody moved the old one away, say."""
    fit_and_die(tmp_path, Dies(6))
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(found)

    fit(tmp_path)

    assert path.read_text().startswith(found)
    assert path.read_text().count("\n") > found.count("\n")


def test_a_run_from_a_checkpoint_of_another_leaves_that_ones_file_alone(tmp_path):
    """They are two runs from then on."""
    fit_and_die(tmp_path, Dies(6))
    path = tmp_path / "run" / "metrics.jsonl"
    before = path.read_text()

    fit(tmp_path, run="fork", resume=str(tmp_path / "run" / "checkpoints" / "ba00000004"))

    assert path.read_text() == before
    assert {row["batch"] for row in rows(tmp_path / "fork" / "metrics.jsonl")} == {5, 6}


def test_looking_at_a_run_takes_nothing_back(tmp_path, in_one_go):
    """Another process may be training in its folder; what an evaluation logs outlives the cut."""
    fit_and_die(tmp_path, Dies(6))
    path = tmp_path / "run" / "metrics.jsonl"
    before = path.read_text()
    settings = {"max_duration": "2ep", "log_interval": "1ba", "checkpoint_interval": "4ba"}
    plugins = {"algorithms": [Dies()], "callbacks": [Jsonl()]}
    given = settings | plugins | {"eval_interval": "1ba"}

    with isolated_trainer(tmp_path, **given) as trainer:
        trainer.eval()
        looked = path.read_text()
        trainer.fit()

    assert looked.startswith(before)
    extra = rows(path)[len([row for row in in_one_go if row["batch"] <= 4]) :][:3]
    assert sorted(one["name"] for one in extra) == ["test/accuracy", "test/loss", "test/samples"]
    assert len(rows(path)) == len(in_one_go) + 3


@pytest.mark.nightly
def test_two_ranks_write_one_file(tmp_path):
    """Rank 0 does, and cuts it."""
    path = tmp_path / "run" / "metrics.jsonl"

    def run(folder, dies=None):
        with contextlib.suppress(EOFError):
            fit(folder, dies)

    run_ranks(run, tmp_path / "one-go")
    run_ranks(run, tmp_path, Dies(4))
    run_ranks(run, tmp_path)

    assert rows(path) == rows(tmp_path / "one-go" / "run" / "metrics.jsonl")


def test_a_run_that_starts_over_has_each_line_once(tmp_path):
    """Killed before its first checkpoint; the lines of before are kept beside the new ones."""
    fit(tmp_path, run="whole", checkpoint_interval=None)
    fit_and_die(tmp_path, Dies(3), checkpoint_interval=None)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()

    fit(tmp_path, checkpoint_interval=None)

    assert rows(tmp_path / "run" / "metrics.jsonl") == rows(tmp_path / "whole" / "metrics.jsonl")
    assert (tmp_path / "run" / "metrics.old.jsonl").read_bytes() == before


def test_a_file_that_runs_share_keeps_its_lines(tmp_path):
    """Which run they are of, they say themselves."""
    shared = tmp_path / "all.jsonl"
    shared.write_text('{"name": "other"}\n')

    fit(tmp_path, path=shared, checkpoint_interval=None)

    assert shared.read_text().startswith('{"name": "other"}\n')
