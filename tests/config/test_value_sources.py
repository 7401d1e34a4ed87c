"""Values from environment variables."""

from __future__ import annotations

import pytest

from eventloop.config.configuration import Configuration
from eventloop.config.option_types import Value
from eventloop.config.value_sources import SourceKind, environment_layer, example, spell
from eventloop.errors import SettingError


def test_a_variable_has_the_name_that_messages_give_it():
    """A double underscore stands between section and option; further ones belong to the option."""
    environ = {"EVENTLOOP_MAX_DURATION": "1ep", "EVENTLOOP_MIXUP__ALPHA__B": "2", "PATH": "x"}

    values = environment_layer(environ).values

    assert values == {
        "max_duration": Value("1ep", "EVENTLOOP_MAX_DURATION"),
        "mixup.alpha__b": Value("2", "EVENTLOOP_MIXUP__ALPHA__B"),
    }
    assert [spell(key, "variable") for key in values] == [*environ][:2]


def test_an_empty_variable_counts_as_unset(tmp_path):
    """`EVENTLOOP_SEED= eventloop fit ...` is how a shell takes one away."""
    environ = {"EVENTLOOP_SEED": "", "EVENTLOOP_MIXUP__ALPHA": ""}
    configuration = Configuration.read(environ=environ, directory=tmp_path)

    assert configuration.setting("seed") == 0
    assert configuration.section("mixup") == {}


def test_autoload_that_is_neither_true_nor_false_is_refused(tmp_path):
    """It decides which code runs."""
    with pytest.raises(SettingError, match="'perhaps' is neither true nor false"):
        Configuration.read(environ={"EVENTLOOP_AUTOLOAD": "perhaps"}, directory=tmp_path)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("flag", "--max-duration 10ep"),
        ("keyword", 'max_duration="10ep"'),
        ("variable", "EVENTLOOP_MAX_DURATION=10ep"),
        ("file", "max_duration: 10ep"),
    ],
)
def test_a_line_to_paste_is_written_as_in_its_layer(kind: SourceKind, line):
    """A message proposes what can be put where the mistake is."""
    assert example("max_duration", "10ep", kind) == line
