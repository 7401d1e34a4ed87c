"""Runs that are killed leave what a test resumes from."""

from __future__ import annotations

import pytest

from eventloop_testing import (
    Dies,
    edited_checkpoint,
    fit_and_die,
    isolated_trainer,
    last_checkpoint,
)


def fit(folder, batch=None, interval="1ba"):
    with isolated_trainer(
        folder, algorithms=[Dies(batch)], checkpoint_interval=interval
    ) as trainer:
        trainer.fit()


def test_a_run_that_dies_can_be_resumed(tmp_path):
    """The batch in which it died isn't done; the checkpoint before may not be written, either."""
    fit_and_die(fit, tmp_path, 2)
    died_at = last_checkpoint(tmp_path).batch

    fit(tmp_path)

    assert died_at < 3
    assert last_checkpoint(tmp_path).batch == 3


def test_a_run_that_does_not_die_is_an_error(tmp_path, capfd):
    """A test that resumes nothing would pass for the wrong reason; what was raised is shown."""
    with pytest.raises(AssertionError, match="ended with 1: no process was killed in it"):
        fit_and_die(fit, tmp_path, 99)
    with pytest.raises(AssertionError, match="no process was killed"):
        fit_and_die(fit, tmp_path / "other", 1, "1xx")

    assert "'1xx'" in capfd.readouterr().err


def test_a_checkpoint_that_was_edited_can_be_read(tmp_path):
    """With what is left, and all checksums."""
    fit(tmp_path)

    with edited_checkpoint(tmp_path) as checkpoint:
        del checkpoint.parts["rank0"]["generators"]

    assert "generators" not in last_checkpoint(tmp_path).parts["rank0"]
    assert last_checkpoint(tmp_path).facts == checkpoint.facts
