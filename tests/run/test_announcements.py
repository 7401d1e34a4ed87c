"""Lines on stderr for scripts and notebooks: where the files of a run are."""

from __future__ import annotations

import pytest

from eventloop import hookimpl
from eventloop_testing import run_ranks


class Writes:
    """Writes a file into the run's folder, early or late."""

    name = "writes"

    def __init__(self, event):
        self.event = event

    @hookimpl
    def fit_start(self, state):
        self._write(state, "fit_start")

    @hookimpl
    def fit_end(self, state):
        self._write(state, "fit_end")

    def _write(self, state, event):
        if event == self.event and state.rank == 0:
            state.run_dir.mkdir(parents=True, exist_ok=True)
            (state.run_dir / "numbers.txt").write_text("1")


@pytest.mark.parametrize("event", ["fit_start", "fit_end"])
def test_the_first_fit_says_where_a_new_folder_is(event, make_trainer, capsys):
    """Nobody chose its name, so nobody would look there; a second fit writes into the same."""
    trainer = make_trainer(callbacks=[Writes(event)], max_duration="2ep")
    trainer.fit("1ep")
    trainer.fit()

    line = f"eventloop: run dir: {trainer.state.run_dir}\n"
    assert capsys.readouterr() == ("", line)


def test_a_fit_that_raises_says_it_too(make_trainer, make_plugin, capsys):
    """What was written until then is of most use after a failure."""

    def fail(state):
        raise RuntimeError("no")

    plugins = [Writes("fit_start"), make_plugin(epoch_end=fail)]

    with pytest.raises(RuntimeError, match="no"):
        make_trainer(callbacks=plugins).fit()

    assert capsys.readouterr().err.count("run dir: runs/") == 1


def test_a_folder_that_was_chosen_or_is_not_there_is_not_announced(make_trainer, tmp_path, capsys):
    """The user knows the first, and there is nothing in the second."""
    make_trainer(callbacks=[Writes("fit_start")], run_dir=tmp_path / "chosen").fit()
    make_trainer().fit()

    assert capsys.readouterr().err == ""


def test_one_rank_of_two_says_it(clean, capfd):
    """They share the folder."""

    def fit():
        from eventloop import Trainer
        from eventloop_testing import tiny_batches, tiny_task

        task = tiny_task(train_dataloader=tiny_batches(2))
        settings = {"device": "cpu", "autoload": False, "max_duration": "1ep"}
        with Trainer(task, callbacks=[Writes("fit_start")], **settings) as trainer:
            trainer.fit()

    run_ranks(fit)

    assert capfd.readouterr().err.count("eventloop: run dir: runs/") == 1


def test_the_command_says_it_in_its_header_alone(run, tiny):
    """It names the folder before training begins."""
    ran = run("fit", "tiny.py", "--no-plugins")

    assert ran.status == 0, ran.err
    assert (ran.out + ran.err).count("run dir: ") == 1
