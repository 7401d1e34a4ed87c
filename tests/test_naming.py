"""Names: folded, in kebab-case, with versions, and values in a few words."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from eventloop.naming import (
    FunctionName,
    brief,
    fold,
    has_function,
    is_in_range,
    json_value,
    kebab,
    split_requirement,
)


class Named:
    def method(self): ...


def test_names_are_compared_folded_and_written_in_kebab_case():
    """People write `--label-smoothing`, files `label_smoothing`, classes `LabelSmoothing`."""
    assert {fold(one) for one in ("Label-Smoothing", "label_smoothing")} == {"label_smoothing"}
    assert [*map(kebab, ("LabelSmoothing", "EMA", "x"))] == ["label-smoothing", "ema", "x"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("ema", ("ema", "")),
        (" seq-length >=0.2, <1 ", ("seq-length", ">=0.2, <1")),
        ("ema=>1", None),
        ("ema @ https://x", None),
        (">=1", None),
    ],
)
def test_a_requirement_is_a_name_with_a_range(text, parts):
    """In pip's syntax, without an address: a rule installs nothing."""
    assert split_requirement(text) == parts


@pytest.mark.parametrize(
    ("version", "specifier", "is_in"),
    [
        ("0.2", ">=0.2,<1", True),
        ("1.0", ">=0.2,<1", False),
        ("0.3.dev1", ">=0.2,<1", True),
        ("of my own", ">=0.2", False),
        ("of my own", "", True),
    ],
)
def test_a_version_is_in_a_range_also_before_its_release(version, specifier, is_in):
    """Who develops a plugin has a version that pip would not choose by itself."""
    assert is_in_range(version, specifier) == is_in


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (functools.partial(Named.method, 1), "Named.method"),
        ({"f": len, "k": Named}, "{'f': len, 'k': Named}"),
        ([1, "a", Named()], "[1, 'a', Named]"),
        ([0] * 9, "list"),
    ],
)
def test_a_value_is_shown_in_a_few_words(value, text):
    """A `repr` has addresses, which differ from run to run."""
    assert brief(value) == text


def test_what_json_lacks_is_kept_as_text():
    """A manifest must be written whatever an option holds."""
    value = {1: (Path("a"), 0.5, None), "b": [True, FunctionName("f")]}

    assert json_value(value) == {"1": ["a", "0.5", None], "b": [True, "f"]}
    assert has_function(value)
    assert not has_function({1: value[1]})
