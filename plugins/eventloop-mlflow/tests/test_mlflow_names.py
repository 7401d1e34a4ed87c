"""Names alone."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventloop_mlflow import accepted_name, parameters
from eventloop_mlflow.names import tags


@pytest.mark.parametrize("name", ["train/loss", "lr/sgd", "eval/test set/f1.macro", "a-b_c"])
def test_a_name_that_mlflow_takes_stays(name):
    """Whoever looks for a number finds it under its name."""
    assert accepted_name(name) == name


@pytest.mark.nightly
@settings(max_examples=30)
@given(st.text(min_size=1, max_size=400))
def test_any_name_becomes_one_that_mlflow_takes(name):
    """Its rule: these characters, and a path that is written in one way only."""
    accepted = accepted_name(name)

    assert re.fullmatch(r"[0-9A-Za-z_./ -]{1,250}", accepted)
    assert not {"", ".", ".."} & set(accepted.split("/"))
    assert accepted_name(accepted) == accepted


def test_two_names_never_become_one():
    """One curve made of two numbers would be a lie."""
    names = ["a?b", "a!b", "a_b", "a//b", "a/_/b", "a/./b", "\ud83d", "?", "x" * 300, "x" * 301]

    assert len({accepted_name(name) for name in names}) == len(names)


def test_parameters_are_settings_and_options():
    """By the names of their flags."""
    manifest = {
        "settings": {"max_duration": "3ep", "compile": False, "clip_norm": None},
        "task": {"options": {"lr": "0.1", "kind": "x" * 7000}},
        "plugins": [{"name": "mixup", "version": "0.1.0", "options": {"alpha": "0.2"}}],
    }

    found = parameters(manifest)

    assert len(found.pop("task.kind")) == 6000
    assert found == {
        "max_duration": "3ep", "compile": "False", "task.lr": "0.1", "mixup.alpha": "0.2"
    }  # fmt: skip


def test_tags_tell_of_what_the_run_is_made():
    """What isn't known isn't there."""
    manifest = {
        "git": {"commit": "abc", "dirty": None},
        "command_line": ["eventloop", "fit", "my x.py"],
        "versions": {"torch": "2.13.0"},
        "plugins": [{"name": "mixup", "version": "0.1.0"}, {"name": "watch", "version": ""}],
    }

    assert tags(manifest) == {
        "mlflow.source.name": "eventloop fit 'my x.py'",
        "mlflow.source.git.commit": "abc",
        "eventloop.plugins": "mixup 0.1.0, watch",
        "eventloop.version.torch": "2.13.0",
    }
