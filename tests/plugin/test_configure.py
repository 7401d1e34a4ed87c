"""Building plugins with their options."""

from __future__ import annotations

import math

import pytest
from importlib_metadata import EntryPoint

from eventloop.config.option_types import Value
from eventloop.errors import PluginError, SettingError
from eventloop.plugin.configure import configure, dormant_reason, plugin_options
from eventloop.plugin.records import Found

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


def values(**options: object) -> dict[str, Value]:
    return {name: Value(value, "run.yaml") for name, value in options.items()}


def test_a_class_is_built_with_the_options_that_were_set():
    """The record keeps those alone: the header shows what differs from the default."""
    plugin = configure(FOUND, Mixup, values(alpha="0.2"))

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
        assert configure(FOUND, target, {}).target is target
        assert plugin_options(target) == {}


def test_an_option_of_the_wrong_type_is_refused_with_plugin_and_source():
    """It may stand in any of five places, in the name of any plugin."""
    with pytest.raises(SettingError) as caught:
        configure(FOUND, Mixup, values(alpha="x"))

    for part in ("mixup.alpha: 'x' isn't of type float", "eventloop-mixup 0.1.0", "run.yaml"):
        assert part in str(caught.value)
    assert "`--mixup.alpha 0.4`" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "message"), [(Mixup, "'alhpa'; the closest is 'alpha'"), (Mixup(), "no options")]
)
def test_an_option_that_does_not_exist_is_refused(target, message):
    """It would have no effect."""
    with pytest.raises(SettingError, match=message):
        configure(FOUND, target, values(alhpa=1))


def test_an_option_without_a_default_must_be_set():
    """The message says with which flag."""
    with pytest.raises(PluginError, match=r"`--mixup\.teacher STR`"):
        configure(FOUND, Distill, {})


def test_a_constructor_that_raises_is_told_with_its_cause():
    """The cause is the author's, the options are the user's."""
    with pytest.raises(PluginError, match="ValueError: alpha is negative") as caught:
        configure(FOUND, Mixup, values(alpha=-1.0))

    assert "Mixup(alpha=-1.0)" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_plugin_sleeps_until_its_needed_option_is_given():
    """Installed means active, but nobody can guess a teacher."""
    assert dormant_reason(FOUND, Distill, {}) == "waiting for --mixup.teacher"
    assert dormant_reason(FOUND, Distill, values(teacher="resnet")) is None
    assert dormant_reason(FOUND, Mixup, {}) is None


def test_one_of_several_options_wakes_a_plugin():
    """Where any one gives it something to do, none of them can be without a default."""

    class Bridge:
        wakes_with = ("algorithms", "save_to")

        def __init__(self, *, algorithms: str = "", save_to: str = "", other: int = 0) -> None: ...

    reason = "waiting for --mixup.algorithms or --mixup.save-to"
    assert dormant_reason(FOUND, Bridge, {}) == reason
    assert dormant_reason(FOUND, Bridge, values(other=1)) == reason
    assert dormant_reason(FOUND, Bridge, values(save_to="x")) is None
