"""Building plugins with their options."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from importlib_metadata import EntryPoint

from eventloop.config.configuration import Configuration
from eventloop.config.option_types import Value
from eventloop.config.plugin_flags import Choice
from eventloop.config.value_sources import Layer
from eventloop.errors import PluginError, SettingError
from eventloop.plugin.build import build, dormancy, plugin_options
from eventloop.plugin.records import Found, Plugin

POINT = EntryPoint("mixup", "module:Mixup", "eventloop.algorithms")
FOUND = Found("mixup", "algorithm", POINT, "eventloop-mixup", "0.1.0")


class Mixup:
    """Mixes.

    Args:
        alpha: how much.
        label_smoothing: how smooth.
    """

    def __init__(self, *, alpha: float = 0.4, label_smoothing: float | None = None) -> None:
        if alpha < 0:
            raise ValueError("alpha is negative")
        self.alpha = alpha


class Distill:
    def __init__(self, *, teacher: str) -> None:
        pass


def configuration(**options: object) -> Configuration:
    values = {f"mixup.{name}": Value(value, "run.yaml") for name, value in options.items()}
    return Configuration((Layer("file", values),))


def loaded(target: object) -> Plugin:
    return replace(Plugin.of(FOUND), imported=target, stage="loaded")


def built(target: object, **options: object) -> Plugin:
    return build(loaded(target), configuration(**options))


def waits_for(target: object, **options: object) -> str:
    return dormancy(loaded(target), configuration(**options))


def test_a_class_is_built_with_the_options_that_were_set():
    """The record keeps those alone: the header shows what differs from the default."""
    plugin = built(Mixup, alpha="0.2")

    assert isinstance(plugin.target, Mixup)
    assert plugin.target.alpha == 0.2
    assert plugin.options == {"alpha": 0.2}
    assert plugin.origin == "mixup (eventloop-mixup 0.1.0)"


def test_options_are_known_without_building():
    """Help shows them, and so does the check for unknown ones."""
    assert [option.doc for option in plugin_options(Mixup).values()] == ["how much.", "how smooth."]


def test_an_instance_or_a_module_stands_for_itself():
    """An entry point may name either."""
    for target in (Mixup(), math):
        assert built(target).target is target
        assert plugin_options(target) == {}


def test_an_option_of_the_wrong_type_is_refused_with_plugin_and_source():
    """It may stand in any of five places, in the name of any plugin."""
    with pytest.raises(SettingError) as caught:
        built(Mixup, alpha="x")

    for part in ("mixup.alpha: 'x' isn't of type float", "eventloop-mixup 0.1.0", "run.yaml"):
        assert part in str(caught.value)
    assert "`--mixup.alpha 0.4`" in str(caught.value)


def test_an_option_without_a_default_must_be_set():
    """The message says with which flag."""
    with pytest.raises(PluginError, match=r"`--mixup\.teacher STR`"):
        built(Distill)


def test_a_constructor_that_raises_is_told_with_its_cause():
    """The cause is the author's, the options are the user's."""
    with pytest.raises(PluginError, match="ValueError: alpha is negative") as caught:
        built(Mixup, alpha=-1.0)

    assert "Mixup(alpha=-1.0)" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_plugin_sleeps_until_its_needed_option_is_given():
    """Installed means active, but nobody can guess a teacher."""
    assert waits_for(Distill) == "waiting for --mixup.teacher"
    assert waits_for(Distill, teacher="resnet") == ""
    assert waits_for(Mixup) == ""


def test_one_of_several_options_wakes_a_plugin():
    """Where any one gives it something to do, none of them can be without a default."""

    class Bridge:
        wakes_with = ("algorithms", "save_to")

        def __init__(self, *, algorithms: str = "", save_to: str = "", other: int = 0) -> None: ...

    reason = "waiting for --mixup.algorithms or --mixup.save-to"
    assert waits_for(Bridge) == reason
    assert waits_for(Bridge, other=1) == reason
    assert waits_for(Bridge, save_to="x") == ""


def test_a_plugin_that_is_requested_by_name_does_not_wait():
    """It is an error that the option is missing, and not a reason to train without it."""
    insists = replace(configuration(), choice=Choice(insist=("mixup",)))

    assert dormancy(loaded(Distill), insists) == ""
    with pytest.raises(PluginError, match="needs its option 'teacher'"):
        build(loaded(Distill), insists)
