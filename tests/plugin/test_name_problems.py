"""Names of plugins: two of one name, and names that can't be typed."""

from __future__ import annotations

import pytest
from importlib_metadata import EntryPoint

from eventloop.config.plugin_flags import Choice
from eventloop.errors import PluginError, raise_all
from eventloop.plugin.choose import choose, problems_of
from eventloop.plugin.name_problems import name_problems
from eventloop.plugin.records import Found


def found(
    name: str, distribution: str = "", version: str = "1.0", role: str = "algorithm"
) -> Found:
    point = EntryPoint(name, "module:Plugin", f"eventloop.{role}s")
    return Found(name, role, point, distribution or f"eventloop-{name}", version)


def refuse(plugins: list[Found], choice: Choice) -> None:
    raise_all(problems_of(choose(plugins, choice), choice))


def test_two_distributions_with_one_name_are_refused_with_both():
    """Which of them would train can't depend on the order of installation."""
    twins = [found("Mix-Up", "one", "1.0"), found("mix_up", "two", "2.0")]

    with pytest.raises(PluginError) as caught:
        refuse(twins, Choice())

    assert "one 1.0 and two 2.0" in str(caught.value)
    assert "pip uninstall one" in str(caught.value)
    assert 'disable = ["Mix-Up"]' in str(caught.value)


def test_a_package_with_a_name_twice_has_to_rename_one():
    """To uninstall it leaves neither."""
    with pytest.raises(PluginError) as caught:
        refuse([found("both", "x"), found("both", "x", role="callback")], Choice())

    points = "eventloop.algorithms: both and eventloop.callbacks: both"
    assert f"rename one of the entry points {points}, or switch" in str(caught.value)
    assert "pip uninstall" not in str(caught.value)


@pytest.mark.parametrize("name", ["task", "Core", "a.b", "a b", "-x", "a__b", "no:x"])
def test_a_name_that_can_not_be_typed_is_refused(name):
    """`--task.lr` is the task's, and `--a.b.c` has no one meaning."""
    with pytest.raises(PluginError, match="can't be named"):
        refuse([found(name)], Choice())


def test_all_problems_with_names_are_told_at_once():
    """And none twice."""
    wrong = [found("task"), found("mixup", "one"), found("mixup", "two")]

    with pytest.raises(PluginError, match="2 problems"):
        refuse(wrong, Choice())


def test_a_list_can_be_made_in_spite_of_problems():
    """`eventloop plugins` shows them as rows."""
    twins = [found("mixup", "one"), found("mixup", "two"), found("ema")]

    selected = choose(twins, Choice())

    assert [plugin.found for plugin in selected if plugin.failure is not None] == twins[:2]
    assert set(name_problems(selected[:2])) == set(twins[:2])
