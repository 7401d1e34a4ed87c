"""Plugins that aren't installed: files and modules, named by flags or by configuration."""

from __future__ import annotations

import dataclasses
import os
import re
import sys

import pytest

from eventloop.config.configuration import Configuration
from eventloop.config.option_types import Value
from eventloop.config.plugin_flags import Choice, Local
from eventloop.config.value_sources import Layer
from eventloop.errors import PluginError, SettingError, UsageError, raise_all
from eventloop.plugin.assemble import Discovery
from eventloop.plugin.build import build
from eventloop.plugin.choose import choose, problems_of
from eventloop.plugin.discover import discover
from eventloop.plugin.load import imported
from eventloop.plugin.local_plugins import found_local

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
    one, other = (
        found_local(Local("./watch.py:Watch")),
        found_local(Local("watch.py:LabelSmoothing")),
    )

    assert (one.name, one.role, one.origin) == ("watch", "callback", "watch (./watch.py:Watch)")
    assert (other.name, other.role) == ("smooth", "algorithm")
    assert not sys.watch_was_imported


def test_it_is_loaded_and_built_with_its_options(watch):
    """`--watch.x 3` reaches it as it would an installed one."""
    choice = Choice.parse(["./watch.py:Watch"])
    found = [one for one in discover(map(Local, choice.files))[0] if one.path]

    configuration = Configuration((Layer("flag", {"watch.x": Value("3", "flag")}),), choice)
    (chosen,) = choose(found, choice)
    plugin = build(dataclasses.replace(chosen, imported=imported(chosen.found)), configuration)

    assert (plugin.name, plugin.target.x, plugin.source) == ("watch", 3, "./watch.py:Watch")


def test_a_file_alone_is_a_module(watch):
    """As an entry point may name one."""
    module = imported(found_local(Local("watch.py")))

    assert module.Watch.__name__ == "Watch"
    assert "watch" not in sys.modules


def test_it_takes_the_place_of_the_installed_one_and_says_so(install, watch):
    """Who works on a plugin has the old one installed."""
    install("watch")
    choice = Choice.parse(["./watch.py:Watch"])
    selected = choose(discover(map(Local, choice.files))[0], choice)

    reasons = {one.found.origin: one.reason for one in selected if one.found.name == "watch"}

    assert reasons["watch (eventloop-watch 1.0)"] == "-p ./watch.py:Watch takes its place"
    assert reasons["watch (./watch.py:Watch)"] == "-p ./watch.py:Watch"


def test_two_files_may_not_have_one_name(watch):
    """Which of them `--watch.x` means would be chance."""
    (watch / "more.py").write_text("class Watch: pass")
    found = [found_local(Local("watch.py:Watch")), found_local(Local("more.py:Watch"))]

    with pytest.raises(PluginError, match="2 plugins are named 'watch'"):
        raise_all(problems_of(choose(found, Choice()), Choice()))


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
        found_local(Local(label))

    assert part in str(caught.value)


def test_a_file_that_is_not_python_is_refused(watch):
    """With the line that is wrong."""
    (watch / "watch.py").write_text("def (:")

    with pytest.raises(PluginError, match="isn't Python"):
        found_local(Local("watch.py:Watch"))


def test_a_file_that_raises_names_the_flag(watch):
    """Its author is at hand, and it can't be uninstalled."""
    (watch / "watch.py").write_text("class Watch: pass\n1 / 0")

    with pytest.raises(PluginError) as caught:
        imported(found_local(Local("watch.py:Watch")))

    assert "fix the error, or leave `-p watch.py:Watch` out" in str(caught.value)
    assert "pip" not in str(caught.value)


def test_it_was_asked_for(watch):
    """So it can't sleep in silence."""
    assert Configuration().who_insists(found_local(Local("watch.py:Watch")))


def test_a_file_can_not_be_switched_off():
    """It takes part only because it is named."""
    with pytest.raises(UsageError, match=r"switches off a plugin that isn't installed"):
        Choice.parse(["no:./watch.py:Watch"])


PROJECT = """
[tool.eventloop]
plugins = ["./watch.py:Watch", "package.hooks:Shown"]

[tool.eventloop.watch]
x = 3
"""


