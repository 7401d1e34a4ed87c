"""Plugins from files that aren't packaged."""

from __future__ import annotations

import sys

import pytest

from eventloop.config.choice import Choice
from eventloop.config.configuration import Configuration
from eventloop.config.options import Value
from eventloop.errors import PluginError, UsageError, raise_all
from eventloop.plugin.configure import configure
from eventloop.plugin.load import found_in_file, load
from eventloop.plugin.metadata import discover
from eventloop.plugin.select import problems_of, select

WATCH = """
import sys
sys.watch_was_imported = True

class Watch:
    def __init__(self, *, x: int = 1):
        self.x = x

class LabelSmoothing:
    role = "algorithm"
    name = "smooth"

class Odd:
    role = "observer"
"""


@pytest.fixture
def watch(clean, monkeypatch):
    """The working directory, with `watch.py` in it."""
    monkeypatch.setattr(sys, "watch_was_imported", False, raising=False)
    (clean / "watch.py").write_text(WATCH)
    return clean


def test_role_and_name_are_read_without_running_the_file(watch):
    """Selection comes before any import; a class says its role, a callback needn't."""
    one, other = found_in_file("./watch.py:Watch"), found_in_file("watch.py:LabelSmoothing")

    assert (one.name, one.role, one.origin) == ("watch", "callback", "watch (./watch.py:Watch)")
    assert (other.name, other.role) == ("smooth", "algorithm")
    assert not sys.watch_was_imported


def test_it_is_loaded_and_built_with_its_options(watch):
    """`--watch.x 3` reaches it as it would an installed one."""
    choice = Choice.parse(["./watch.py:Watch"])
    found = [one for one in discover(files=choice.files) if one.path]

    (loaded,), problems = load(select(found, choice))
    plugin = configure(loaded.found, loaded.target, {"x": Value("3", "flag")})

    assert problems == ()
    assert (plugin.name, plugin.target.x, plugin.source) == ("watch", 3, "./watch.py:Watch")


def test_a_file_alone_is_a_module(watch):
    """As an entry point may name one."""
    (loaded,), _ = load(select([found_in_file("watch.py")], Choice()))

    assert loaded.target.Watch.__name__ == "Watch"
    assert "watch" not in sys.modules


def test_it_takes_the_place_of_the_installed_one_and_says_so(install, watch):
    """Who works on a plugin has the old one installed."""
    install("watch")
    choice = Choice.parse(["./watch.py:Watch"])
    selected = select(discover(files=choice.files), choice)

    reasons = {one.found.origin: one.reason for one in selected if one.found.name == "watch"}

    assert reasons["watch (eventloop-watch 1.0)"] == "-p ./watch.py:Watch takes its place"
    assert reasons["watch (./watch.py:Watch)"] == "-p ./watch.py:Watch"


def test_two_files_may_not_have_one_name(watch):
    """Which of them `--watch.x` means would be chance."""
    (watch / "more.py").write_text("class Watch: pass")
    found = [found_in_file("watch.py:Watch"), found_in_file("more.py:Watch")]

    with pytest.raises(PluginError, match="2 plugins are named 'watch'"):
        raise_all(problems_of(select(found, Choice()), Choice()))


@pytest.mark.parametrize(
    ("label", "part"),
    [
        ("wtach.py:Watch", "the closest is 'watch.py'"),
        ("watch.py:Wacth", "the closest is 'Watch'"),
        ("watch.py:Odd", "role is 'observer'"),
        ("nosuch/watch.py", "doesn't exist"),
    ],
)
def test_what_is_not_there_is_refused_with_the_closest(watch, label, part):
    """Before anything is imported."""
    with pytest.raises(UsageError) as caught:
        found_in_file(label)

    assert part in str(caught.value)


def test_a_file_that_is_not_python_is_refused(watch):
    """With the line that is wrong."""
    (watch / "watch.py").write_text("def (:")

    with pytest.raises(PluginError, match="isn't Python"):
        found_in_file("watch.py:Watch")


def test_a_file_that_raises_names_the_flag(watch):
    """It can't be uninstalled."""
    (watch / "watch.py").write_text("class Watch: pass\n1 / 0")

    _, (problem,) = load(select([found_in_file("watch.py:Watch")], Choice()))

    assert "leave `-p watch.py:Watch` out" in str(problem)
    assert "pip" not in str(problem)


def test_it_was_asked_for(watch):
    """So it can't sleep in silence."""
    assert Configuration().insists_on(found_in_file("watch.py:Watch"))


def test_a_file_can_not_be_switched_off():
    """It takes part only because it is named."""
    with pytest.raises(UsageError, match="switches a file off"):
        Choice.parse(["no:./watch.py:Watch"])
