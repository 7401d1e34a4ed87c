"""Which settings may be others when a run is resumed."""

from __future__ import annotations

from dataclasses import fields

import pytest

from eventloop.config.settings import Settings
from eventloop.run.differences import config_differences

# They change neither the weights nor what is known of them.
FREE = {
    "autoload",
    "checkpoint_best",
    "checkpoint_interval",
    "checkpoint_keep",
    "gc_interval",
    "log_interval",
    "on_callback_error",
    "on_save_error",
    "resume",
    "run_dir",
}
COMPARED = {
    "clip_norm",
    "clip_value",
    "compile",
    "deterministic",
    "device",
    "eval_at_start",
    "eval_interval",
    "find_unused_parameters",
    "max_duration",
    "microbatch_size",
    "on_bad_loss",
    "precision",
    "seed",
    "seed_samples",
    "sync_batch_norm",
    "uneven",
}


def test_every_setting_is_in_the_table():
    """One that is new is decided upon here."""
    assert {one.name for one in fields(Settings)} == FREE | COMPARED


@pytest.mark.parametrize("name", sorted(FREE | COMPARED))
def test_a_setting_that_changes_the_training_is_compared(name):
    """A run that went on with another seed, say, would be another run; where it saves is free."""
    then, now = ({"settings": {"seed": 0} | {name: value}} for value in ("old", "new"))

    found = list(config_differences(then, now, "settings"))

    assert found == ([] if name in FREE else [f"settings.{name}: old -> new"])