@pytest.fixture
def project(watch):
    """A project that names a file and a module as its plugins."""
    (watch / "pyproject.toml").write_bytes(PROJECT.replace("\n", "\r\n").encode())
    package = watch / "package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('not imported')")
    (package / "hooks.py").write_text("from package.inner import Hidden as Shown\n")
    (package / "inner.py").write_text(
        "class Hidden:\n    role = 'algorithm'\n    name = 'from-inner'\n"
    )
    return watch


def chosen(*flags, autoload=True, directory=None, config_file=None):
    """Returns what is local by name, with whether and why it takes part."""
    reason = "" if autoload else "--no-plugins"
    choice = dataclasses.replace(Choice.parse(flags), autoload=autoload, autoload_reason=reason)
    configuration = Configuration.read(
        choice=choice, directory=directory, config_file=config_file, environ={}
    )
    selected = Discovery(configuration).chosen(configuration)
    return {
        (one.found.name, one.found.entry_point.value): (one.found.role, one.status, one.reason)
        for one in selected
        if one.found.local
    }


def test_a_project_names_its_own_plugins(project):
    """They are found from any folder in it, read as their author left them, and nothing is run."""
    below = project / "deep"
    below.mkdir()
    os.chdir(below)

    found = chosen()

    assert found == {
        ("watch", "./watch.py:Watch"): ("callback", "active", ""),
        ("from-inner", "package.hooks:Shown"): ("algorithm", "active", ""),
    }
    assert not sys.watch_was_imported
    assert Configuration.read(environ={}).section("watch")["x"].value == 3


@pytest.mark.parametrize(
    ("flags", "autoload", "status"),
    [
        (["no:watch"], True, ("off", "-p no:watch")),
        ([], False, ("off", "--no-plugins")),
        (["watch"], False, ("active", "-p watch")),
    ],
)
def test_they_are_switched_as_installed_ones_are(project, flags, autoload, status):
    """Unlike one that a flag names, which takes part because it is named."""
    assert chosen(*flags, autoload=autoload)["watch", "./watch.py:Watch"][1:] == status


def test_one_of_a_flag_takes_the_place_of_the_project_s(project):
    """The command line is stronger than a file."""
    (project / "other.py").write_text("class Watch: pass\n")

    found = chosen("other.py:Watch")

    assert found["watch", "other.py:Watch"][1] == "active"
    assert found["watch", "./watch.py:Watch"][1:] == ("off", "-p other.py:Watch takes its place")


def test_a_file_of_configuration_has_its_own_list(project, tmp_path):
    """The strongest list counts, as of all rules; its paths start at its own folder."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "mine.py").write_text("class Mine: pass\n")
    (folder / "run.yaml").write_text("plugins: [mine.py:Mine]\nmine: {}\n")

    assert chosen(config_file=folder / "run.yaml") == {
        ("mine", "mine.py:Mine"): ("callback", "active", "")
    }


def test_a_module_is_imported_from_the_folder_of_the_file(project, tmp_path):
    """It needn't be installed, nor the working directory the project's."""
    (project / "package" / "__init__.py").write_text("")
    configuration = Configuration.read(environ={})
    (found,) = [one for one in Discovery(configuration).found if one.name == "from-inner"]
    os.chdir(tmp_path)

    target = imported(found)

    assert target.__name__ == "Hidden"


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (
            "./watch.py:Wach",
            r"Wach, named in pyproject.toml: the file has no 'Wach'; the closest is",
        ),
        ("./gone.py:Watch", r"there is no file"),
        ("package.gone:Watch", r"no module named 'package.gone'"),
        ("json.encoder:c_make_encoder2", r"the file has no 'c_make_encoder2'"),
    ],
)
def test_what_is_not_there_is_a_problem_and_not_the_end(project, label, message):
    """The list says so, and goes on to the others."""
    (project / "pyproject.toml").write_text(f"[tool.eventloop]\nplugins = ['{label}']\n")

    discovery = Discovery(Configuration.read(environ={}))

    (problem,) = [one for one in discovery.unreadable if label in str(one)]
    assert re.search(message, str(problem))
    assert problem.fix


def test_a_plugin_that_is_installed_is_no_local_one(project):
    """Its name in the list is a mistake with a way out."""
    (project / "pyproject.toml").write_text("[tool.eventloop]\nplugins = ['mixup']\n")

    with pytest.raises(SettingError, match=r"plugins should hold .* but has 'mixup'"):
        Configuration.read(environ={})
