"""Settings: types, ranges, descriptions."""

from __future__ import annotations

import dataclasses

import pytest

from eventloop.clock import Time
from eventloop.config.settings import Settings, SettingValues, convert_setting, setting_options
from eventloop.errors import SettingError


def test_setting_values_names_every_setting():
    """Type checkers read SettingValues where people read Settings."""
    fields = [field.name for field in dataclasses.fields(Settings)]

    assert list(SettingValues.__annotations__) == fields


def test_every_setting_is_described():
    """Help and reference are made of these texts."""
    options = setting_options()

    assert [name for name, option in options.items() if not option.doc] == []


def test_there_are_at_most_26_settings():
    """What can be set must stay something that a person can read."""
    assert len(setting_options()) <= 26


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_duration", Time("0.5dur")),
        ("seed", -1),
        ("seed", 2**32),
        ("microbatch_size", 0),
        ("gc_interval", Time("60sec")),
        ("clip_norm", 0.0),
        ("clip_norm", float("nan")),
        ("clip_value", -1.0),
        ("clip_value", float("inf")),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name(name, value):
    """It would fail at step 1,000, or train something else than was meant."""
    with pytest.raises(SettingError, match=name):
        Settings(**{name: value})
    with pytest.raises(ValueError, match=str(value)):
        convert_setting(setting_options()[name], value)


def test_an_empty_run_dir_is_refused():
    """Of a variable that isn't set it would be the working directory, and fill it with files."""
    with pytest.raises(ValueError, match="it is empty; give a folder"):
        convert_setting(setting_options()["run_dir"], "")


def test_a_url_that_lost_a_slash_is_told_with_both():
    """It would be a folder `s3:` in the working directory."""
    with pytest.raises(ValueError, match=r"was a URL; .* s3://x/y"):
        convert_setting(setting_options()["run_dir"], "s3:/x/y")


def test_a_setting_error_is_a_value_error():
    """Python callers expect ValueError for a wrong argument."""
    with pytest.raises(ValueError, match="microbatch_size"):
        Settings(microbatch_size=0)


def test_what_a_run_does_without_being_asked_is_known():
    """A default that changes, changes every run: how often it logs, saves and evaluates, and its seed."""
    made = Settings()

    assert (made.log_interval, made.eval_interval) == (Time("10ba"), Time("1ep"))
    assert (made.checkpoint_interval, made.checkpoint_keep) == ("auto", 2)
    assert (made.seed, made.seed_samples, made.uneven) == (0, True, "pad")
    assert (made.clip_norm, made.clip_value, made.microbatch_size) == (None, None, None)
