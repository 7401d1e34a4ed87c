"""YAML as it is meant: what is read, up to the bounds; `attacks/test_hostile_files.py` goes beyond them."""

from __future__ import annotations

import datetime

import pytest

from eventloop.config.yaml_text import YamlTextError, load_yaml


def test_values_are_those_of_yaml():
    """A date stays one; what a setting makes of it is its own affair."""
    text = "lr: 1.0e-3\nsteps: [1, true, null, 'no']\nday: 2026-11-27\n"

    assert load_yaml(text) == {
        "lr": 1e-3,
        "steps": [1, True, None, "no"],
        "day": datetime.date(2026, 11, 27),
    }


def test_numbers_are_decimal():
    """YAML 1.1 would read 8 and 90 here, which no author of a file means."""
    assert load_yaml("[010, 1:30, 1:30.5, 0, -5, 0x10, 0.5]") == ["010", "1:30", "1:30.5", 0, -5, 16, 0.5]  # fmt: skip


def test_an_entry_may_replace_one_that_is_merged():
    """It isn't given twice: to change a few values is what merging is for."""
    text = "small: &small {lr: 1, width: 2}\nlarge: {<<: *small, width: 8}\n"

    assert load_yaml(text)["large"] == {"lr": 1, "width": 8}


def test_fifty_levels_are_read_and_no_more():
    """The bound is far above any file that a person writes."""
    assert load_yaml("[" * 49 + "1" + "]" * 49)

    with pytest.raises(YamlTextError, match="line 1, column 51: it is nested more than 50 levels"):
        load_yaml("[" * 50 + "1" + "]" * 50)
